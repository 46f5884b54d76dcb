"""A table in Postgres: keys and bodies that contain the separator of a batch, and keys that would share a row."""

from contextlib import nullcontext

import pytest

from adapters.postgres.benches import fresh, two_openings
from keywise.adapters.postgres.database import joined
from keywise.adapters.postgres.sink import PostgresSink
from keywise.core.change import Change, order_of
from keywise.core.errors import PermanentError, SettingsError
from keywise.core.sink import Content
from keywise.core.statements import UserTable
from running import run

pytestmark = pytest.mark.server("postgres")

UUID = "0a1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
USUAL = "\x1f"
"""What `joined` puts between texts unless one of them contains it."""
HOSTILE = [
    {"plain": b"one"},
    {"empty": b""},
    {"empty": b"", "another empty": b""},
    {f"a{USUAL}b": b"in the key", "c": b"d"},
    {"e": f"in the {USUAL}body".encode(), "f": USUAL.encode(), "g": USUAL.encode() * 3, "h": b""},
    {"comma,": b",,", "é": "é{}\"'\\".encode(), "NULL": b"NULL"},
]


@pytest.mark.parametrize("bodies", HOSTILE)
@pytest.mark.parametrize("is_binary", [False, True])
def test_a_table_holds_each_body_as_it_was_sent(bodies, is_binary):
    changes = [Change(key, order_of(None if key == "h" else 7), body=body) for key, body in bodies.items()]

    async def main() -> None:
        async with two_openings() as (database, _):
            table = fresh("stock")
            if is_binary:
                await database.write(f"create table {table} (key text primary key, version bigint, body bytea)")
            async with PostgresSink(database, UserTable(table)) as sink, database.transaction() as connection:
                await sink.write(_Within(connection), changes)
            async with PostgresSink(database, UserTable(table)) as sink:
                assert await sink.read(list(bodies)) == {one.key: Content(one.body, one.version) for one in changes}

    run(main())


@pytest.mark.parametrize(
    ("kind", "good", "bad", "spelled"),
    [("uuid", UUID, UUID.upper(), UUID), ("integer", "7", "007", "7"), ("character(3)", "abc", "ab ", "ab")],
)
def test_a_key_that_its_column_would_spell_differently_is_refused(kind, good, bad, spelled):
    """The ledger sees two keys, and the table one row: the older change could overwrite the newer one."""

    async def main() -> None:
        async with two_openings() as (database, _):
            table = fresh("stock")
            await database.write(f"create table {table} (key {kind} primary key, version bigint, body text)")
            async with PostgresSink(database, UserTable(table)) as sink:
                for key, version in ((good, 2), (bad, 1)):
                    change = Change(key, order_of(version), body=b"{}")
                    with nullcontext() if key == good else pytest.raises(PermanentError, match=f"as '{spelled}'"):
                        async with database.transaction() as connection:
                            await sink.write(_Within(connection), [change])
                assert await sink.read([good]) == {good: Content(b"{}", 2)}

    run(main())


def test_a_key_column_in_which_different_keys_are_equal_is_refused():
    async def main() -> None:
        async with two_openings() as (database, _):
            table = fresh("stock")
            await database.write(
                f"create collation {table}_ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
            )
            await database.write(
                f"create table {table} (key text collate {table}_ci primary key, version bigint, body text)"
            )
            with pytest.raises(SettingsError, match="keys that differ can be equal in its column key"):
                async with PostgresSink(database, UserTable(table)):
                    pass

    run(main())


def test_the_separator_occurs_in_no_text():
    *texts, separator = joined(["a", USUAL], ["b", "c"])
    assert [text.split(separator) for text in texts] == [["a", USUAL], ["b", "c"]]
    assert joined([], []) == ["", "", USUAL]


class _Within:
    """As much of a transaction as a sink needs."""

    def __init__(self, connection) -> None:
        self.connection = connection
