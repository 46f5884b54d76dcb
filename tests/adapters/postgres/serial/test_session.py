"""The session with the locks of running requests, on Postgres: nobody else's request ends it, and it keeps no lock."""

import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest

from adapters.postgres.benches import fresh
from keywise.adapters.postgres.serial.lock_backend import PostgresLockTurns
from keywise.core.errors import KeywiseError, UnavailableError
from keywise.core.serial.contract import Ending, Reply, TurnPolicy
from keywise.testing.conformance.benches.postgres import PostgresBenchDatabase
from keywise.testing.conformance.serial.ordering import asked, done, modes
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

LEASE_S = 60.0
LOCKS = (
    "select count(*) from pg_locks as l join pg_stat_activity as a using (pid) where l.locktype = 'advisory' "
    "and l.database = (select oid from pg_database where datname = current_database()) "
    "and a.application_name = 'keywise lock'"
)


@asynccontextmanager
async def two_owners():
    url = shared.postgres().create_database(fresh("locks"))
    policy = TurnPolicy(lease_s=LEASE_S)
    async with (
        PostgresLockTurns(PostgresBenchDatabase(url), "accept", "one", policy) as one,
        PostgresLockTurns(PostgresBenchDatabase(url), "accept", "other", policy) as other,
    ):
        yield one, other


async def locks(turns: PostgresLockTurns) -> int:
    [[count]] = await turns.database.read(LOCKS)
    return count


def test_an_id_that_another_process_asks_for_with_another_key_at_once_ends_nothing_that_runs():
    async def main() -> None:
        async with two_owners() as (one, other):
            running = (await one.answer([], 1, 1, [asked("runs", "runs", runner="one")])).turns
            connection = await asyncpg.connect(other.database._url)
            async with connection.transaction():
                # As the step of the other one, in the moment before its commit.
                await connection.execute(
                    "insert into keywise_turn_work (function, key, place, id, body, asked_by, caller, runner, wait_s, "
                    "asked_at, deadline, mode) values ($1, 'b', 1, 'same', '', '', '', 'other', 1, 0, 1e12, 'on')",
                    one._tables.number,
                )
                asking = asyncio.create_task(one.answer([], 5, 1, [asked("same", "a"), asked("next", "c")]))
                while not await one.database.read("select from pg_locks where not granted"):
                    assert not asking.done()
            answered = await asking
            await connection.close()
            told, waits = modes(answered.answers)
            assert ("another key" in told, waits) == (True, "waits")
            assert [turn.request.id for turn in answered.turns] == ["next"]
            assert one.sessions_lost == 0
            assert await one.renew([running[0].token]) == []
            assert await locks(one) == 2

    run(main())


def test_what_the_server_cannot_read_ends_nothing_that_runs():
    async def main() -> None:
        async with two_owners() as (one, _):
            await one.answer([], 1, 1, [asked("runs", "runs", runner="one")])
            with pytest.raises((KeywiseError, asyncpg.DataError)):
                await one.answer([Reply(id="runs", outcome=Ending.DONE, token=2**70)])
            assert one.sessions_lost == 0
            assert await locks(one) == 1

    run(main())


@pytest.mark.parametrize("is_told_by", ["answer", "renew"])
def test_a_lock_does_not_outlive_a_lost_turn(is_told_by):
    async def main() -> None:
        async with two_owners() as (one, other):
            [lost] = (await one.answer([], 1, 1, [asked("1", runner="one")])).turns
            other.database.move_clock(LEASE_S + 1)
            await other.take(1)
            other.database.move_clock(-LEASE_S - 1)
            if is_told_by == "answer":
                assert (await one.answer([done(lost)])).refused == ["1"]
            else:
                assert await one.renew([lost.token]) == [lost.token]
            assert await locks(one) == 0
            assert await one.renew([lost.token]) == [lost.token]
            [unrelated] = (await one.answer([], 1, 1, [asked("2", "unrelated", runner="one")])).turns
            [after] = (await other.answer([], 1, 1, [asked("3", runner="other")])).turns
            assert (one.sessions_lost, await locks(one)) == (0, 2)
            await one.answer([done(unrelated)])
            await other.answer([done(after)])
            assert await locks(one) == 0

    run(main())


def test_a_key_that_is_taken_again_before_its_loss_is_known_keeps_one_lock():
    async def main() -> None:
        async with two_owners() as (one, other):
            [lost] = (await one.answer([], 1, 1, [asked("1", runner="one")])).turns
            other.database.move_clock(LEASE_S + 1)
            await other.take(1)
            other.database.move_clock(-LEASE_S - 1)
            answered = await one.answer([done(lost)], 1, 1, [asked("2", runner="one")])
            assert answered.refused == ["1"]
            assert await locks(one) == 1
            await one.answer([done(answered.turns[0])])
            assert await locks(one) == 0

    run(main())


def test_a_statement_of_the_ledger_that_is_not_answered_ends_nothing_that_runs():
    async def main() -> None:
        async with two_owners() as (one, _):
            [running] = (await one.answer([], 1, 1, [asked("runs", "runs", runner="one")])).turns
            with pytest.raises(UnavailableError):
                await one.database.write("select pg_sleep(60)", limit_s=0.1)
            assert await one.renew([running.token]) == []
            assert (one.sessions_lost, await locks(one)) == (0, 1)

    run(main())
