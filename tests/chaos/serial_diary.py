"""What callers and functions of the merge queue write down while processes are killed, in a SQLite file of its own."""

import sqlite3
from pathlib import Path

from keywise.core.clock import boot_time

SCHEMA = """
create table if not exists begun (
    number integer primary key, id text, key text, token integer, pid integer, at real, ended real
);
create table if not exists accepted (number integer primary key, key text, id text, token integer);
create table if not exists fences (key text primary key, token integer);
create table if not exists told (id text, pid integer, outcome text, answer text, asked real, at real, deadline real);
"""


class Diary:
    """Every write is one statement, and a lower token than the highest of its key is refused."""

    def __init__(self, path: Path) -> None:
        self.file = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.file.execute("pragma journal_mode = wal")
        self.file.execute("pragma synchronous = off")
        self.file.executescript(SCHEMA)

    def begins(self, id: str, key: str, token: int, pid: int) -> int:
        row = (id, key, token, pid, boot_time())
        statement = "insert into begun (id, key, token, pid, at) values (?, ?, ?, ?, ?) returning number"
        return int(self.file.execute(statement, row).fetchone()[0])

    def ends(self, number: int) -> None:
        self.file.execute("update begun set ended = ? where number = ?", (boot_time(), number))

    def taken(self, key: str) -> int:
        return int(self.file.execute("select count(*) from accepted where key = ?", (key,)).fetchone()[0])

    def accepts(self, key: str, id: str, token: int) -> bool:
        """Whether the token is not lower than one that was here before."""
        self.file.execute("begin immediate")
        try:
            row = self.file.execute("select token from fences where key = ?", (key,)).fetchone()
            if row is not None and row[0] > token:
                return False
            self.file.execute("insert or replace into fences values (?, ?)", (key, token))
            self.file.execute("insert into accepted (key, id, token) values (?, ?, ?)", (key, id, token))
            return True
        finally:
            self.file.execute("commit")

    def tells(self, *row: object) -> None:
        self.file.execute("insert into told values (?, ?, ?, ?, ?, ?, ?)", row)

    def open_since(self, at: float) -> list[tuple]:
        """The processes that are in the middle of a call."""
        return self.file.execute("select pid from begun where ended is null and at > ?", (at,)).fetchall()

    def rows(self, statement: str) -> list[tuple]:
        return self.file.execute(statement).fetchall()
