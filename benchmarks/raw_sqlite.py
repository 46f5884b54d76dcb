"""The raw limit on SQLite: a bare loop with one durable transaction per batch, where the newest version wins.

Nothing else is there: no retry, no dead letter, no lease, no history, no events.
"""

import sqlite3
import time
from pathlib import Path

import msgspec

from benchmarks.workload import decode

# The same as keywise uses.
PRAGMAS = """
pragma journal_mode = wal;
pragma synchronous = full;
pragma cache_size = -65536;
pragma wal_autocheckpoint = 4000;
"""
SCHEMA = """
create table queue (id integer primary key, body blob not null);
create table marks (key text primary key, version integer not null, updated_at integer not null) without rowid;
create table pages (key text primary key, version integer not null, body blob not null) without rowid;
"""
LOOK = "select 1 from queue limit 1"
RECEIVE = "select id, body from queue order by id limit ?"
DECIDE = "select key, version from marks where key in (select value from json_each(?))"
WRITE = (
    "insert into pages values (?, ?, ?) "
    "on conflict (key) do update set version = excluded.version, body = excluded.body"
)
MARK = (
    "insert into marks values (?, ?, ?) "
    "on conflict (key) do update set version = excluded.version, updated_at = excluded.updated_at"
)
ACK = "delete from queue where id between ? and ?"
SEND = "insert into queue (body) values (?)"

LAYERS = {
    "begin immediate": "begin",
    RECEIVE: "queue read",
    DECIDE: "decide",
    WRITE: "sink write",
    MARK: "mark",
    ACK: "ack",
    "commit": "commit",
}


def connect(path: Path, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, factory=factory)
    connection.executescript(PRAGMAS)
    return connection


def send(connection: sqlite3.Connection, bodies: list[bytes]) -> None:
    """Append to the queue, durably once it returns."""
    connection.execute("begin immediate")
    connection.executemany(SEND, [(body,) for body in bodies])
    connection.execute("commit")


def drain_batch(connection: sqlite3.Connection, batch: int) -> int:
    """Bring up to `batch` changes to an end; return how many there were."""
    connection.execute("begin immediate")
    rows = connection.execute(RECEIVE, (batch,)).fetchall()
    if not rows:
        connection.execute("rollback")
        return 0
    newest: dict[str, tuple[int, bytes]] = {}
    for _, body in rows:
        change = decode(body)
        key, version = change.content_id, change.payload_version
        if key not in newest or version > newest[key][0]:
            newest[key] = (version, body)
    marks = dict(connection.execute(DECIDE, (msgspec.json.encode(list(newest)).decode(),)).fetchall())
    won = [(key, version, body) for key, (version, body) in newest.items() if version > marks.get(key, 0)]
    now = int(time.time())
    connection.executemany(WRITE, won)
    connection.executemany(MARK, [(key, version, now) for key, version, _ in won])
    connection.execute(ACK, (rows[0][0], rows[-1][0]))
    connection.execute("commit")
    return len(rows)


def stored(connection: sqlite3.Connection) -> dict[str, int]:
    """The version of each key that the table holds."""
    return dict(connection.execute("select key, version from pages"))
