"""The ledger in Redis: bytes of memory that an idle key needs, and claims that are granted and committed per second."""

import asyncio
import statistics
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import islice

from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Commit, Entry, LeaseTerms, LedgerPolicy
from keywise.core.transfer import TransferPage
from keywise.testing.conformance.benches.redis import remove_scope

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.redis import RedisServer, redis_server

TARGET_BYTES = 60
PER_S, PER_S_AT_KEYS = 30_000, 100_000
"""Claimed and committed, while so many keys are known."""
BATCH = 500
ADD_AT_ONCE = 2_000
CLAIMED = 20_000
TERMS = LeaseTerms("bench", 60.0)
MICROSECONDS = 1_700_000_000_000_000
"""Versions as most people have them."""


def measure(scale: Scale) -> list[Figure]:
    """On a server of its own with an append-only file, at two sizes."""
    try:
        with redis_server(None) as server:
            return [
                figure
                for keys in (scale.ledger_keys, 10 * scale.ledger_keys)
                for figure in asyncio.run(_measure(server, keys, scale.rounds))
            ]
    except MissingServerError as error:
        return [Figure("idle ledger entry in Redis", None, "bytes/key", str(error), at_most=TARGET_BYTES)]


async def _measure(server: RedisServer, count: int, rounds: int) -> list[Figure]:
    keys = [str(uuid.uuid4()) for _ in range(count)]
    async with RedisLedger(RedisDatabase(server.url), f"bench {count}", LedgerPolicy()) as ledger:
        await _marked(ledger, ["warm"], 1)
        before = _used(server)
        for batch in _batches(keys, ADD_AT_ONCE):
            entry = Entry(order_of(MICROSECONDS), updated_at=time.time())
            await ledger.transfer.add(TransferPage(entries=[(key, entry) for key in batch]))
        size = (_used(server) - before) / count
        some = keys[:CLAIMED]
        turns = [len(some) / await _marked(ledger, some, MICROSECONDS + 1 + turn) for turn in range(rounds)]
        await remove_scope(ledger._scope)
    note = f"{count:,} uuid keys, difference of used_memory"
    work = f"batches of {BATCH}, {count:,} keys known, no source and no sink; median of {rounds}"
    target = PER_S if count == PER_S_AT_KEYS else None
    return [
        Figure("idle ledger entry in Redis", size, "bytes/key", note, at_most=TARGET_BYTES),
        Figure(
            "claimed and committed in Redis",
            statistics.median(turns),
            "changes/s",
            work,
            at_least=target,
            detail={"turns": turns},
        ),
    ]


async def _marked(ledger: RedisLedger, keys: Sequence[str], version: int) -> float:
    """Claim and commit all keys at a version; the seconds that it took."""
    began = time.monotonic()
    for batch in _batches(keys, BATCH):
        results = await ledger.claim([ChangeHeader(key, order_of(version)) for key in batch], TERMS)
        assert len(results.granted) == len(batch)
        assert await ledger.commit([Commit(claim) for claim in results.granted]) == []
    return time.monotonic() - began


def _batches(keys: Sequence[str], size: int) -> Iterator[list[str]]:
    rest = iter(keys)
    while batch := list(islice(rest, size)):
        yield batch


def _used(server: RedisServer) -> int:
    told = dict(line.partition(":")[::2] for line in server.command("INFO", "memory").splitlines())
    return int(told["used_memory"])
