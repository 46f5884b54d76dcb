"""A pipeline that has moved answers as if it had stayed, from any ledger to any other."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from adapters.benches import LEDGERS, two_databases
from adapters.postgres.benches import LEDGERS as POSTGRES
from adapters.postgres.benches import fresh, two_openings
from adapters.redis.benches import LEDGERS as REDIS
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Pause
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry, LeaseTerms, LedgerPolicy, Level
from keywise.core.history import HistoryRecord
from keywise.core.limits import Rate
from keywise.core.transfer import TransferPage
from keywise.operate.admin import AuditNote
from keywise.operate.copy_ledger import LedgerCopy, LedgerHandle, TargetState, carried
from keywise.testing.conformance.claims import PLAIN, LedgerBench
from keywise.testing.conformance.dumps import filled, joined, pages_of
from keywise.testing.conformance.random_histories import LEASE_S, REDELIVERY_S, RETENTION_S, RandomHistory, Twins
from running import run

MAKERS = {
    name: make for files in (LEDGERS, POSTGRES, REDIS) for makes in files.values() for name, make in makes.items()
}
PAIRS = [
    pytest.param(
        one,
        other,
        id=f"{one} to {other}",
        marks=[pytest.mark.server(server) for server in ("postgres", "redis") if server in f"{one} {other}"],
    )
    for one in MAKERS
    for other in MAKERS
]
POLICY = LedgerPolicy(True, REDELIVERY_S, RETENTION_S)
TERMS = LeaseTerms("w1", 60.0)


def move(one: LedgerBench, other: LedgerBench) -> LedgerCopy:
    return LedgerCopy(
        "scope", LedgerHandle("one", one.ledger), LedgerHandle("other", other.ledger), lambda what, done: None
    )


async def moved(one: LedgerBench, other: LedgerBench) -> None:
    """Pause, copy, and go on at the other place."""
    await one.ledger.control_store.pause(Pause(EVERYTHING, True))
    await move(one, other).run(await move(one, other).plan(), AuditNote("ada"))
    assert (await move(one, other).plan()).found is TargetState.SAME
    await other.another.control_store.resume(EVERYTHING, True)


@asynccontextmanager
async def both(one: str, other: str, policy: LedgerPolicy):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MAKERS[name](policy)) for name in (one, other)]


async def everything(bench: LedgerBench, since: float = 0.0, shift_s: float = 0.0) -> TransferPage:
    return carried(joined(await pages_of(bench.another.transfer, 100)), since, shift_s)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_ledger_that_was_copied_holds_and_answers_the_same(one, other):
    async def main() -> None:
        async with both(one, other, PLAIN) as (here, there):
            await filled(here)
            await here.ledger.control_store.pause(Pause(EVERYTHING, True))
            plan = await move(here, there).plan()
            copied = await move(here, there).run(plan, AuditNote("ada"))
            mine = await everything(here, plan.since, plan.shift_s)
            theirs = await everything(there)
            assert theirs.entries == mine.entries and copied.keys.count == len(mine.entries) == 17
            assert theirs.dead_letters == mine.dead_letters
            assert theirs.records[:-1] == mine.records[:-1]
            assert (await move(here, there).plan()).found is TargetState.SAME
            await there.ledger.control_store.resume(EVERYTHING, True)
            assert sorted(await there.ledger.suspects(100, -1e9)) == sorted(await here.ledger.suspects(100, -1e9)) != []
            headers = [ChangeHeader(key, order_of(version)) for key, _ in mine.entries for version in (1, 2**41)]
            for header in headers:
                [asked, again] = [await bench.ask_for(header, "w7", level=Level.ALONE) for bench in (here, there)]
                # What would be granted is paused in the place that was left.
                if getattr(asked, "reason", "") != "paused":
                    assert getattr(asked, "reason", None) == getattr(again, "reason", None), header

    run(main(), limit_s=100)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_key_that_has_used_up_its_rate_is_limited_where_it_comes_to(one, other):
    async def main() -> None:
        async with both(one, other, LedgerPolicy(rate=Rate(1, per=600.0))) as (here, there):
            await here.ledger.release((await here.ledger.claim([ChangeHeader("a", order_of(1))], TERMS)).granted)
            await moved(here, there)
            refused = (await there.ledger.claim([ChangeHeader("a", order_of(1))], TERMS)).refused
            assert refused["a"].reason == "limited" and 590.0 < refused["a"].wait_s < 602.0

    run(main())


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_random_histories_leave_behind_is_carried_as_it_is(one, other):
    async def main() -> None:
        async with both(one, other, POLICY) as (here, there):
            twins = Twins(here, POLICY)
            for seed in range(12):
                await RandomHistory(twins, seed).run()
            here.advance(LEASE_S + 1.0)
            await moved(here, there)
            assert await there.ledger.counts() == await here.ledger.counts()

    run(main(), limit_s=100)


@asynccontextmanager
async def neighbours(kind: str):
    """Two pipelines in one store."""
    if kind == "memory":
        database = MemoryDatabase()
        yield [MemoryLedger(database, name, PLAIN) for name in ("one", "other")]
        return
    async with AsyncExitStack() as stack:
        if kind == "sqlite":
            database, make = (await stack.enter_async_context(two_databases()))[0], SqliteLedger
        else:
            database, make = (await stack.enter_async_context(two_openings()))[0], PostgresLedger
        yield [await stack.enter_async_context(make(database, fresh(name), PLAIN)) for name in ("one", "other")]


@pytest.mark.parametrize("kind", ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.server("postgres"))])
def test_pipelines_in_one_store_are_copied_and_cleared_each_for_itself(kind):
    async def main() -> None:
        async with neighbours(kind) as (one, other):
            contents = []
            for ledger, version in ((one, 1), (other, 2)):
                order = order_of(version)
                line, letter = HistoryRecord(1.0, "stale", "a", version), DeadLetter("cause", b"", "a", version)
                entries = [("a", Entry(order, updated_at=1.0)), ("b", Entry(order, suspicions=1, rate_at=2.0**40))]
                # Charged for a rate that the pipeline has no more.
                entries.append(("c", Entry(rate_at=2.0**40)))
                contents.append(TransferPage(entries=entries, dead_letters=[(1.0, letter)], records=[line]))
                await ledger.transfer.add(contents[-1])
                await ledger.transfer.set_controls(Controls(version))
            for ledger, content in ((one, contents[0]), (other, contents[1])):
                assert joined(await pages_of(ledger.transfer)) == content
            await one.transfer.clear()
            assert joined(await pages_of(one.transfer)) == TransferPage([], [], [])
            assert joined(await pages_of(other.transfer)) == contents[1]
            assert [(await one.control_store.controls()).era, (await other.control_store.controls()).era] == [1, 2]

    run(main())
