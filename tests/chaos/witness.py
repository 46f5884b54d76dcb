"""What a worker process of the tests is told at its start, and what it says where a killer can read it after its death.

One file has a byte for "inside a batch", another one has notes. A message can tell the handler what to do besides
writing (`do`).
"""

import mmap
import os
import struct
import threading
from typing import Any

import msgspec

from keywise import Change
from keywise.core import events
from keywise.observe.log import described

INSIDE, STARTED = 0, 1
"""The bytes of the flags file."""
OPEN = struct.Struct("<I")
OPEN_AT = 4
"""How many changes it has claimed and not concluded follows them."""
FLAGS_BYTES = OPEN_AT + OPEN.size
EXIT_OF_POISON = 77
QUIET = (events.BatchOpened, events.BatchClosed, events.Settled, events.Refused)


class Assignment(msgspec.Struct):
    """What a worker is told at its start."""

    on: str
    """`sqlite`, `postgres`, `redis` (then queue and table are in Postgres), or `rabbitmq` (then only the queue is)."""
    ledger: str
    url: str
    """Of queue and table."""
    way: str
    """`one transaction`, `transacted`, `leased`, `blocking` (leased, on the event loop) or `slow` (leased, without a
    table: see `SlowHandler`)."""
    flags: str
    notes: str
    options: dict[str, Any] = {}
    visibility: str = "60s"
    """Of a queue beside the table; empty: as keywise sets it."""
    queue: str = ""
    """The URL of the queue, if it is not beside the table."""
    gate: str = ""
    """Where to wait for a byte on stdin: at the first `batch` that opens, or in a `handler` if its message says so."""


class Witness:
    """Keeps flags and notes; nothing that it wrote is lost by a kill."""

    def __init__(self, assignment: Assignment) -> None:
        with open(assignment.flags, "r+b") as file:
            self._flags = mmap.mmap(file.fileno(), FLAGS_BYTES)
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

    def obey(self, change: Change[dict]) -> None:
        """Do what a message tells its handler to do."""
        self.note(f"handles {change.key} {change.version}")
        match change.value.get("do"):
            case "exit":
                os._exit(EXIT_OF_POISON)
            case "wait":
                threading.Event().wait(change.value["seconds"])
            case "gate":
                self.gate("handler", change.key)

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.BatchOpened():
                self._open += event.changes
            case events.BatchClosed():
                self._open -= event.changes
            case events.Started():
                self._flags[STARTED] = 1
        self._flags[INSIDE] = self._open > 0
        OPEN.pack_into(self._flags, OPEN_AT, max(0, self._open))
        if not isinstance(event, QUIET):
            self.note(described(event))
        if isinstance(event, events.BatchOpened):
            self._batches += 1
            if self._batches == 1:
                self.gate("batch", "batch")
