"""The transaction in which a serial function writes on Postgres: what fails is undone alone, and keywise ends it."""

import asyncio

import asyncpg
import pytest

import keywise
from conformance.postgres_benches import fresh
from keywise.errors import FailedError
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

BACKENDS = ("postgres-lock", "postgres-queue")
BREAKS = ("commit", "rollback", "commit; begin", "rollback; begin; savepoint other")


@pytest.fixture
def url() -> str:
    """A new, empty database."""
    return shared.postgres().create_database(fresh("serial"))


async def rows_of(url: str) -> list[str]:
    connection = await asyncpg.connect(url)
    try:
        return [name for (name,) in await connection.fetch("select name from effects order by name")]
    finally:
        await connection.close()


async def with_table(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("create table effects (name text primary key)")
    await connection.close()


@pytest.mark.parametrize("keys", [1, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fails_is_undone_alone_and_the_rest_stands(url, backend, keys):
    names = [f"{'bad' if number % 3 == 0 else 'good'} {number:02}" for number in range(30)]

    async def story():
        await with_table(url)
        app = keywise.App(url)

        @app.serial("f", key=lambda name: int(name[-2:]) % keys, turns=backend, run_here=True)
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            await transaction.connection.execute("insert into effects values ($1)", name)
            if name.startswith("bad"):
                # An error of the server, after which nothing else can be done without a savepoint.
                await transaction.connection.execute("insert into effects values ($1)", name)
            return name

        async with app:
            answers = await asyncio.gather(*(f(name) for name in names), return_exceptions=True)
            assert [answer for answer in answers if not isinstance(answer, FailedError)] == good
            assert all("duplicate key" in str(answer) for answer in answers if isinstance(answer, FailedError))
        assert await rows_of(url) == good

    good = sorted(name for name in names if name.startswith("good"))
    run(story())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("statement", BREAKS)
def test_a_function_that_ends_the_transaction_by_itself_fails_and_the_next_one_is_fine(url, backend, statement):
    async def story():
        await with_table(url)
        app = keywise.App(url)

        @app.serial("f", key=lambda name: "k", turns=backend, run_here=True)
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            if name == "bad":
                await transaction.connection.execute(statement)
            await transaction.connection.execute("insert into effects values ($1)", name)
            return name

        async with app:
            with pytest.raises(FailedError, match="leave commit and rollback to keywise"):
                await f("bad")
            assert await f("good") == "good"
        assert "good" in await rows_of(url)

    run(story())


def test_calls_of_several_keys_share_a_transaction_and_its_locks(url):
    async def story():
        app = keywise.App(url)
        together: dict[int, set[str]] = {}

        @app.serial("f", key=str, turns="postgres-lock", transaction="60s")
        async def f(claim: keywise.Claim, key: str, transaction: keywise.Transaction) -> int:
            number = await transaction.connection.fetchval("select txid_current()")
            together.setdefault(number, set()).add(key)
            locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
            return await transaction.connection.fetchval(locks)

        async with app:
            for _ in range(5):
                held = await asyncio.gather(*(f(f"k{number}") for number in range(12)))
        assert max(held) == max(map(len, list(together.values())[-3:])) > 1

    run(story())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("breaks", [["k5"], ["k2", "k5", "k9"]])
def test_if_a_shared_transaction_is_lost_each_call_is_run_alone_and_once(url, backend, breaks):
    names = [f"k{number}" for number in range(12)]
    broken: list[str] = []

    async def story():
        await with_table(url)
        app = keywise.App(url)

        @app.serial("f", key=str, turns=backend, run_here=True, transaction="60s")
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            await transaction.connection.execute("insert into effects values ($1)", name)
            if name in breaks and name not in broken:
                broken.append(name)
                await transaction.connection.execute("select pg_terminate_backend(pg_backend_pid())")
            return name

        async with app:
            answers = await asyncio.gather(*map(f, names), return_exceptions=True)
            told = [name for name in names if name in answers]
            assert told == await rows_of_in_order(url, names), "what is told is what stands"
            assert set(names) - set(told) <= set(breaks) == set(broken)

    run(story())


async def rows_of_in_order(url: str, names: list[str]) -> list[str]:
    rows = await rows_of(url)
    return [name for name in names if name in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_from_within_transactions_are_refused_and_do_not_empty_the_pool(url, backend):
    async def story():
        app = keywise.App(url)

        @app.serial("f", key=lambda request: request["key"], turns=backend, run_here=True, concurrency=64)
        async def f(claim: keywise.Claim, request: dict, transaction: keywise.Transaction) -> str:
            return await f({"key": request["inner"]}) if "inner" in request else "done"

        async with app, asyncio.timeout(30):
            outer = [f({"key": f"outer {number}", "inner": f"inner {number}"}) for number in range(16)]
            answers = await asyncio.gather(*outer, f({"key": "other"}), return_exceptions=True)
            assert answers.pop() == "done"
            assert all("within a transaction of its own store" in str(answer) for answer in answers)

    run(story())
