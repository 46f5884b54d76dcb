"""A process that is stopped inside of a transaction of a serial function, on Postgres, keeps its lease alone."""

import asyncio
import re
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from adapters.postgres.benches import fresh
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.serial.lock_backend import PostgresLockTurns
from keywise.adapters.postgres.serial.queue_backend import PostgresQueueTurns
from keywise.core.errors import UnavailableError
from keywise.core.serial.contract import TurnPolicy
from keywise.testing.conformance.serial.ordering import asked, done
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

KINDS = pytest.mark.parametrize("kind", [PostgresLockTurns, PostgresQueueTurns])
LEASE_S = 1.0
ROLE = "keywise_weak"
INSERT = "insert into effects values ('the same row')"


@asynccontextmanager
async def two_owners(kind: type, url: str):
    """Of one serial function; what is written in its transactions is a row of the same table."""
    connection = await asyncpg.connect(url)
    await connection.execute("create table effects (name text primary key)")
    await connection.close()
    policy = TurnPolicy(lease_s=LEASE_S, atomic=True)
    async with (
        kind(PostgresDatabase(url), "accept", "one", policy) as one,
        kind(PostgresDatabase(url), "accept", "other", policy) as other,
    ):
        yield one, other


@pytest.fixture
def url() -> str:
    return shared.postgres().create_database(fresh("stopped"))


@KINDS
def test_who_is_stopped_in_the_midst_of_its_work_holds_up_its_key_for_its_lease_alone(url, kind):
    async def main() -> None:
        async with two_owners(kind, url) as (one, other):
            await one.ask([asked("1")])
            [turn] = await one.take(1)
            async with left_open(one.transaction(turn.token)) as transaction:
                await transaction.connection.execute(INSERT)
                async with asyncio.timeout(LEASE_S + 10):
                    while not (again := await other.take(1)):
                        await other.wait(0.1)
                    async with other.transaction(again[0].token) as theirs:
                        await theirs.connection.execute(INSERT)
                        assert (await theirs.answer([done(again[0])])).refused == []
                with pytest.raises((UnavailableError, asyncpg.PostgresError, asyncpg.InterfaceError)):
                    await transaction.answer([done(turn)])

    run(main())


@KINDS
def test_who_is_stopped_before_its_commit_holds_up_nobody_for_longer_than_its_lease(url, kind):
    async def main() -> None:
        async with two_owners(kind, url) as (one, other):
            await one.ask([asked("1")])
            [turn] = await one.take(1)
            async with left_open(one.transaction(turn.token)) as transaction:
                assert (await transaction.answer([done(turn)])).refused == []
                async with asyncio.timeout(LEASE_S + 10):
                    # It has to wait for the row of its key, and all that is asked for with it.
                    assert await other.ask([asked("2"), asked("3", "another key")]) == [None, None]
                    while not (again := await other.take(1)):
                        await other.wait(0.1)
                assert [one.request.id for one in again] in (["1"], ["3"])

    run(main())


def test_a_session_with_the_lock_of_a_lost_owner_is_ended_by_a_transaction_too(url):
    """As after a deploy that gives a function a transaction."""

    async def main() -> None:
        plain, atomic = (TurnPolicy(lease_s=LEASE_S, atomic=atomic) for atomic in (False, True))
        async with (
            PostgresLockTurns(PostgresDatabase(url), "accept", "old", plain) as old,
            PostgresLockTurns(PostgresDatabase(url), "accept", "new", atomic) as new,
        ):
            await old.ask([asked("1")])
            await old.take(1)
            await new.ask([asked("2")])
            async with asyncio.timeout(LEASE_S + 10):
                while not (turns := await new.take(1)):
                    await new.wait(0.1)
                async with new.transaction(turns[0].token) as transaction:
                    await transaction.answer([done(turns[0])])

    run(main())


@KINDS
def test_a_user_who_may_not_end_sessions_of_others_goes_on_with_other_keys(url, kind):
    async def main() -> None:
        async with two_owners(kind, url) as (one, _):
            await one.database.write(f"create role {ROLE} login")
            for what in ("tables", "sequences"):
                await one.database.write(f"grant all on all {what} in schema public to {ROLE}")
            weak = PostgresDatabase(re.sub("//[^@/]*@", f"//{ROLE}@", url))
            async with kind(weak, "accept", "weak", TurnPolicy(lease_s=LEASE_S, atomic=True)) as other:
                await one.ask([asked("1")])
                [turn] = await one.take(1)
                async with left_open(one.transaction(turn.token)):
                    await other.ask([asked("2", "another key")])
                    async with asyncio.timeout(LEASE_S + 10):
                        taken = {turn.request.id for turn in await other.take(5)}
                        while "1" not in taken:
                            await other.wait(0.1)
                            taken |= {turn.request.id for turn in await other.take(5)}
                    assert taken == {"1", "2"}
            await one.database.write(f"drop owned by {ROLE}")
            await one.database.write(f"drop role {ROLE}")

    run(main())


@asynccontextmanager
async def left_open(transaction):
    """One that is not there any more when it is to be committed."""
    try:
        yield await transaction.__aenter__()
    finally:
        with suppress(UnavailableError):
            await transaction.__aexit__(None, None, None)
