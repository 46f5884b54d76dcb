"""A table for records in SQLite: which tables fit, and how a URL names its columns."""

import sqlite3
from contextlib import closing, nullcontext

import pytest

from adapters.benches import two_databases
from adapters.record_tables import URI, record, sqlite_records
from keywise import adapters
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.adapters.sqlite.record_table import SqliteRecordTable
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import AddressError, SettingsError, UnavailableError
from keywise.core.statements import UserRecordTable
from keywise.core.url import Address
from running import awaited, run

KEY = "primary key (object, ordinal)"
COLLATED = "objects that differ can be equal in its column object; make it text"
UNORDERED = "its column ordinal does not hold whole numbers only; make it integer"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (f"object text, ordinal bigint, version bigint, body text, {KEY}", ""),
        (f"OBJECT varchar(1024), ORDINAL integer, VERSION, BODY blob, more text, {KEY}", ""),
        (f"object, ordinal int, version, body, {KEY}", ""),
        ("object text, ordinal bigint, version bigint, body text, unique (ordinal, object)", ""),
        ("object text, ordinal bigint, version bigint, body text", "does not match any PRIMARY KEY or UNIQUE"),
        ("object text primary key, ordinal bigint, version bigint, body text", "does not match any PRIMARY KEY"),
        (f"object text, ordinal bigint, body text, {KEY}", "no column named version"),
        (f"object text, ordinal bigint, version bigint, {KEY}", "no column named body"),
        ("object text primary key, version bigint, body text", "no column named ordinal"),
        ("key text primary key, version bigint, body text", "no column named object"),
        (f"object text collate nocase, ordinal bigint, version bigint, body text, {KEY}", COLLATED),
        (f"object text collate rtrim, ordinal bigint, version bigint, body text, {KEY}", COLLATED),
        (f"object integer, ordinal bigint, version bigint, body text, {KEY}", COLLATED),
        (f"object text, ordinal text, version bigint, body text, {KEY}", UNORDERED),
        (f"object text, ordinal real, version bigint, body text, {KEY}", UNORDERED),
        (f"object text, ordinal, version bigint, body text, {KEY}", UNORDERED),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_what_it_needs(tmp_path, columns, why):
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"create table logs ({columns})")

    async def main() -> None:
        async with SqliteRecordTable(SqliteDatabase(path), UserRecordTable("logs")):
            pass

    with (
        pytest.raises(SettingsError, match=rf"table logs does not fit: .*{why}.* of the type integer, .*\?ordinal=")
        if why
        else nullcontext()
    ):
        run(main())


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (UserRecordTable("keywise_logs"), "'keywise_logs' cannot be the name"),
        (UserRecordTable("sqlite_logs"), "'sqlite_logs' cannot be the name"),
        (UserRecordTable("logs", object='o"'), "cannot be the name"),
        (UserRecordTable("logs", ordinal="1st"), "cannot be the name"),
        (UserRecordTable("logs", columns=["a", "b c"]), "cannot be the name"),
        (UserRecordTable("logs", version="ordinal"), "its column ordinal would hold two things"),
        (UserRecordTable("logs", columns=["a", "object"]), "its column object would hold two things"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path, table, why):
    with pytest.raises(SettingsError, match=why):
        SqliteRecordTable(SqliteDatabase(tmp_path / "shop.db"), table)


@awaited
async def test_a_url_names_the_table_and_its_columns():
    async with two_databases() as (database, _):
        options = "table=lines&object=uri&ordinal=n&version=v&columns=a,%20b"
        address = Address(f"sqlite:///{database.path}?{options}", "logs", {(SqliteDatabase, database.path): database})
        table = adapters.connect_record_sink(address)
        assert isinstance(table, SqliteRecordTable) and table.database is database
        async with SqliteLedger(database, "logs", LedgerPolicy()) as ledger, table:
            async with ledger.transaction() as transaction:
                await table.write(transaction, [record(3, b'{"a": 1, "b": "x"}', version=7)])
            assert database.read("select uri, n, v, a, b from lines") == [(URI, 3, 7, 1, "x")]


@awaited
async def test_without_options_the_table_has_the_name_of_the_pipeline():
    async with two_databases() as (database, _):
        table = adapters.connect_record_sink(Address(f"sqlite:///{database.path}", "logs", {}))
        async with table:
            columns = database.read("select name, pk from pragma_table_info('logs')")
        assert columns == [("object", 1), ("ordinal", 2), ("version", 0), ("body", 0)]


def test_an_option_that_is_unknown_is_refused():
    with pytest.raises(AddressError, match="unknown option 'key'"):
        adapters.connect_record_sink(Address("sqlite:///shop.db?key=id", "logs", {}))


@awaited
async def test_a_full_disk_passes_and_is_no_fault_of_a_record():
    """The limit of pages is a real SQLITE_FULL."""
    async with sqlite_records() as bench:
        with pytest.raises(UnavailableError, match="disk is full"):
            async with bench.ledger.transaction() as transaction:
                [[pages]] = transaction.connection.execute("pragma page_count").fetchall()
                transaction.connection.execute(f"pragma max_page_count = {pages + 2}")
                await bench.table.write(transaction, [record(number, b"x" * 4000) for number in range(100)])
        assert await bench.rows() == []
