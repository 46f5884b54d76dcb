"""The shards of a run belong to that run: a worker of an earlier one cannot take them."""

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core.entry import Claim, LedgerPolicy, Refusal
from keywise.core.origin import Shard
from keywise.core.settings import Settings
from keywise.reindex.shards import ShardLedger, ShardProgress, shard_key
from running import run


def test_a_worker_of_an_earlier_run_gets_no_shard_of_a_later_one():
    """It would move the cursor of the later run behind rows that it has written elsewhere."""
    shards = ShardLedger(MemoryLedger(MemoryDatabase(), "shop/reindex", LedgerPolicy()), "w1", Settings())

    async def story():
        await shards.write([ShardProgress(Shard("all"))], 1, 1)
        await shards.write([ShardProgress(Shard("all"))], 2, 1)
        return await shards.claim(shard_key(0), 1), await shards.claim(shard_key(0), 2)

    late, current = run(story())
    assert isinstance(late, Refusal)
    assert isinstance(current, Claim)
