"""What a Postgres database is told and tells: its schema, its errors, its addresses, its queue in your transaction."""

import asyncio
import random
import uuid

import asyncpg
import pytest

import keywise
from adapters.postgres.benches import fresh
from keywise import adapters
from keywise.adapters.postgres.database import PostgresDatabase, postgres_errors
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.schema.install import VERSION
from keywise.adapters.postgres.sink import PostgresSink
from keywise.adapters.postgres.source import POLL_S, PostgresSource
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import AddressError, DatabaseError, SettingsError, UnavailableError
from keywise.core.key_encoding import decoded, encoded
from keywise.core.statements import UserTable
from keywise.core.url import Address
from keywise.testing import Verdict, check_sink, check_source
from keywise.testing.conformance.sinks import put
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

UUID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


@pytest.fixture
def url() -> str:
    """A new, empty database."""
    return shared.postgres().create_database(fresh("database"))


async def executed(url: str, *statements: str) -> list:
    connection = await asyncpg.connect(url)
    try:
        return [await connection.fetch(statement) for statement in statements]
    finally:
        await connection.close()


def test_openings_at_once_make_the_schema_together(url):
    async def main() -> None:
        databases = [PostgresDatabase(url) for _ in range(6)]
        await asyncio.gather(*(database.__aenter__() for database in databases))
        await asyncio.gather(*(database.__aexit__() for database in databases))
        [[row]] = await executed(url, "select value from keywise_meta where name = 'schema'")
        assert row[0] == str(VERSION)

    run(main())


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_schema_of_an_older_keywise_is_refused_with_what_to_do(url, version):
    async def main() -> None:
        await executed(
            url,
            "create table keywise_meta (name text primary key, value text not null)",
            f"insert into keywise_meta values ('schema', '{version}')",
        )
        with pytest.raises(
            DatabaseError, match=r"written by an older keywise .*; finish the work there .* name another database"
        ):
            async with PostgresDatabase(url):
                pass
        [tables] = await executed(url, "select tablename from pg_tables where schemaname = 'public'")
        assert [name for (name,) in tables] == ["keywise_meta"]

    run(main())


def test_a_schema_of_a_newer_keywise_is_refused(url):
    async def main() -> None:
        async with PostgresDatabase(url):
            pass
        await executed(url, "update keywise_meta set value = '99' where name = 'schema'")
        told = f"newer keywise: its schema is 99, this one knows {VERSION}; upgrade keywise"
        with pytest.raises(DatabaseError, match=told):
            async with PostgresDatabase(url):
                pass

    run(main())


def test_what_is_wrong_with_an_address_is_told_without_its_password(url):
    missing = url.replace("postgres@", "postgres:hunter2@").rpartition("/")[0] + "/nowhere"

    async def main() -> None:
        with pytest.raises(DatabaseError, match="create the database, or name another one") as error:
            async with PostgresDatabase(missing):
                pass
        assert "hunter2" not in str(error.value)
        with pytest.raises(UnavailableError):
            async with PostgresDatabase("postgresql://postgres:hunter2@127.0.0.1:1/x"):
                pass

    run(main())


def test_plugs_of_one_app_share_the_database_that_their_addresses_name(url):
    shared_by_app: dict = {}
    source = adapters.connect_source(Address(f"{url}?queue=a&visibility=5s", "shop", shared_by_app))
    ledger = adapters.connect_ledger(Address(url, "shop", shared_by_app), LedgerPolicy())
    sink = adapters.connect_sink(Address(f"{url}?table=stock", "shop", shared_by_app))
    other = adapters.connect_ledger(Address(f"{url}?sslmode=disable", "shop", shared_by_app), LedgerPolicy())
    assert source.database is ledger.database is sink.database
    assert other.database is not ledger.database
    assert source.visibility_s == 5.0
    with pytest.raises(AddressError, match="did you mean queue"):
        adapters.connect_source(Address(f"{url}?queu=a", "shop", shared_by_app))


class ClosedAfterPreparing(asyncpg.Connection):
    """What asyncpg, or another task, may do at any moment happens between the two steps of a statement."""

    async def _get_statement(self, *arguments: object, **options: object) -> object:
        statement = await super()._get_statement(*arguments, **options)
        self.terminate()
        return statement


def test_a_connection_that_is_closed_between_two_steps_of_a_statement_counts_as_lost(url):
    async def main() -> None:
        connection = await asyncpg.connect(url, connection_class=ClosedAfterPreparing)
        with pytest.raises(UnavailableError, match="closed in the middle"), postgres_errors("shop"):
            await connection.fetch("select 1")

    run(main())


def test_an_attribute_error_of_a_handler_is_its_own():
    with pytest.raises(AttributeError), postgres_errors("shop", of_handler=True):
        None.price  # noqa: B018


def test_a_lost_connection_is_told_as_unavailable_and_the_next_try_works(url):
    async def main() -> None:
        async with PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy()) as ledger:
            with pytest.raises(UnavailableError):
                async with ledger.transaction() as transaction:
                    await transaction.decide([ChangeHeader("a", order_of(1))])
                    await _cut(url)
                    await transaction.mark([ChangeHeader("a", order_of(1))])
            assert await _patient(ledger.inspect, "a") is None
            async with ledger.transaction() as transaction:
                await transaction.decide([ChangeHeader("a", order_of(1))])
                await transaction.mark([ChangeHeader("a", order_of(1))])
            assert (await ledger.inspect("a")).mark == order_of(1)

    run(main())


async def _cut(url: str) -> None:
    await executed(
        url,
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where pid != pg_backend_pid() and datname = current_database()",
    )


async def _patient(act, *arguments):
    """Ask until the pool has noticed that its connections are gone."""
    for _ in range(10):
        try:
            return await act(*arguments)
        except UnavailableError:
            continue
    raise AssertionError("the database stays unavailable")


def test_a_statement_timeout_inside_a_savepoint_is_an_error_of_the_handler(url):
    async def main() -> None:
        ledger = PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy())
        async with ledger, ledger.transaction() as transaction:
            await transaction.connection.execute("set local statement_timeout = 10")
            with pytest.raises(asyncpg.QueryCanceledError):
                async with transaction.savepoint():
                    await transaction.connection.execute("select pg_sleep(10)")

    run(main())


def test_a_statement_that_gets_no_answer_is_told_as_unavailable_and_its_session_is_ended(url):
    async def main() -> None:
        async with PostgresDatabase(url) as database:
            with pytest.raises(UnavailableError, match="no answer in time"):
                await database.write("select pg_sleep(600)", limit_s=0.1)
            assert len(await database.write("select 1")) == 1
            sleeping = "select count(*) from pg_stat_activity where query like '%pg_sleep(600)%' and state = 'active'"
            while (await executed(url, f"{sleeping} and pid != pg_backend_pid()"))[0][0][0]:
                pass

    run(main())


def test_a_transaction_that_ended_does_not_count_as_committed(url):
    async def main() -> None:
        async with PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy()) as ledger:
            header = ChangeHeader("a", order_of(1))
            with pytest.raises(UnavailableError, match="rolled back"):
                async with ledger.transaction() as transaction:
                    await transaction.decide([header])
                    await transaction.mark([header])
                    with pytest.raises(asyncpg.PostgresError):
                        await transaction.connection.execute("select * from nowhere")
            with pytest.raises(DatabaseError, match="leave commit and rollback to keywise"):
                async with ledger.transaction() as transaction, transaction.savepoint():
                    await transaction.connection.execute("rollback")
            assert await ledger.inspect("a") is None

    run(main())


def test_messages_are_sent_within_the_callers_own_transaction(url):
    async def main() -> list[int]:
        depths = []
        app = keywise.App(url)
        app.pipeline("shop", key="key").source(url)
        async with app, PostgresSource(PostgresDatabase(url), "shop") as source:
            connection = await asyncpg.connect(url)
            for count in (1, 300):
                for rolls_back in (True, False):
                    transaction = connection.transaction()
                    await transaction.start()
                    await app.send("shop", *({"key": str(number)} for number in range(count)), within=connection)
                    depths.append(await source.depth())
                    await (transaction.rollback() if rolls_back else transaction.commit())
                    depths.append(await source.depth())
            await connection.close()
        return depths

    assert run(main()) == [0, 0, 0, 1, 1, 1, 1, 301]


def test_a_source_that_cannot_send_within_a_transaction_says_so(tmp_path):
    async def main() -> None:
        app = keywise.App(f"sqlite:///{tmp_path}/shop.db")
        app.pipeline("shop", key="key").source(f"sqlite:///{tmp_path}/shop.db")
        async with app:
            with pytest.raises(SettingsError, match="cannot send within your own transaction"):
                await app.send("shop", b"{}", within=object())

    run(main())


def test_a_send_wakes_who_waits_also_in_another_process(url):
    """Sooner than the look that would find it anyway."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with (
            PostgresSource(PostgresDatabase(url), "shop") as source,
            PostgresSource(PostgresDatabase(url), "shop") as other,
        ):
            times = []
            for _ in range(5):
                waiting = asyncio.create_task(source.arrived(20.0))
                bell = await source.database.bell(str(source._queue))
                # Only once somebody listens and has looked does a ring count.
                await source.arrived(0.0)
                bell.clear()
                started = loop.time()
                await other.send([b"x"])
                assert await waiting
                times.append(loop.time() - started)
                await source.ack(await source.receive(10, 0.0))
            return min(times)

    assert run(main()) < POLL_S / 2


def test_who_waits_looks_by_itself_where_nobody_rings(url):
    async def main() -> None:
        async with (
            PostgresSource(PostgresDatabase(url), "shop") as source,
            PostgresSource(PostgresDatabase(url), "shop") as other,
        ):
            await source.database.bell(str(source._queue))
            await source.database._listener.remove_listener("keywise", source.database._ring)
            waiting = asyncio.create_task(source.arrived(20.0))
            await other.send([b"x"])
            assert await waiting

    run(main())


def test_keys_are_stored_in_few_bytes_and_come_back_as_they_were():
    for key in (UUID, UUID.upper(), UUID.replace("-", ""), UUID[:-1] + "g", "é", "", "\0", UUID[:8] + "-" * 28):
        assert decoded(encoded(key)) == key
    assert len(encoded(UUID)) == 17
    assert len(encoded(UUID.upper())) == 36


def test_an_idle_entry_takes_at_most_150_bytes(url):
    async def main() -> float:
        rng = random.Random(1)
        keys = [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(20_000)]
        async with PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy()) as ledger:
            for start in range(0, len(keys), 1000):
                headers = [ChangeHeader(key, order_of(1)) for key in keys[start : start + 1000]]
                async with ledger.transaction() as transaction:
                    await transaction.decide_and_mark(headers)
                    await transaction.mark(headers)
        [[row]] = await executed(url, "select pg_total_relation_size('keywise_marks')")
        return row[0] / len(keys)

    assert run(main()) <= 150


def test_a_table_that_does_not_fit_is_refused_with_what_it_needs(url):
    async def main() -> None:
        await executed(url, "create table loose (key text, version bigint, body text)", "create table poor (key text)")
        for table, why in (("loose", "no unique or exclusion constraint"), ("poor", "it has no column version")):
            with pytest.raises(SettingsError, match=f"table {table} does not fit: .*{why}"):
                async with PostgresSink(PostgresDatabase(url), UserTable(table)):
                    pass
        with pytest.raises(SettingsError, match="cannot be the name"):
            PostgresSink(PostgresDatabase(url), UserTable("keywise_marks"))

    run(main())


def test_a_table_has_types_of_its_own(url):
    """Keys and columns are what the table says, and what it does not take is refused."""

    async def main() -> list:
        await executed(
            url, "create table typed (id uuid primary key, v bigint, price numeric, tags jsonb, at timestamptz)"
        )
        database = PostgresDatabase(url)
        sink = PostgresSink(database, UserTable("public.typed", key="id", version="v", columns=["price", "tags", "at"]))
        async with PostgresLedger(database, "typed", LedgerPolicy()) as ledger, sink:
            body = b'{"price": 1.5, "tags": ["a"], "at": "2026-01-01T00:00:00Z"}'
            change = put(UUID, 3)
            change.body = body
            async with ledger.transaction() as transaction:
                await sink.write(transaction, [change])
            with pytest.raises(keywise.PermanentError, match="refuses it"):
                async with ledger.transaction() as transaction:
                    change.body = b'{"price": "cheap"}'
                    await sink.write(transaction, [change])
            held = await sink.read([UUID])
            assert (held[UUID].version, held[UUID].body["tags"]) == (3, ["a"])
        [rows] = await executed(url, "select id::text, v, price::text, tags, at::text from typed")
        return [tuple(row)[:4] for row in rows]

    assert run(main()) == [(UUID, 3, "1.5", '["a"]')]


@pytest.mark.parametrize("check", [check_source, check_sink], ids=["source", "sink"])
def test_a_check_by_url_leaves_nothing_behind(url, check):
    async def main() -> None:
        report = await check(url)
        assert report, str(report)
        assert report.of(Verdict.UNCHECKED) == []
        tables = await executed(url, "select tablename from pg_tables where tablename like 'check%'")
        names = await executed(url, "select name from keywise_queues", "select name from keywise_scopes")
        rows = await executed(url, "select 1 from keywise_ready", "select 1 from keywise_marks")
        schemas = await executed(url, "select nspname from pg_namespace where nspname like 'check%'")
        assert [*tables, *names, *rows, *schemas] == [[]] * 6

    run(main(), limit_s=60)


def test_a_plain_function_cannot_write_with_an_asyncpg_connection(url):
    app = keywise.App(url)
    pipeline = app.pipeline("shop", key="key").source(url)

    @pipeline.apply
    def keep(change: keywise.Change, transaction: keywise.Transaction) -> None:
        pass

    async def main() -> None:
        with pytest.raises(SettingsError, match="write async def keep"):
            async with app.open("shop"):
                pass

    run(main())


@pytest.mark.parametrize("port", ["s3cret", "70000"])
def test_a_port_that_is_none_is_told_without_what_was_written_there(port):
    """It may be a part of a password that was not quoted."""

    async def main() -> None:
        async with PostgresDatabase(f"postgresql:///shop?host=127.0.0.1&port={port}"):
            pass

    with pytest.raises(DatabaseError, match="host and port cannot be read; check the URL") as error:
        run(main())
    assert error.value.__cause__ is not None and error.value.__cause__.__cause__ is None


def test_a_check_by_a_user_who_may_create_no_schema_leaves_promises_about_time_unchecked(url):
    async def main() -> None:
        async with PostgresDatabase(url):
            pass
        user = fresh("checker")
        await executed(
            url,
            f"create role {user} login",
            f"grant all on all tables in schema public to {user}",
            f"grant all on all sequences in schema public to {user}",
        )
        report = await check_source(url.replace("postgres@", f"{user}@"))
        assert report, str(report)
        assert {"may not create a schema" in one.why for one in report.of(Verdict.UNCHECKED)} == {True}

    run(main(), limit_s=60)
