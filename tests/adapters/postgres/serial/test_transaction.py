"""The transaction in which a serial function writes on Postgres: what fails is undone alone, and keywise ends it."""

import asyncio
from contextlib import suppress

import asyncpg
import pytest

import keywise
from adapters.postgres.benches import fresh
from keywise.core.errors import FailedError, LostError
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
def test_a_function_that_ends_the_transaction_by_itself_is_lost_and_the_next_one_is_fine(url, backend, statement):
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
            with pytest.raises(LostError, match="leave commit and rollback to keywise"):
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


@pytest.mark.parametrize("keys", [1, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_spoils_a_transaction_that_is_shared_fails_alone(url, backend, keys):
    """An error of the server that a function takes no notice of, and a constraint that is looked at in the end."""
    words = ["swallows", "breaks", *["good"] * 8]
    names = [f"{words[number % 10]} {number:02}" for number in range(30)]

    async def story():
        await with_table(url)
        app = keywise.App(url)

        @app.serial("f", key=lambda name: int(name[-2:]) % keys, turns=backend, run_here=True, transaction="60s")
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            await transaction.connection.execute("insert into effects values ($1)", name)
            if name.startswith("swallows"):
                with suppress(asyncpg.DivisionByZeroError):
                    await transaction.connection.execute("select 1 / 0")
            elif name.startswith("breaks"):
                await transaction.connection.execute("insert into late values (1), (1)")
            return name

        async with app:
            connection = await asyncpg.connect(url)
            await connection.execute("create table late (number integer unique deferrable initially deferred)")
            await connection.close()
            answers = await asyncio.gather(*(f(name) for name in names), return_exceptions=True)
            assert [answer for answer in answers if not isinstance(answer, FailedError)] == good
            told = {
                name.split()[0]: str(answer) for name, answer in zip(names, answers, strict=True) if name not in good
            }
            assert "went on after an error" in told["swallows"]
            assert "duplicate key" in told["breaks"]
        assert await rows_of(url) == good

    good = [name for name in names if name.startswith("good")]
    run(story())


@pytest.mark.parametrize("keys", [1, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_done_twice_after_a_function_has_committed_for_others(url, backend, keys):
    async def story():
        app = keywise.App(url)
        connection = await asyncpg.connect(url)
        await connection.execute("create table effects (name text)")
        await connection.close()

        @app.serial("f", key=lambda name: int(name) % keys, turns=backend, run_here=True, transaction="60s")
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            await transaction.connection.execute("insert into effects values ($1)", name)
            if name == "15":
                await transaction.connection.execute("commit")
            return name

        async with app:
            answers = await asyncio.gather(*(f(str(number)) for number in range(30)), return_exceptions=True)
            assert {type(answer) for answer in answers} <= {str, LostError}
            rows = await rows_of(url)
            assert len(set(rows)) == len(rows), "something was done twice"
            assert {answer for answer in answers if isinstance(answer, str)} <= set(rows)

    run(story())


def test_a_search_path_that_a_function_without_a_turn_sets_ends_with_its_call(url):
    paths: list[str] = []

    async def story():
        await with_table(url)
        app = keywise.App(url)

        @app.serial("f", key=lambda name: name, mode="off")
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            paths.append(await transaction.connection.fetchval("show search_path"))
            await transaction.connection.execute("insert into effects values ($1)", name)
            await transaction.connection.execute("set search_path to nowhere")
            return name

        async with app:
            assert [await f(name) for name in ("one", "two")] == ["one", "two"]
        assert await rows_of(url) == ["one", "two"]
        assert paths == ['"$user", public'] * 2

    run(story())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_leaves_another_search_path_fails_alone_and_is_told_why(url, backend):
    """To set it back for every call would cost each a round trip."""

    async def story():
        await with_table(url)
        app = keywise.App(url)

        @app.serial("f", key=lambda name: "k", turns=backend, run_here=True)
        async def f(claim: keywise.Claim, name: str, transaction: keywise.Transaction) -> str:
            await transaction.connection.execute("insert into effects values ($1)", name)
            if name == "bad":
                await transaction.connection.execute("set search_path to nowhere")
            return name

        async with app:
            answers = await asyncio.gather(f("a"), f("bad"), f("b"), return_exceptions=True)
            assert (answers[0], answers[2], await f("c")) == ("a", "b", "c")
            assert isinstance(answers[1], FailedError) and "changed search_path" in str(answers[1])
        assert await rows_of(url) == ["a", "b", "c"]

    run(story())
