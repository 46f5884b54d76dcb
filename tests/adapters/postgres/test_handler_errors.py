"""A database error that a handler runs into is a failure of its change; only a lost connection is an outage."""

import asyncio

import asyncpg
import pytest

from adapters.postgres.handler_shop import handler_shop, put
from keywise import Change, Transaction
from keywise.core.errors import UnavailableError
from running import run
from servers import shared

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

NEIGHBOURS = ["a", "b", "c", "d"]


async def wait_for_a_lock(change: Change[dict], transaction: Transaction) -> None:
    await transaction.connection.execute("select 1 from taken for update nowait")


async def take_too_long(change: Change[dict], transaction: Transaction) -> None:
    await transaction.connection.execute("set local statement_timeout = '20ms'; select pg_sleep(60)")


async def wait_too_long_for_a_lock(change: Change[dict], transaction: Transaction) -> None:
    await transaction.connection.execute("set local lock_timeout = '20ms'; select 1 from taken for update")


async def do_two_at_once(change: Change[dict], transaction: Transaction) -> None:
    connection = transaction.connection
    await asyncio.gather(connection.execute("select pg_sleep(0.2)"), connection.execute("select 2"))


async def leave_one_running(change: Change[dict], transaction: Transaction) -> None:
    running = asyncio.create_task(transaction.connection.execute("select pg_sleep(0.2)"))
    await asyncio.wait([running], timeout=0.01)
    running.add_done_callback(lambda task: task.exception())


async def lose_a_connection_of_its_own(change: Change[dict], transaction: Transaction) -> None:
    own = await asyncpg.connect(shared.postgres().url)
    try:
        await own.execute("select pg_terminate_backend(pg_backend_pid())")
    finally:
        own.terminate()


async def ask_a_service_that_is_away(change: Change[dict], transaction: Transaction) -> None:
    raise UnavailableError("the other queue cannot be reached")


async def run_out_of_memory_for_a_query(change: Change[dict], transaction: Transaction) -> None:
    await transaction.connection.execute("do $$ begin raise exception 'too big' using errcode = '53200'; end $$")


async def go_on_after_an_error(change: Change[dict], transaction: Transaction) -> None:
    with pytest.raises(asyncpg.UndefinedTableError):
        await transaction.connection.execute("select * from nowhere")


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        (wait_for_a_lock, "LockNotAvailableError"),
        (wait_too_long_for_a_lock, "LockNotAvailableError"),
        (take_too_long, "QueryCanceledError"),
        (do_two_at_once, "another operation is in progress"),
        (leave_one_running, "another operation is in progress"),
        (lose_a_connection_of_its_own, "ConnectionDoesNotExistError"),
        (ask_a_service_that_is_away, "the other queue cannot be reached"),
        (run_out_of_memory_for_a_query, "OutOfMemoryError"),
        (go_on_after_an_error, "went on after an error"),
    ],
)
def test_an_error_of_the_handlers_own_costs_attempts_and_ends_as_a_dead_letter(does, cause):
    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        if change.key == "bad":
            await does(change, transaction)

    async def main() -> None:
        async with handler_shop(handle, attempts_max=3) as shop:
            await shop.beside.execute("create table taken as select 1 as one")
            async with shop.beside.transaction():
                await shop.beside.execute("select 1 from taken for update")
                await shop.send(*NEIGHBOURS, "bad")
                await shop.until(lambda: shop.failed["bad"] == 3, "three attempts")
            await shop.until_empty()
            [letter] = await shop.letters()
            assert (letter.key, shop.outages) == ("bad", [])
            assert cause in letter.cause
            assert await shop.stored() == dict.fromkeys(NEIGHBOURS, 1)
            # Nobody pays for a neighbour.
            assert shop.failed == {"bad": 3}

    run(main(), limit_s=60)


@pytest.mark.parametrize("is_at_commit", [False, True])
def test_a_serialization_failure_runs_the_slice_again_one_by_one_and_only_a_change_alone_pays(is_at_commit):
    """In company, the server may blame one change for what another did."""

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        await transaction.connection.execute("insert into company (key) values ($1)", change.key)
        when = "unless_alone" if is_at_commit else "now_unless_alone"
        await transaction.connection.execute(f"insert into {when} values ($1)", change.key)

    async def main() -> None:
        async with handler_shop(handle, attempts_max=2) as shop:
            await shop.beside.execute(REFUSE_COMPANY)
            await shop.send(*NEIGHBOURS, "always")
            await shop.until_empty()
            [letter] = await shop.letters()
            assert (letter.key, shop.failed, shop.outages) == ("always", {"always": 2}, [])
            assert "SerializationError" in letter.cause
            assert await shop.stored() == dict.fromkeys(NEIGHBOURS, 1)

    run(main(), limit_s=60)


REFUSE_COMPANY = """
    create table company (key text, at timestamptz default transaction_timestamp());
    create table unless_alone (key text);
    create table now_unless_alone (key text);
    create function refuse() returns trigger language plpgsql as $$ begin
        if new.key = 'always' or (select count(*) from company where at = transaction_timestamp()) > 1 then
            raise exception 'could not serialize access' using errcode = '40001';
        end if;
        return null;
    end $$;
    create constraint trigger late after insert on unless_alone deferrable initially deferred
        for each row execute function refuse();
    create trigger early after insert on now_unless_alone for each row execute function refuse();
"""


def test_a_deadlock_with_a_neighbours_lock_costs_nobody_an_attempt():
    """The slice holds the first row while it waits for the second; another program waits the other way round."""
    begun: list[str] = []
    met = asyncio.Event()

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        if change.key not in begun:
            begun.append(change.key)
        await transaction.connection.execute(f"select 1 from row{begun.index(change.key)} for update")
        await put(change, transaction)
        met.set()

    async def main() -> None:
        async with handler_shop(handle, settings={"deadlock_timeout": "100ms"}) as shop:
            await shop.beside.execute("create table row0 as select 0; create table row1 as select 1")
            async with shop.beside.transaction():
                # It looks for deadlocks later than the slice, which is therefore rolled back.
                await shop.beside.execute("set local deadlock_timeout = '60s'; select 1 from row1 for update")
                await shop.send("a", "b")
                await met.wait()
                await shop.beside.execute("select 1 from row0 for update")
            await shop.until_empty()
            assert (shop.failed, shop.outages, await shop.letters()) == ({}, [], [])
            assert await shop.stored() == {"a": 1, "b": 1}
            assert shop.calls[begun[0]] == 2

    run(main(), limit_s=60)


def test_a_deferred_constraint_that_fails_at_the_commit_is_a_failure_of_its_change():
    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        if change.key == "bad":
            await transaction.connection.execute("insert into child values ('nobody')")

    async def main() -> None:
        async with handler_shop(handle, attempts_max=2) as shop:
            await shop.beside.execute("create table child (key text references stock deferrable initially deferred)")
            await shop.send(*NEIGHBOURS, "bad")
            await shop.until_empty()
            [letter] = await shop.letters()
            assert (letter.key, shop.failed, shop.outages) == ("bad", {"bad": 2}, [])
            assert "ForeignKeyViolationError" in letter.cause
            assert await shop.stored() == dict.fromkeys(NEIGHBOURS, 1)

    run(main(), limit_s=60)


def test_a_change_that_loses_its_connection_again_and_again_ends_as_a_dead_letter():
    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        if change.key == "bad":
            await transaction.connection.execute("select pg_terminate_backend(pg_backend_pid())")

    async def main() -> None:
        async with handler_shop(handle, attempts_max=3) as shop:
            await shop.send(*NEIGHBOURS, "bad")
            for version in range(2, 50):
                # Other changes succeed meanwhile: so the database is there, and the change is to blame.
                if shop.failed["bad"] == 3:
                    break
                await shop.send(*NEIGHBOURS, version=version)
                calls = shop.calls["bad"]
                await shop.until(lambda calls=calls: shop.calls["bad"] > calls or shop.failed["bad"] == 3, "a try")
            await shop.until_empty()
            [letter] = await shop.letters()
            assert letter.key == "bad"
            assert shop.failed == {"bad": 3}
            assert set(await shop.stored()) == set(NEIGHBOURS)

    run(main(), limit_s=60)


@pytest.mark.parametrize("how", ["set local", "set"])
def test_a_search_path_that_a_handler_sets_ends_with_its_change(how):
    """Neither the tables of keywise nor the next handlers see it, in this transaction or a later one."""
    paths: set[str] = set()

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        paths.add(await transaction.connection.fetchval("show search_path"))
        await put(change, transaction)
        await transaction.connection.execute(f"{how} search_path to nowhere")

    async def main() -> None:
        async with handler_shop(handle, *NEIGHBOURS, attempts_max=2) as shop:
            await shop.until_empty()
            await shop.send(*NEIGHBOURS, version=2)
            await shop.until_empty()
            assert (shop.failed, shop.outages, await shop.letters()) == ({}, [], [])
            assert await shop.stored() == dict.fromkeys(NEIGHBOURS, 2)
        assert paths == {'"$user", public'}

    run(main(), limit_s=60)


def test_a_connection_that_is_gone_costs_no_attempt():
    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        if shop_calls[0] < 5:
            shop_calls[0] += 1
            await transaction.connection.execute("select pg_terminate_backend(pg_backend_pid())")

    shop_calls = [0]

    async def main() -> None:
        async with handler_shop(handle, *NEIGHBOURS, attempts_max=2) as shop:
            await shop.until_empty()
            assert (shop.failed, await shop.letters()) == ({}, [])
            assert len(shop.outages) >= 5
            assert await shop.stored() == dict.fromkeys(NEIGHBOURS, 1)

    run(main(), limit_s=60)
