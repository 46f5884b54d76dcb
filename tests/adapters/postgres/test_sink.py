"""What a table in Postgres holds after bodies and keys that look like the separator of a batch."""

import pytest

from adapters.postgres.benches import fresh, two_openings
from keywise.adapters.postgres.database import joined
from keywise.adapters.postgres.sink import PostgresSink
from keywise.core.change import Change, order_of
from keywise.core.sink import Content
from keywise.core.statements import UserTable
from running import run

pytestmark = pytest.mark.server("postgres")

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


def test_the_separator_occurs_in_no_text():
    *texts, separator = joined(["a", USUAL], ["b", "c"])
    assert [text.split(separator) for text in texts] == [["a", USUAL], ["b", "c"]]
    assert joined([], []) == ["", "", USUAL]


class _Within:
    """As much of a transaction as a sink needs."""

    def __init__(self, connection) -> None:
        self.connection = connection
