"""A SQLite file that an older keywise wrote is brought up to date when it is opened."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.schema.install import VERSIONS
from running import run


def write_old(path: Path, version: int) -> None:
    """A file as it was at a version of the schema."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        for script in VERSIONS[:version]:
            file.executescript(script)
        file.execute("insert into keywise_meta values ('schema', ?)", (version,))
        file.execute("insert into keywise_letters values (1, 1, 5.0, 'a', 1, 'cause', x'00', null, 1.0, 'source')")


async def opened(path: Path) -> None:
    async with SqliteDatabase(str(path)):
        pass


def parts(path: Path) -> list[tuple]:
    with closing(sqlite3.connect(path)) as file:
        found = file.execute("select type, name, tbl_name from sqlite_master order by type, name").fetchall()
        return found + [file.execute(f"pragma table_info({name})").fetchall() for _, name, _ in found]


@pytest.mark.parametrize("version", range(1, len(VERSIONS)))
def test_an_older_file_becomes_as_a_new_one_and_keeps_what_it_holds(tmp_path, version):
    write_old(tmp_path / "old.db", version)
    for name in ("old.db", "new.db"):
        run(opened(tmp_path / name))
    assert parts(tmp_path / "old.db") == parts(tmp_path / "new.db")
    with closing(sqlite3.connect(tmp_path / "old.db")) as file:
        assert file.execute("select key, cause from keywise_letters").fetchall() == [("a", "cause")]
        assert file.execute("select value from keywise_meta where name = 'schema'").fetchone() == (len(VERSIONS),)
