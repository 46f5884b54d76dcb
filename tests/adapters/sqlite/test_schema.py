"""A SQLite file that an older keywise wrote is refused, and left as it is."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.schema.install import VERSION
from keywise.core.errors import DatabaseError
from running import run


async def opened(path: Path) -> None:
    async with SqliteDatabase(str(path)):
        pass


@pytest.mark.parametrize("version", range(1, VERSION))
def test_a_file_of_an_older_keywise_is_refused_with_what_to_do(tmp_path, version):
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("create table keywise_meta (name text primary key, value) without rowid")
        file.execute("insert into keywise_meta values ('schema', ?)", (version,))
    with pytest.raises(
        DatabaseError, match=r"written by an older keywise .*; finish the work there .* name another file"
    ):
        run(opened(path))
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("select name from sqlite_master").fetchall() == [("keywise_meta",)]
