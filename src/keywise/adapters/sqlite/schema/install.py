"""The tables of keywise in a SQLite file: created when it is opened first, and refused if another version did."""

import sqlite3

from keywise.core.statements import check_schema, read_sql

VERSION = 7
"""Of the tables. Versions 1 to 6 have other tables and columns."""


def install(connection: sqlite3.Connection, path: str) -> None:
    """Create the tables; two processes may try at once.

    A file that has them is left alone: a worker that starts must not wait for one that was stopped while it wrote.
    """
    if _is_installed(connection, path):
        return
    with connection:
        connection.execute("begin immediate")
        if not _is_installed(connection, path):
            for statement in (read_sql(__package__, "tables.sql") + read_sql(__package__, "serial.sql")).split(";"):
                connection.execute(statement)
            connection.execute("insert into keywise_meta values ('schema', ?), ('tokens', 0)", (VERSION,))


def _is_installed(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the tables are there; those of another version are refused."""
    if connection.execute("select 1 from sqlite_master where name = 'keywise_meta'").fetchone() is None:
        return False
    [found] = connection.execute("select value from keywise_meta where name = 'schema'").fetchone() or [None]
    check_schema(found, VERSION, path, "file")
    return True
