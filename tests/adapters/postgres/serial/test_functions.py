"""Serial functions on a real Postgres: lost sessions, foreign locks, many callers, and no connection too many."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager

import asyncpg
import pytest

import keywise
from adapters.postgres.benches import fresh
from keywise.adapters.postgres.database import READERS_MAX, STEPPERS_MAX, WRITERS_MAX
from keywise.core.errors import ExpiredError, KeywiseError, UnansweredError
from keywise.core.events import SessionLost
from running import run, scaled
from servers import shared

pytestmark = pytest.mark.server("postgres")

CONNECTIONS_MAX = WRITERS_MAX + READERS_MAX + STEPPERS_MAX + 2
"""With the one that listens, and the one with the locks."""
BACKENDS = ("postgres-lock", "postgres-queue")


@pytest.fixture
def url() -> str:
    """A new, empty database."""
    return shared.postgres().create_database(fresh("serial"))


class Watch:
    """What the server says of a database, seen over a connection of its own."""

    def __init__(self, connection) -> None:
        self.connection = connection

    async def connections(self, application: str = "keywise%") -> list[int]:
        rows = await self.connection.fetch(
            "select pid from pg_stat_activity where datname = current_database() and application_name like $1",
            application,
        )
        return [pid for (pid,) in rows]

    async def locks(self) -> int:
        """Advisory locks in this database."""
        return await self.connection.fetchval(
            "select count(*) from pg_locks where locktype = 'advisory' and database = "
            "(select oid from pg_database where datname = current_database())"
        )

    async def terminate_locks(self) -> int:
        sessions = await self.connections("keywise lock")
        for pid in sessions:
            await self.connection.execute("select pg_terminate_backend($1)", pid)
        return len(sessions)


@asynccontextmanager
async def watching(url: str):
    connection = await asyncpg.connect(url)
    try:
        yield Watch(connection)
    finally:
        await connection.close()


async def until(condition, limit_s: float = 10.0) -> None:
    """Ask the server again and again."""
    ends = asyncio.get_running_loop().time() + scaled(limit_s)
    while not await condition():
        assert asyncio.get_running_loop().time() < ends, "it did not come about"


class Work:
    """A function that stops in the middle until it is let go, and knows what became of it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.broken_off = asyncio.Event()
        self.ran: list[str] = []

    async def __call__(self, request: str) -> str:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.broken_off.set()
            raise
        self.ran.append(request)
        return f"yes to {request}"


def app_with(url: str, work: Work, *, is_atomic: bool = False, **options):
    app = keywise.App(url)
    seen: list = []
    app.observers.append(seen.append)

    @app.serial("accept", key=lambda request: request.partition(" ")[0], run_here=True, **options)
    async def accept(claim: keywise.Claim, request: str) -> str:
        return await work(request)

    @app.serial("accept within", key=lambda request: request.partition(" ")[0], run_here=True, **options)
    async def accept_within(claim: keywise.Claim, request: str, transaction: keywise.Transaction) -> str:
        return await work(request)

    return app, accept_within if is_atomic else accept, seen


def test_a_lost_session_breaks_off_what_runs_within_a_second(url, tmp_path):
    async def main() -> None:
        work = Work()
        app, accept, seen = app_with(url, work, timeout="20s")
        async with watching(url) as watch, app:
            first = asyncio.create_task(accept("a 1"))
            await work.begun.wait()
            assert await watch.locks() == 1
            assert await watch.terminate_locks() == 1
            async with asyncio.timeout(1.0):
                await work.broken_off.wait()
            with pytest.raises(KeywiseError, match="its turn was lost"):
                await first
            assert [event.losses for event in seen if isinstance(event, SessionLost)] == [1]
            work.may_end.set()
            assert await accept("a 2") == "yes to a 2"
            assert work.ran == ["a 2"], "what was broken off was accepted too"
            assert await app.serials["accept"]._turns.operator.sessions_lost() == 1
        async with watching(url) as watch:
            await until(lambda: _is_none(watch.connections()))
            assert await watch.locks() == 0

    run(main())
    (tmp_path / "clinic.py").write_text(
        f"import keywise\napp = keywise.App({url!r})\n"
        "@app.serial('accept', key=str)\nasync def accept(claim: keywise.Claim, request: str) -> str: ...\n"
    )
    command = [sys.executable, "-m", "keywise", "serial", "status", "--json", "--app", "clinic:app"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=True).stdout
    assert json.loads(said)["sessions_lost"] == 1


async def _is_none(counting) -> bool:
    return not await counting


@pytest.mark.parametrize("times", [10])
def test_lost_sessions_in_a_row_never_accept_twice(url, times):
    """Each caller has an answer or an error inside of its deadline, and each request ran once at the most."""

    async def main() -> None:
        work = Work()
        work.may_end.set()
        app, accept, _ = app_with(url, work, timeout="10s")
        told: list[str] = []

        async def call(request: str) -> None:
            try:
                told.append(await accept(request, id=request))
            except KeywiseError as error:
                told.append(type(error).__name__)

        async with watching(url) as watch, app:
            for round in range(times):
                async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
                    for number in range(20):
                        group.create_task(call(f"{number % 4} {round}-{number}"))
                    await watch.terminate_locks()
        assert len(told) == 20 * times
        assert len(work.ran) == len(set(work.ran)), "a request ran twice"
        yes = [one.removeprefix("yes to ") for one in told if one.startswith("yes to ")]
        assert set(yes) <= set(work.ran)

    run(main())


@pytest.mark.parametrize("is_atomic", [False, True])
def test_another_program_with_the_lock_is_waited_for(url, is_atomic):
    async def main() -> None:
        work = Work()
        work.may_end.set()
        app, accept, _ = app_with(url, work, is_atomic=is_atomic, timeout="20s")
        async with watching(url) as watch, app:
            assert await accept("a 0") == "yes to a 0"
            number = await watch.connection.fetchval("select keywise_serial_lock($1, 'a')", accept.name)
            await watch.connection.execute("select pg_advisory_lock($1)", number)
            waiting = asyncio.create_task(accept("a 1"))
            assert await accept("b 1") == "yes to b 1"
            done, _ = await asyncio.wait([waiting], timeout=0.7)
            assert not done
            await watch.connection.execute("select pg_advisory_unlock($1)", number)
            assert await waiting == "yes to a 1"

    run(main())


@pytest.mark.parametrize("turns", BACKENDS)
def test_a_thousand_calls_that_wait_too_long_leave_no_connection_behind(url, turns):
    async def main() -> None:
        work = Work()
        app, accept, _ = app_with(url, work, turns=turns, timeout="60s")
        async with watching(url) as watch, app:
            first = asyncio.create_task(accept("a first"))
            await work.begun.wait()
            before = len(await watch.connections())
            calls = [accept(f"a {number}", timeout=0.5) for number in range(1000)]
            told = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(one) for one in told} <= {ExpiredError, UnansweredError}
            assert len(await watch.connections()) <= max(before, CONNECTIONS_MAX)
            work.may_end.set()
            assert await first == "yes to a first"
            assert await accept("a last") == "yes to a last"
            assert work.ran == ["a first", "a last"]

    run(main(), limit_s=100)


@pytest.mark.parametrize("turns", BACKENDS)
def test_five_thousand_callers_wait_without_connections_of_their_own(url, turns):
    async def main() -> None:
        work = Work()
        app, accept, _ = app_with(url, work, turns=turns, timeout="90s")
        async with watching(url) as watch, app:
            calls = [asyncio.create_task(accept(f"{number % 50} {number}")) for number in range(5000)]
            await work.begun.wait()
            await until(lambda: _is_count(watch, 5000), 60)
            assert len(await watch.connections()) <= CONNECTIONS_MAX
            work.may_end.set()
            told = await asyncio.gather(*calls)
            assert told == [f"yes to {number % 50} {number}" for number in range(5000)]
            assert len(await watch.connections()) <= CONNECTIONS_MAX
        for key in range(50):
            mine = [one for one in work.ran if one.startswith(f"{key} ")]
            assert mine == sorted(mine, key=lambda one: int(one.split()[1])), "not in the order in which they came"

    run(main(), limit_s=110)


async def _is_count(watch: Watch, count: int) -> bool:
    return await watch.connection.fetchval("select count(*) from keywise_turn_work") == count
