"""A table in SQLite: which key columns it may have."""

import sqlite3
from contextlib import closing, nullcontext

import pytest

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.sink import SqliteSink
from keywise.core.errors import SettingsError
from keywise.core.statements import UserTable
from running import run


@pytest.mark.parametrize(
    ("column", "is_good"),
    [
        ("text", True),
        ("varchar(40)", True),
        ("", True),
        ("blob", True),
        ("text collate nocase", False),
        ("text collate rtrim", False),
        ("integer", False),
        ("numeric", False),
        ("real", False),
    ],
)
def test_a_key_column_in_which_different_keys_are_equal_is_refused(tmp_path, column, is_good):
    """The ledger sees two keys, and the table one row: the older change could overwrite the newer one."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"create table stock (key {column} primary key, version integer, body)")

    async def main() -> None:
        async with SqliteSink(SqliteDatabase(path), UserTable("stock")):
            pass

    with nullcontext() if is_good else pytest.raises(SettingsError, match="keys that differ can be equal"):
        run(main())
