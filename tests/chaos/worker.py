"""A worker process of the tests: one pipeline on a SQLite file, until it is told to stop or killed.

It says what it does where a killer can read it after its death: in a file with one byte for "inside a batch",
and in a file of notes. A message can tell the handler what to do besides writing (`do`).
"""

import asyncio
import mmap
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import keywise
from keywise import Change, Transaction, events

INSIDE, STARTED = 0, 1
"""The bytes of the flags file."""
EXIT_OF_POISON = 77
WRITE_S = 1.0
BUSY_LOOK_S = 0.001
QUIET = (events.BatchOpened, events.BatchClosed, events.Settled, events.Refused)
UPSERT = (
    "insert into stock (key, version, body) values (?, ?, ?) "
    "on conflict (key) do update set version = excluded.version, body = excluded.body"
)

LOG_DELETION = (
    "insert into log (key, version, op, suspect) "
    "values (?, ?, 'delete', (select suspect from keywise_active where key = ?))"
)


class Assignment(msgspec.Struct):
    """What a worker is told at its start."""

    file: str
    way: str
    """`one transaction`, `transacted`, `leased` or `blocking`; the last is leased, on the event loop."""
    flags: str
    notes: str
    options: dict[str, Any] = {}
    visibility: str = "60s"
    gate: str = ""
    """Where to wait for a byte on stdin: at the first `batch` that opens, or in a `handler` if its message says so."""


class Witness:
    """Keeps flags and notes; nothing that it wrote is lost by a kill."""

    def __init__(self, assignment: Assignment) -> None:
        with open(assignment.flags, "r+b") as file:
            self._flags = mmap.mmap(file.fileno(), 2)
        self._notes = os.open(assignment.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._gate = assignment.gate
        self._batches = 0
        self._open = 0

    def note(self, text: str) -> None:
        os.write(self._notes, f"{text}\n".encode())

    def gate(self, where: str, name: str) -> None:
        if self._gate == where:
            self.note(f"gated {name}")
            os.read(0, 1)

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.BatchOpened():
                self._open += event.changes
            case events.BatchClosed():
                self._open -= event.changes
            case events.Started():
                self._flags[STARTED] = 1
        self._flags[INSIDE] = self._open > 0
        if not isinstance(event, QUIET):
            self.note(events.described(event))
        if isinstance(event, events.BatchOpened):
            self._batches += 1
            if self._batches == 1:
                self.gate("batch", "batch")


class Handlers:
    """What is done with a change, each way."""

    def __init__(self, file: str, witness: Witness) -> None:
        self._file = file
        self._witness = witness
        self._threads = threading.local()

    def leased(self, change: Change[dict]) -> None:
        """A plain sink: a store of its own, as far as keywise knows."""
        self._obey(change)
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
        self._obey(change)
        if change.deleted:
            transaction.connection.execute("delete from stock where key = ?", (change.key,))
        else:
            transaction.connection.execute(UPSERT, _row(change))

    def refetch(self, key: str) -> bytes | None:
        """The newest body that the producer has sent, or will send next."""
        [body] = self._connection().execute("select body from truth where key = ?", (key,)).fetchone()
        return body

    def _obey(self, change: Change[dict]) -> None:
        self._witness.note(f"handles {change.key} {change.version}")
        match change.value.get("do"):
            case "exit":
                os._exit(EXIT_OF_POISON)
            case "wait":
                threading.Event().wait(change.value["seconds"])
            case "gate":
                self._witness.gate("handler", change.key)

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


def app_of(assignment: Assignment, witness: Witness) -> keywise.App:
    url = f"sqlite:///{assignment.file}"
    app = keywise.App(url, observers=[witness])
    pipeline = app.pipeline("stock", key="key", version="version", deleted={"gone": [True]}, **assignment.options)
    pipeline.source(f"{url}?visibility={assignment.visibility}")
    handlers = Handlers(assignment.file, witness)
    if assignment.way == "one transaction":
        pipeline.sink(f"{url}?table=stock")
    elif assignment.way == "transacted":
        pipeline.apply(handlers.transacted)
    else:
        pipeline.apply(handlers.leased if assignment.way == "leased" else handlers.blocking)
        pipeline.refetch(handlers.refetch)
    return app


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


def main() -> None:
    assignment = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Assignment)
    asyncio.run(app_of(assignment, Witness(assignment)).run())


if __name__ == "__main__":
    main()
