"""A table in Postgres as an origin: which tables it may be, what a row looks like, and that an index is used."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
import pytest

from adapters.postgres.benches import connected, fresh
from keywise import adapters
from keywise.adapters.postgres.origin import PostgresOrigin, PostgresReadDatabase
from keywise.core.errors import DatabaseError, SettingsError, UnavailableError
from keywise.core.origin import CURSOR_MAX_BYTES, Origin
from keywise.core.statements import OriginTable
from keywise.core.url import Address
from keywise.testing.conformance.origins import pages_of, scanned
from running import run
from servers import shared
from servers.postgres import PostgresServer, postgres_server

pytestmark = pytest.mark.server("postgres")

UUIDS = [f"{number:08x}-0000-4000-8000-000000000000" for number in (0, 10, 2**31, 2**32 - 1)]


def connected_origin(options: str, name: str = "pages") -> Origin:
    return adapters.connect_origin(Address(f"{shared.postgres().url}?{options}", name, {}))


@asynccontextmanager
async def created(*statements: str) -> AsyncIterator[str]:
    """Run statements in which TABLE is a new name; return it."""
    table = fresh("truth")
    async with connected() as connection:
        for statement in statements:
            await connection.execute(statement.replace("TABLE", table))
    yield table


async def rows_of(origin: Origin) -> list[dict[str, Any]]:
    [shard] = await origin.shards(1000)
    return [msgspec.json.decode(row) for row in (await origin.scan(shard, "", 1000)).rows]


def test_a_row_is_an_object_with_all_columns_and_its_key_as_text():
    async def main() -> None:
        columns = "id integer primary key, version bigint, price numeric, tags text[], extra jsonb, origin text"
        row = """(7, 9007199254740993, 12.50, '{a,b}', '{"deep": [1]}', 'here')"""
        async with (
            created(f"create table TABLE ({columns})", f"insert into TABLE values {row}") as table,
            connected_origin(f"table={table}&key=id") as origin,
        ):
            body = {
                "id": "7",
                "version": 9007199254740993,
                "price": 12.5,
                "tags": ["a", "b"],
                "extra": {"deep": [1]},
                "origin": "here",
            }
            assert await rows_of(origin) == [body]
            assert {key: msgspec.json.decode(row) for key, row in (await origin.fetch(["7"])).items()} == {"7": body}

    run(main())


def test_a_body_column_is_the_body_and_a_null_is_an_empty_one():
    async def main() -> None:
        async with (
            created(
                "create table TABLE (id text primary key, message text)",
                """insert into TABLE values ('a', ' {"id": "a"}'), ('b', null)""",
            ) as table,
            connected_origin(f"table={table}&key=id&body=message") as origin,
        ):
            assert await origin.fetch(["a", "b", "c"]) == {"a": b' {"id": "a"}', "b": b""}

    run(main())


def test_a_table_of_another_schema_is_read():
    async def main() -> None:
        async with (
            created(
                "create schema TABLE",
                'create table TABLE."Pages" (key text primary key)',
                "insert into TABLE.\"Pages\" values ('a')",
            ) as schema,
            connected_origin(f"table={schema}.Pages") as origin,
        ):
            assert await rows_of(origin) == [{"key": "a"}]

    run(main())


def test_uuids_are_read_in_their_own_order_and_fetched_as_they_are_spelled():
    async def main() -> None:
        values = ", ".join(f"('{one}')" for one in UUIDS)
        async with (
            created("create table TABLE (key uuid primary key)", f"insert into TABLE values {values}") as table,
            connected_origin(f"table={table}") as origin,
        ):
            shards = await origin.shards(2)
            pages = [page for shard in shards async for page in pages_of(origin, shard, 1)]
            found = [msgspec.json.decode(row)["key"] for page in pages for row in page.rows]
            assert (len(shards), found) == (3, UUIDS)
            spelled = [UUIDS[3].upper(), f"{{{UUIDS[1]}}}", "no uuid", "", UUIDS[2]]
            assert list(await origin.fetch(spelled)) == [UUIDS[2]]

    run(main())


def test_a_key_that_no_column_can_hold_is_left_out():
    async def main() -> None:
        async with (
            created("create table TABLE (key varchar(3) primary key)", "insert into TABLE values ('abc')") as table,
            connected_origin(f"table={table}") as origin,
        ):
            assert list(await origin.fetch(["abcd", "a\0", "\ud800", "abc"])) == ["abc"]

    run(main())


def test_keys_that_are_too_long_for_a_cursor_are_read_with_the_page_before_them():
    async def main() -> None:
        keys = ["a", *(letter * 2 * CURSOR_MAX_BYTES for letter in "bcd"), "e", "f", "z" * 2 * CURSOR_MAX_BYTES]
        async with created("create table TABLE (key text primary key, text text)") as table:
            async with connected() as connection:
                await connection.execute(f"insert into {table} select unnest($1::text[]), 'x'", keys)
            async with connected_origin(f"table={table}") as origin:
                [*_, shard] = await origin.shards(1000)
                sizes = [len(page.rows) async for page in pages_of_any_size(origin, shard, 1)]
                assert (sizes[:2], sum(sizes)) == ([1, 4], len(keys))
                assert all(len(one.bounds) <= CURSOR_MAX_BYTES for one in await origin.shards(1))

    run(main())


async def pages_of_any_size(origin: Origin, shard, limit: int) -> AsyncIterator[Any]:
    after, is_last = "", False
    while not is_last:
        page = await origin.scan(shard, after, limit)
        after, is_last = page.after, page.is_last
        assert 0 < len(after) <= CURSOR_MAX_BYTES
        yield page


MISFITS = {
    "no table": ("select 1", "there is no such table"),
    "no column": ("create table TABLE (id text primary key)", "it has no column key"),
    "no index": ("create table TABLE (key text)", "no unique index has the column key"),
    "an index that is not unique": ("create table TABLE (key text); create index on TABLE (key)", "no unique index"),
    "a composite key": ("create table TABLE (key text, b text, primary key (key, b))", "no unique index"),
    "a part of a composite key": ("create table TABLE (a text, key text, unique (a, key))", "no unique index"),
    "a partial index": (
        "create table TABLE (key text); create unique index on TABLE (key) where key > 'a'",
        "no unique",
    ),
    "an expression": ("create table TABLE (key text); create unique index on TABLE (lower(key))", "no unique index"),
    "an index for patterns": (
        "create table TABLE (key text); create unique index on TABLE (key text_pattern_ops)",
        "in the column's order",
    ),
    "an index in another order": (
        'create table TABLE (key text collate "C"); create unique index on TABLE (key collate "en-x-icu")',
        "in the column's order",
    ),
    "a view": ("create view TABLE as select 'a' as key", "no unique index"),
    "a type that is no key": ("create table TABLE (key numeric primary key)", "is of the type numeric, and a key is"),
    "padded text": ("create table TABLE (key char(3) primary key)", "is of the type character(3)"),
    "a collation in which texts are equal": (
        "create collation TABLE_c (provider = icu, locale = 'und-u-ks-level2', deterministic = false); "
        "create table TABLE (key text collate TABLE_c primary key)",
        "keys that differ can be equal in its column key",
    ),
}


@pytest.mark.parametrize(("statement", "why"), MISFITS.values(), ids=MISFITS.keys())
def test_a_table_that_cannot_be_read_by_key_is_refused(statement, why):
    async def main() -> None:
        async with created(statement) as table:
            with pytest.raises(
                SettingsError, match=rf"table {table} cannot be an origin: .*{why_escaped(why)}.*\?key="
            ):
                async with connected_origin(f"table={table}"):
                    pass

    run(main())


def why_escaped(why: str) -> str:
    return why.replace("(", r"\(").replace(")", r"\)")


def test_names_that_could_be_more_than_names_are_refused():
    for options in ("table=a;b", 'key=a"b', "body=a'b", "table=pg_class", "where=true"):
        with pytest.raises(SettingsError):
            connected_origin(options)


def test_a_table_that_is_dropped_later_is_named():
    async def main() -> None:
        async with (
            created("create table TABLE (key text primary key)") as table,
            connected_origin(f"table={table}") as origin,
        ):
            async with connected() as connection:
                await connection.execute(f"drop table {table}")
            with pytest.raises(SettingsError, match=f"table {table} cannot be an origin"):
                await origin.fetch(["a"])

    run(main())


def test_a_user_who_may_only_read_is_enough_and_nothing_is_created():
    async def main() -> None:
        url = shared.postgres().create_database(fresh("reading"))
        owner = await asyncpg.connect(url)
        role = fresh("reader")
        await owner.execute(
            "create table pages (key text primary key); insert into pages values ('a'); "
            f"create role {role} login; grant select on pages to {role}; "
            "revoke create on schema public from public"
        )
        reading = f"{url.replace('postgres@', f'{role}@')}?table=pages"
        async with adapters.connect_origin(Address(reading, "pages", {})) as origin:
            assert await scanned_keys(origin) == ["a"]
        tables = await owner.fetch("select relname from pg_class where relname like 'keywise%'")
        await owner.close()
        assert tables == []

    run(main())


async def scanned_keys(origin: Origin) -> list[str]:
    return [str(row["key"]) for row in await rows_of(origin)]


def test_an_origin_cannot_write():
    async def main() -> None:
        async with created("create table TABLE (key text primary key)") as table:
            database = PostgresReadDatabase(shared.postgres().url)
            async with PostgresOrigin(database, OriginTable(table)):
                with pytest.raises(UnavailableError, match="read-only"):
                    await database.read(f"delete from {table}")

    run(main())


class RecordingDatabase(PostgresReadDatabase):
    """Notes every statement with its arguments."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.statements: list[tuple[str, Sequence[object]]] = []

    async def read(self, statement: str, *arguments: object, limit_s: float | None = None) -> Sequence[Any]:
        self.statements.append((statement, arguments))
        return await super().read(statement, *arguments, limit_s=limit_s)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("text primary key", "'k' || n"),
        ('text collate "en-x-icu" primary key', "'k' || n"),
        ("varchar(20) unique", "'k' || n"),
        ("uuid primary key", "gen_random_uuid()"),
        ("integer primary key", "n"),
        ("smallint primary key", "n - 5000"),
    ],
)
def test_no_page_is_sorted_and_no_table_is_read_as_a_whole(column, value):
    async def main() -> None:
        filled = f"insert into TABLE select {value}, 'x' from generate_series(1, 10000) as n"
        async with created(f"create table TABLE (key {column}, text text)", filled, "analyze TABLE") as table:
            database = RecordingDatabase(shared.postgres().url)
            async with PostgresOrigin(database, OriginTable(table)) as origin:
                shards = await origin.shards(3000)
                page = await origin.scan(shards[1], "", 10)
                await origin.scan(shards[1], page.after, 10)
                await origin.scan(shards[-1], "", 10)
                await origin.fetch([msgspec.json.decode(page.rows[0])["key"]])
                asked = [one for one in database.statements if table in one[0] and "limit 0" not in one[0]]
                for statement, arguments in asked:
                    plan = "\n".join(row[0] for row in await database.read(f"explain {statement}", *arguments))
                    assert "Index" in plan and "Sort" not in plan and "Seq Scan" not in plan, f"{statement}\n{plan}"
                assert (len(shards), len(asked)) == (4, 8)

    run(main())


def into_standby(server: PostgresServer) -> None:
    """Restart a server in recovery: it answers queries, and refuses to write."""
    server.stop()
    (server._data / "standby.signal").touch()
    server.start()


def into_primary(server: PostgresServer) -> None:
    server.stop()
    (server._data / "standby.signal").unlink()
    server.start()


def test_a_standby_is_refused_also_after_a_failover():
    async def main() -> None:
        with postgres_server() as server:
            connection = await asyncpg.connect(server.url)
            await connection.execute("create table pages (key text primary key); insert into pages values ('a')")
            await connection.close()
            address = Address(f"{server.url}?table=pages", "pages", {})
            async with adapters.connect_origin(address) as origin:
                assert list(await origin.fetch(["a"])) == ["a"]
                await asyncio.to_thread(into_standby, server)
                with pytest.raises(DatabaseError, match=r"is a standby, which may lag behind.*; name the primary"):
                    await until_answered(origin)
                with pytest.raises(DatabaseError, match="is a standby"):
                    async with adapters.connect_origin(Address(f"{server.url}?table=pages", "pages", {})):
                        pass
                await asyncio.to_thread(into_primary, server)
                await until_answered(origin)

    run(main(), limit_s=100)


async def until_answered(origin: Origin) -> None:
    """Fetch until the connections that a restart has cut are gone."""
    while True:
        try:
            await origin.fetch(["a"])
        except UnavailableError:
            continue
        return


def test_a_scan_sees_rows_of_any_size_of_shards():
    async def main() -> None:
        filled = "insert into TABLE select n, 'x' from generate_series(-50, 49) as n"
        async with (
            created("create table TABLE (key smallint primary key, text text)", filled) as table,
            connected_origin(f"table={table}") as origin,
        ):
            for size in (1, 33, 100):
                assert sorted(int(key) for key, _ in await scanned(origin, size=size, limit=7)) == [*range(-50, 50)]

    run(main())
