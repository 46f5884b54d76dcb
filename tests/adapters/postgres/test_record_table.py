"""A table for records in Postgres: which tables fit, their types, and writers that meet."""

import asyncio
from contextlib import nullcontext

import pytest

from adapters.postgres.benches import connected, fresh, two_openings, until_waiting
from adapters.record_tables import URI, postgres_records, record
from keywise import adapters
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.record_table import PostgresRecordTable
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import AddressError, PermanentError, SettingsError, UnavailableError
from keywise.core.statements import UserRecordTable
from keywise.core.url import Address
from running import awaited
from servers import shared

pytestmark = pytest.mark.server("postgres")

KEY = "primary key (object, ordinal)"
NO_KEY = "no unique or exclusion constraint"
COLLATED = "objects that differ can be equal in its column object; make it text"
UNORDERED = "its column ordinal does not hold whole numbers only; make it bigint"
IGNORING_CASE = "provider = icu, locale = 'und-u-ks-level2', deterministic = false"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (f"object text, ordinal bigint, version bigint, body text, {KEY}", ""),
        (f"object varchar(1024), ordinal integer, version numeric, body jsonb, more text, {KEY}", ""),
        ("object text, ordinal bigint, version bigint, body bytea, unique (ordinal, object)", ""),
        ("object text, ordinal bigint, version bigint, body text", NO_KEY),
        ("object text primary key, ordinal bigint, version bigint, body text", NO_KEY),
        (f"object text, ordinal bigint, body text, {KEY}", "it has no column version"),
        (f"object text, ordinal bigint, version bigint, {KEY}", "it has no column body"),
        ("object text primary key, version bigint, body text", "it has no column ordinal"),
        ("key text primary key, version bigint, body text", "it has no column object"),
        (f"object text collate records_ci, ordinal bigint, version bigint, body text, {KEY}", COLLATED),
        (f"object character(40), ordinal bigint, version bigint, body text, {KEY}", COLLATED),
        (f"object uuid, ordinal bigint, version bigint, body text, {KEY}", COLLATED),
        (f"object text, ordinal text, version bigint, body text, {KEY}", UNORDERED),
        (f"object text, ordinal real, version bigint, body text, {KEY}", UNORDERED),
    ],
)
@awaited
async def test_a_table_that_does_not_fit_is_refused_with_what_it_needs(columns, why):
    table = fresh("logs")
    expected = pytest.raises(SettingsError, match=rf"table {table} does not fit: .*{why}.*\?ordinal=")
    async with two_openings() as (database, _):
        await database.write(f"create collation if not exists records_ci ({IGNORING_CASE})")
        await database.write(f"create table {table} ({columns})")
        with expected if why else nullcontext():
            async with PostgresRecordTable(database, UserRecordTable(table)):
                pass


@pytest.mark.parametrize("name", ["keywise_logs", "pg_logs", "public.keywise_logs", "a.b.c", 'a"b'])
def test_names_that_cannot_be_are_refused(name):
    with pytest.raises(SettingsError, match="cannot be the name"):
        PostgresRecordTable(PostgresDatabase("postgresql://localhost/nowhere"), UserRecordTable(name))


@awaited
async def test_a_url_names_the_table_and_its_columns():
    schema, url = fresh("schema"), shared.postgres().url
    options = f"table={schema}.Lines&object=uri&ordinal=N&version=v&columns=a,%20b"
    async with connected() as connection:
        await connection.execute(f"create schema {schema}")
        table = adapters.connect_record_sink(Address(f"{url}?{options}", "logs", {}))
        assert isinstance(table, PostgresRecordTable)
        ledger = PostgresLedger(table.database, schema, LedgerPolicy())
        async with ledger, table, ledger.transaction() as transaction:
            await table.write(transaction, [record(3, b'{"a": [1], "b": "x"}', version=7)])
        rows = await connection.fetch(f'select uri, "N", v, a, b from {schema}."Lines"')
        assert [tuple(row) for row in rows] == [(URI, 3, 7, "[1]", '"x"')]


@awaited
async def test_a_table_that_is_created_compares_uris_byte_by_byte():
    """It has the name of the pipeline, unless the URL names another one."""
    name = fresh("logs")
    async with connected() as connection:
        async with adapters.connect_record_sink(Address(shared.postgres().url, name, {})):
            pass
        columns = await connection.fetch(
            "select attname, format_type(atttypid, null), collname from pg_attribute "
            "left join pg_collation on pg_collation.oid = attcollation "
            "where attrelid = $1::text::regclass and attnum > 0 order by attnum",
            name,
        )
        [[key]] = await connection.fetch("select pg_get_indexdef(($1::text || '_pkey')::regclass)", name)
    assert [tuple(one) for one in columns] == [
        ("object", "text", "C"),
        ("ordinal", "bigint", None),
        ("version", "bigint", None),
        ("body", "text", "default"),
    ]
    assert key.endswith("(object, ordinal)")


def test_an_option_that_is_unknown_is_refused():
    with pytest.raises(AddressError, match="unknown option 'key'"):
        adapters.connect_record_sink(Address("postgresql://localhost/shop?key=id", "logs", {}))


@pytest.mark.parametrize("kind", ["bytea", "jsonb", "json", "varchar(40)"])
@awaited
async def test_a_body_has_the_type_of_its_column(kind):
    declared = f"object varchar(1024), ordinal integer, version bigint, body {kind}"
    async with postgres_records(declared=declared) as bench:
        await bench.write(record(0, b'{"a": 1}'), record(1, b"[]"))
        await bench.write(record(1, b'{"b": "\xc3\xa9"}', version=2), record(2, b"7"))
        bodies = [body if isinstance(body, str) else body.decode() for _, _, _, body in await bench.rows()]
        assert bodies == ['{"a": 1}', '{"b": "é"}', "7"]
        assert await bench.delete(1, 100) == 2


@awaited
async def test_bytes_that_are_no_text_are_held_in_bytea():
    async with postgres_records(declared="object text, ordinal bigint, version bigint, body bytea") as bench:
        await bench.write(record(0, b"\xff\x00\x1f"), record(1, b""))
        assert [body for *_, body in await bench.rows()] == [b"\xff\x00\x1f", b""]


@pytest.mark.parametrize("body", [b"broken", b"", b"a\x00b"])
@awaited
async def test_a_body_that_its_type_refuses_is_permanent(body):
    async with postgres_records(declared="object text, ordinal bigint, version bigint, body jsonb") as bench:
        with pytest.raises(PermanentError, match="refuses it"):
            await bench.write(record(0), record(1, body))


@pytest.mark.parametrize("is_known", [False, True])
@awaited
async def test_a_value_that_another_row_has_is_permanent(is_known):
    """It is no row of another writer with the same place, which passes."""
    declared = "object text, ordinal bigint, version bigint, body text unique"
    async with postgres_records(declared=declared) as bench:
        await bench.write(record(0, b"one"), *[record(9, b"nine")] * is_known)
        with pytest.raises(PermanentError, match="refuses it"):
            await bench.write(record(9, b"one"))


@awaited
async def test_partitions_are_not_mixed_up():
    name = fresh("logs")
    parts = [f"{name}_{number}" for number in range(3)]
    async with two_openings() as (database, _), PostgresLedger(database, name, LedgerPolicy()) as ledger:
        columns = f"object text, ordinal bigint, version bigint, body text, {KEY}"
        await database.write(f"create table {name} ({columns}) partition by hash (object)")
        for number, part in enumerate(parts):
            rest = f"for values with (modulus {len(parts)}, remainder {number})"
            await database.write(f"create table {part} partition of {name} {rest}")
        uris = [f"s3://b/{number}" for number in range(30)]
        async with PostgresRecordTable(database, UserRecordTable(name)) as table:
            async with ledger.transaction() as transaction:
                await table.write(transaction, [record(n, uri=uri) for uri in uris for n in range(5)])
            async with ledger.transaction() as transaction:
                deleted = record(0, uri=uris[1])
                deleted.deleted = True
                await table.write(transaction, [record(4, b"new", uri=uris[2]), deleted])
                assert await table.delete_tails(transaction, [(uris[0], 2)], 2) == 2
        counts = dict(await database.read(f"select object, count(*) from {name} group by object"))
        assert counts == dict.fromkeys(uris, 5) | {uris[0]: 3, uris[1]: 4}


@awaited
async def test_a_row_that_another_transaction_adds_meanwhile_is_written_by_a_retry():
    async with postgres_records() as bench, connected() as watcher:
        async with bench.ledger.transaction() as first:
            await bench.table.write(first, [record(0, b"first")])
            writing = asyncio.ensure_future(bench.write(record(0, b"second", version=2)))
            await until_waiting(watcher, bench.table._table)
        with pytest.raises(UnavailableError, match="another transaction has just written records of the same object"):
            await writing
        assert await bench.rows() == [(URI, 0, 1, "first")]
        await bench.write(record(0, b"second", version=2))
        assert await bench.rows() == [(URI, 0, 2, "second")]


@awaited
async def test_writers_of_the_same_records_do_not_deadlock():
    """The second one waits at the first row, and holds no other meanwhile."""
    async with postgres_records() as bench, connected() as watcher:
        await bench.write(record(0), record(1))
        async with bench.ledger.transaction() as first:
            await bench.table.write(first, [record(0, b"first", version=2)])
            writing = asyncio.ensure_future(
                bench.write(record(1, b"second", version=3), record(0, b"second", version=3))
            )
            await until_waiting(watcher, bench.table._table)
            await bench.table.write(first, [record(1, b"first", version=2)])
        await writing
        assert await bench.rows() == [(URI, 0, 3, "second"), (URI, 1, 3, "second")]
