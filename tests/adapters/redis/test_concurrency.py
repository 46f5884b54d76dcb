"""Eight connections to one Redis never hold a key together, and one history of each key explains all answers."""

import pytest

from adapters.linearizability import agree, claimed
from adapters.redis.benches import fresh
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.entry import LedgerPolicy
from running import run
from servers import shared

pytestmark = pytest.mark.server("redis")


@pytest.mark.parametrize("policy", [LedgerPolicy(), LedgerPolicy(intents=True)], ids=["safe", "plain"])
def test_connections_that_work_on_the_same_keys_agree_on_one_history(policy):
    name = fresh("scope")

    async def opened(stack) -> RedisLedger:
        return await stack.enter_async_context(RedisLedger(RedisDatabase(shared.redis().url), name, policy))

    run(agree(opened, claimed), limit_s=100)
