"""Queue, ledger and table in one SQLite file; triggers in it log every write, every mark and every takeover."""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from chaos.witness import Witness
from keywise import Change, Transaction

WEIGHT = 100_000
"""Makes each write cost about a millisecond, as in a table with many indexes, so that kills fall inside batches."""
WRITE_S = 1.0
BUSY_LOOK_S = 0.001
TABLES = """
create table stock (key text primary key, version integer, body text);
create table truth (key text primary key, version integer, body blob, gone integer);
create table log (seq integer primary key autoincrement, key text, version integer, op text, suspicions integer);
create table takeovers (key text, suspect_before integer, suspect_after integer);
create view history as select key, version, op, suspicions from log order by seq;
create view held as select key from keywise_active where token != 0 order by key;
create trigger inserted after insert on stock begin
    insert into log (key, version, op, suspicions) values (new.key, new.version, 'write',
        (select suspicions from keywise_active where key = new.key));
end;
create trigger updated after update on stock begin
    insert into log (key, version, op, suspicions) values (new.key, new.version, 'write',
        (select suspicions from keywise_active where key = new.key));
end;
create trigger marked_first after insert on keywise_marks begin
    insert into log (key, version, op) values (new.key, new.version, iif(new.deleted, 'tombstone', 'mark'));
end;
create trigger marked after update on keywise_marks
    when (old.version, old.deleted) is not (new.version, new.deleted) begin
    insert into log (key, version, op) values (new.key, new.version, iif(new.deleted, 'tombstone', 'mark'));
end;
create trigger deleted after delete on stock begin
    -- The version is that of the tombstone which follows.
    insert into log (key, op) values (old.key, 'delete');
end;
create trigger heavy_insert before insert on stock begin select length(hex(randomblob({weight}))); end;
create trigger taken_over before insert on keywise_active when new.token != 0 begin
    insert into takeovers select key, suspicions, new.suspicions from keywise_active as held
        where held.scope = new.scope and held.key = new.key and held.token not in (0, new.token);
end;
"""
UPSERT = (
    "insert into stock (key, version, body) values (?, ?, ?) "
    "on conflict (key) do update set version = excluded.version, body = excluded.body"
)
LOG_DELETION = (
    "insert into log (key, version, op, suspicions) "
    "values (?, ?, 'delete', (select suspicions from keywise_active where key = ?))"
)
TELL_TRUTH = (
    "insert into truth values (?, ?, ?, ?) on conflict (key) do update set "
    "version = excluded.version, body = excluded.body, gone = excluded.gone"
)


class SqliteShelf:
    """A file that all processes of a run share."""

    on = "sqlite"
    logs_marks = True

    def __init__(self, folder: Path) -> None:
        self._file = folder / "stock.db"
        self.url = self.ledger = f"sqlite:///{self._file}"

    def create(self, *, is_heavy: bool) -> None:
        with self._connection() as connection:
            connection.executescript(TABLES.format(weight=WEIGHT if is_heavy else 1))

    def rows(self, statement: str) -> list[tuple]:
        with self._connection() as connection:
            return connection.execute(statement).fetchall()

    def tell_truth(self, rows: Sequence[tuple]) -> None:
        with self._connection() as connection:
            connection.executemany(TELL_TRUTH, rows)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else can write: a process that is stopped meanwhile does not hold up the others later."""
        with self._connection() as connection:
            connection.execute("begin immediate")
            yield

    def restart(self) -> None:
        raise AssertionError("there is no server to be restarted")

    def close(self) -> None:
        pass

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """What another program has; it commits at the end."""
        with closing(sqlite3.connect(self._file, timeout=30)) as connection, connection:
            yield connection


class Handlers:
    """What is done with a change, each way."""

    def __init__(self, url: str, witness: Witness) -> None:
        self._file = url.removeprefix("sqlite:///")
        self._witness = witness
        self.observers = ()
        self._threads = threading.local()

    def leased(self, change: Change[dict]) -> None:
        """A plain sink: a store of its own, as far as keywise knows."""
        self._witness.obey(change)
        with self._transaction() as connection:
            if change.deleted:
                connection.execute("delete from stock where key = ?", (change.key,))
                connection.execute(LOG_DELETION, (change.key, change.version, change.key))
            else:
                connection.execute(UPSERT, _row(change))

    async def blocking(self, change: Change[dict]) -> None:
        """The same on the event loop, which can do nothing else meanwhile."""
        self.leased(change)

    async def transacted(self, change: Change[dict], transaction: Transaction) -> None:
        self._witness.obey(change)
        if change.deleted:
            transaction.connection.execute("delete from stock where key = ?", (change.key,))
        else:
            transaction.connection.execute(UPSERT, _row(change))

    def refetch(self, key: str) -> bytes | None:
        """The newest body that the producer has sent, or will send next."""
        [body] = self._connection().execute("select body from truth where key = ?", (key,)).fetchone()
        return body

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A write that lands soon or never: the horizon of repairs relies on that."""
        connection, give_up_at = self._connection(), time.monotonic() + WRITE_S
        while not _begins(connection):
            if time.monotonic() > give_up_at:
                raise TimeoutError("the file is locked")
            threading.Event().wait(BUSY_LOOK_S)
        with connection:
            yield connection

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._threads, "connection"):
            self._threads.connection = sqlite3.connect(self._file, timeout=0)
        return self._threads.connection


def _begins(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("begin immediate")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def _row(change: Change[dict]) -> tuple[str, int, str]:
    return change.key, change.version, change.body.decode()
