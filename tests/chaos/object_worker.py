"""A worker process of the tests: one object pipeline, until it is told to stop, is killed, or kills itself."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

import keywise
from ingest.object_rig import read_announcement
from keywise import Record, Transaction
from keywise.core import events
from keywise.observe.log import described

QUIET = (events.BatchOpened, events.BatchClosed, events.Settled, events.Refused, events.Advanced, events.Handled)
INSERT = "insert into logs values (?, ?, ?, ?)"
"""Into a table with a primary key: a record that is written twice fails."""


class ObjectAssignment(msgspec.Struct):
    """What a worker is told at its start."""

    ledger: str
    queue: str
    store: str
    notes: str
    """The file for what it says: nothing that it wrote is lost by a kill."""
    sink: str = ""
    """Empty: a handler inserts the records in the transaction of a ledger in SQLite."""
    dialect: str = ""
    """Empty: messages are those of a folder, see `object_rig.py`."""
    dies: str = ""
    """Where it kills itself at each part of an object, once for each: `inside` its transaction, or `behind` it."""
    options: dict[str, Any] = {}


class Diary:
    """Notes what happens in a file that all lives of a worker share."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.text = Path(path).read_text()

    def note(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def die_once(self, line: str) -> None:
        """Note a line and die with it, unless an earlier life has noted it."""
        if f"{line}\n" not in self.text:
            self.note(line)
            os.kill(os.getpid(), signal.SIGKILL)


def app_of(assignment: ObjectAssignment) -> keywise.App:
    diary, has_written = Diary(assignment.notes), False

    def observe(event: events.Event) -> None:
        nonlocal has_written
        if isinstance(event, events.Started):
            diary.note("started")
        if isinstance(event, events.Advanced | events.Settled) and not has_written:
            has_written = True
            diary.note("has written")
        if isinstance(event, events.Advanced) and assignment.dies == "behind":
            diary.die_once(f"dies behind {event.records}")
        if not isinstance(event, QUIET):
            diary.note(described(event))

    app = keywise.App(assignment.ledger, observers=[observe])
    logs = app.objects("logs", store=assignment.store, **({"format": "ndjson"} | assignment.options))
    logs.source(assignment.queue, dialect=assignment.dialect or read_announcement)
    if assignment.sink:
        logs.sink(assignment.sink)
        return app

    @logs.apply
    async def write(records: list[Record[Any]], transaction: Transaction) -> None:
        rows = [(one.object, one.ordinal, one.version, one.body.decode()) for one in records]
        transaction.connection.executemany(INSERT, rows)
        if assignment.dies == "inside":
            diary.die_once(f"dies inside {records[0].ordinal}")

    return app


def main() -> None:
    assignment = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ObjectAssignment)
    asyncio.run(app_of(assignment).run())


if __name__ == "__main__":
    main()
