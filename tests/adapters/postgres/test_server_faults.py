"""What can happen to a Postgres under two workers: each time it is told clearly, waited for, and nothing is lost."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from adapters.postgres.benches import fresh
from chaos.final_checks import judge_atomic, judge_plain
from chaos.fleet import Worker, drained, until
from chaos.postgres_backend import PostgresShelf
from chaos.store import Store
from keywise.adapters.postgres.database import IDLE_S, WRITERS_MAX, PostgresDatabase, closed_after_error
from keywise.core.errors import UnavailableError
from running import run
from servers import shared
from servers.pgbouncer import pgbouncer
from servers.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "100ms"}
SHORT = QUICK | {"lease": "1s", "margin": "200ms", "visibility": "2s", "horizon": "2s", "repair": "100ms"}
SESSION = (
    "select (select count(*) from pg_prepared_statements), current_setting('enable_seqscan'), current_setting('jit'), "
    "current_setting('idle_in_transaction_session_timeout'), current_setting('keywise.session', true)"
)
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where usename = '{user}' and pid != pg_backend_pid()"

StartWorker = Callable[..., Worker]


@pytest.fixture
def user() -> str:
    """A user of its own, whose settings a test may change: nobody else is concerned."""
    return fresh("worker")


@pytest.fixture
def store(tmp_path: Path, user: str) -> Iterator[Store]:
    """In a database of its own, where its user may do everything."""
    url = shared.postgres().create_database(fresh("database"))
    yield from stored(tmp_path, shared.postgres(), url, user)


def stored(folder: Path, server: PostgresServer, url: str, user: str) -> Iterator[Store]:
    store = Store(folder, PostgresShelf(server, url), is_heavy=True)
    store.shelf.ask(lambda connection: connection.execute(f"create role {user} login; grant {user} to postgres"))
    schema = "grant all on schema public to {0}; grant all on all {1} in schema public to {0}"
    for things in ("tables", "sequences"):
        store.shelf.ask(lambda connection, things=things: connection.execute(schema.format(user, things)))
    yield store
    store.close()


@pytest.fixture
def start(store: Store, user: str) -> Iterator[StartWorker]:
    """Starts workers under that user, and ends what is left of them after the test."""
    workers: list[Worker] = []

    def start_worker(way: str = "queue_transaction", *, url: str = "", wait: bool = True, **options: object) -> Worker:
        mine = url or store.shelf.url.replace("postgres@", f"{user}@")
        name = f"worker{len(workers)}"
        workers.append(Worker(store, way, name, url=mine, ledger=mine, **(SHORT | options)))
        return workers[-1].start(wait=wait)

    yield start_worker
    for worker in workers:
        worker.close()


def changes(count: int, version: int = 1, **more: object) -> list[dict]:
    return [{"key": f"k{number}", "version": version, **more} for number in range(count)]


def until_done(store: Store, *workers: Worker) -> None:
    def check() -> None:
        for worker in workers:
            worker.check()

    until(lambda: store.depth() == 0, "the queue to be empty", check, limit_s=60)


def execute(store: Store, *statements: str) -> None:
    for statement in statements:
        store.rows(statement)


def set_for(store: Store, user: str, **settings: str) -> None:
    execute(store, *(f"alter role {user} set {name} = '{settings[name]}'" for name in settings))


def test_a_worker_that_is_stopped_in_its_transaction_holds_up_its_keys_for_a_while_only(store, start):
    """The server ends its transaction, another worker does its work, and when it wakes up it goes on."""
    store.send(*changes(1))
    sleeper = start()
    until_done(store, sleeper)
    holder = asyncio.Runner()
    connection = holder.run(asyncpg.connect(store.shelf.url))
    holder.run(connection.execute("begin; select 1 from stock where key = 'k0' for update"))
    store.send(*changes(20, version=2))
    waiting = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    until(lambda: store.rows(waiting) != [], "the sleeper to write", sleeper.check)
    sleeper.sleep(IDLE_S + 5)
    holder.run(connection.close())
    other = start()
    store.send(*changes(20, version=3))
    until(lambda: set(store.content().values()) == {3}, "the other to write", other.check)
    assert not sleeper.is_awake
    until(lambda: sleeper.said("unavailable") > 0, "the sleeper to notice", sleeper.check)
    store.send(*changes(20, version=4))
    until_done(store, sleeper, other)
    drained(sleeper, other)
    holder.close()
    assert judge_atomic(store.evidence()).faults == []


def test_a_handler_may_wait_in_its_transaction_for_longer(store, start):
    store.send({"key": "k0", "version": 1, "do": "wait", "seconds": IDLE_S + 1})
    worker = start("transacted")
    until_done(store, worker)
    drained(worker)
    assert (worker.said("handles"), worker.said("unavailable"), store.content()) == (1, 0, {"k0": 1})


def test_statements_that_may_not_take_long_get_shorter_batches(store, start, user):
    """A batch of all would be cut off each time, whatever the pace."""
    set_for(store, user, statement_timeout="150ms")
    store.send(*changes(400))
    worker = start(batch_max=400)
    until_done(store, worker)
    drained(worker)
    assert "raise statement_timeout of this user, or lower batch_max" in worker.notes
    verdict = judge_atomic(store.evidence())
    assert (verdict.faults, verdict.writes) == ([], 400)


@pytest.mark.parametrize("way", ["queue_transaction", "transacted", "leased"])
def test_a_lock_of_somebody_else_is_waited_for_despite_a_lock_timeout(store, start, user, way):
    set_for(store, user, lock_timeout="50ms")
    worker = start(way)
    holder = asyncio.Runner()
    connection = holder.run(asyncpg.connect(store.shelf.url))
    holder.run(connection.execute("begin; lock table stock, keywise_marks in share mode"))
    store.send(*changes(30))
    until(lambda: worker.said("unavailable") > 2, "some vain tries", worker.check)
    assert "somebody else holds a lock" in worker.notes
    holder.run(connection.close())
    until_done(store, worker)
    drained(worker)
    holder.close()
    assert (judge_plain if way == "leased" else judge_atomic)(store.evidence()).faults == []
    assert store.letters() == {}


def test_a_database_that_may_only_be_read_for_a_while_is_waited_for(store, start, user):
    """Its sessions stay as they began, so new ones are tried."""
    worker = start()
    set_for(store, user, default_transaction_read_only="on")
    execute(store, CUT.format(user=user))
    store.send(*changes(30))
    until(lambda: "name the primary" in worker.notes, "the worker to notice", worker.check)
    set_for(store, user, default_transaction_read_only="off")
    until_done(store, worker)
    drained(worker)
    verdict = judge_atomic(store.evidence())
    assert (verdict.faults, verdict.writes) == ([], 30)


def test_a_worker_on_a_database_that_may_only_be_read_says_so_at_its_start_and_waits(store, start, user):
    start()
    set_for(store, user, default_transaction_read_only="on")
    worker = start(wait=False)
    until(lambda: "name the primary" in worker.notes, "the worker to notice", worker.check)
    set_for(store, user, default_transaction_read_only="off")
    until(lambda: worker.is_started, "the worker to start", worker.check)


@pytest.mark.parametrize("way", ["queue_transaction", "transacted", "leased"])
def test_a_full_disk_is_waited_for(store, start, way):
    """What the server says then; it says so of every change, and none of them is to blame."""
    full = "begin raise exception 'could not extend file' using errcode = '53100'; end"
    execute(
        store,
        f"create function refuse() returns trigger language plpgsql as $$ {full} $$",
        "create trigger refused before insert on keywise_marks for each row execute function refuse()",
    )
    store.send(*changes(30))
    worker = start(way)
    until(lambda: worker.said("unavailable") > 5, "some vain tries", worker.check)
    assert "free some disk space" in worker.notes
    execute(store, "drop trigger refused on keywise_marks")
    until_done(store, worker)
    drained(worker)
    assert (judge_plain if way == "leased" else judge_atomic)(store.evidence()).faults == []
    assert store.letters() == {}


@pytest.mark.parametrize("way", ["queue_transaction", "transacted", "leased"])
def test_two_workers_outlive_the_end_of_every_connection_again_and_again(store, start, user, way):
    workers = start(way), start(way)
    for version in range(1, 11):
        store.send(*changes(60, version))
        until(lambda: any(worker.is_inside for worker in workers) or store.depth() == 0, "a batch", workers[0].check)
        execute(store, CUT.format(user=user))
    until_done(store, *workers)
    until(lambda: store.counts().suspects == 0, "the repairs", workers[0].check)
    drained(*workers)
    assert (judge_plain if way == "leased" else judge_atomic)(store.evidence()).faults == []
    assert store.letters() == {}


def test_a_server_that_is_away_for_a_while_is_waited_for(narrow):
    worker = Worker(narrow, "queue_transaction", "worker", **SHORT)
    try:
        worker.start()
        narrow.shelf.server.stop("fast")
        until(lambda: worker.said("unavailable") > 3, "the worker to notice", worker.check)
        narrow.shelf.server.start()
        narrow.send(*changes(30))
        until_done(narrow, worker)
        drained(worker)
    finally:
        worker.close()
    assert judge_atomic(narrow.evidence()).faults == []


@pytest.fixture
def narrow(tmp_path: Path, user: str) -> Iterator[Store]:
    """On a server of its own, with few connections; producer and judge have those that superusers keep."""
    with postgres_server(max_connections="24") as server:
        yield from stored(tmp_path, server, server.url, user)


def test_without_a_free_connection_a_worker_says_what_to_do_and_others_wait(narrow, user):
    url = narrow.shelf.url.replace("postgres@", f"{user}@")
    first, second = (Worker(narrow, "queue_transaction", name, url=url, ledger=url, **SHORT) for name in "ab")
    crowd = asyncio.Runner()
    try:
        first.start()
        taken = crowd.run(all_connections(url))
        execute(narrow, CUT.format(user=user) + " and application_name = 'keywise'")
        taken += crowd.run(all_connections(url))
        narrow.send(*changes(30))
        until(lambda: "raise max_connections" in first.notes, "the worker to notice", first.check)
        second.start(wait=False)
        until(lambda: "raise max_connections" in second.notes, "the other worker to wait", second.check)
        for connection in taken:
            crowd.run(connection.close())
        until_done(narrow, first)
        drained(first)
    finally:
        crowd.close()
        first.close()
        second.close()
    verdict = judge_atomic(narrow.evidence())
    assert (verdict.faults, verdict.writes) == ([], 30)


def test_a_process_that_has_all_its_connections_in_use_says_so_and_goes_on(monkeypatch):
    async def main() -> None:
        async with PostgresDatabase(shared.postgres().url) as database:
            async with AsyncExitStack() as transactions:
                for _ in range(WRITERS_MAX):
                    await transactions.enter_async_context(database.transaction())
                assert await database.now() > 0, "there are others to read with"
                # Not earlier: on a busy machine, each of these connections may take longer than this.
                monkeypatch.setattr("keywise.adapters.postgres.database.CONNECT_S", 0.2)
                with pytest.raises(UnavailableError, match=f"all {WRITERS_MAX} connections of this process are in use"):
                    await database.write("select 1")
                monkeypatch.undo()
            assert len(await database.write("select 1")) == 1

    run(main())


def test_a_connection_that_could_not_be_prepared_is_given_up():
    async def main() -> None:
        connection = await asyncpg.connect(shared.postgres().url)
        with pytest.raises(asyncpg.PostgresSyntaxError):
            async with closed_after_error(connection):
                await connection.execute("listen to me")
        assert connection.is_closed()

    run(main())


async def all_connections(url: str) -> list[asyncpg.Connection]:
    """As many as the server gives."""
    taken = []
    while True:
        try:
            taken.append(await asyncpg.connect(url))
        except asyncpg.TooManyConnectionsError:
            return taken


@pytest.mark.server("pgbouncer")
@pytest.mark.parametrize("way", ["queue_transaction", "transacted", "leased"])
def test_a_pooler_of_sessions_may_stand_between(store, start, way):
    with pgbouncer(shared.postgres(), "session") as pooled:
        url = pooled.rpartition("/")[0] + "/" + store.shelf.url.rpartition("/")[2]
        workers = start(way, url=url, concurrency=4), start(way, url=url, concurrency=4)
        store.send(*changes(100))
        store.send(*changes(100, version=2))
        until_done(store, *workers)
        drained(*workers)
    assert (judge_plain if way == "leased" else judge_atomic)(store.evidence()).faults == []


@pytest.mark.server("pgbouncer")
@pytest.mark.parametrize("settings", ["", "server_round_robin = 1\n"])
def test_a_pooler_of_transactions_is_refused_with_what_to_do_and_its_sessions_are_left_as_they_were(
    store, start, settings
):
    """Other applications go on with the same sessions."""
    with pgbouncer(shared.postgres(), "transaction", settings) as pooled:
        url = pooled.rpartition("/")[0] + "/" + store.shelf.url.rpartition("/")[2]
        before = run(sessions_of(url))
        worker = start(url=url, wait=False)
        assert worker.end() == 1
        assert run(sessions_of(url)) == before
    assert "a pooler between keywise and the server mixes sessions; use session pooling" in worker.errors


async def sessions_of(url: str) -> list[tuple[str, ...]]:
    """What is set and prepared in the sessions that a pooler has, as another client finds them."""
    async with AsyncExitStack() as clients:
        found = []
        for _ in range(3):
            client = await asyncpg.connect(url, statement_cache_size=0)
            clients.push_async_callback(client.close)
            # Whoever has a transaction keeps its session, so the next client is given another one.
            await clients.enter_async_context(client.transaction())
            found.append(tuple(await client.fetchrow(SESSION)))
        return found
