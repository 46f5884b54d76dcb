"""Who takes part, with the settings that were found best for each within what it promises."""

import sys
from typing import Any

import msgspec

from benchmarks.machine import ROOT
from benchmarks.peers.place import Handler

THEIRS = ROOT / "build" / "peers" / "bin" / "python"


class Noop(msgspec.Struct, frozen=True, kw_only=True):
    """What is different with the handler that does nothing."""

    changes: int
    settings: dict[str, Any] = {}


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    name: str
    module: str
    promise: str
    """What it promises about changes of one key."""
    changes: int
    """How many it gets: enough for about ten seconds."""
    processes: int = 1
    settings: dict[str, Any] = {}
    tried: str = ""
    """What else was tried, and was not faster."""
    noop: Noop | None = None
    """None: it takes no part with the handler that does nothing, because it has no such handler."""

    def with_handler(self, handler: Handler) -> "Contender | None":
        """The contender as it runs with a handler; None if it takes no part."""
        if handler is Handler.UPSERT:
            return self
        if self.noop is None:
            return None
        return msgspec.structs.replace(self, changes=self.noop.changes, settings=self.settings | self.noop.settings)

    @property
    def is_ours(self) -> bool:
        return self.module == "with_keywise"

    @property
    def needs_redis(self) -> bool:
        return self.module in ("with_dramatiq", "with_locks")

    @property
    def python(self) -> str:
        return sys.executable if self.is_ours else str(THEIRS)

    def command(self, does: str) -> list[str]:
        module = f"benchmarks.peers.{self.module}"
        if does == "work" and self.module == "with_dramatiq":
            numbers = ("--processes", str(self.settings["processes"]), "--threads", str(self.settings["threads"]))
            return [self.python, "-m", "dramatiq", module, *numbers]
        return [self.python, "-m", module, does]


TABLE_SINK, BATCH_HANDLER = "keywise, table sink", "keywise, batch handler"
ONE_CHANGE, IN_TRANSACTION = "keywise, one-change handler", "keywise, one-change handler in its transaction"
BATCH, ONE = (TABLE_SINK, BATCH_HANDLER), (ONE_CHANGE,)
"""Which of ours are held against the peers. The third kind is the handler that everybody has."""

CONTENDERS = [
    Contender(
        name=TABLE_SINK,
        module="with_keywise",
        promise="one at a time, newest wins",
        changes=200_000,
        settings={"how": "table"},
    ),
    Contender(
        name=BATCH_HANDLER,
        module="with_keywise",
        promise="one at a time, newest wins",
        changes=60_000,
        settings={"how": "batch"},
    ),
    Contender(
        name=ONE_CHANGE,
        module="with_keywise",
        promise="one at a time, newest wins",
        changes=60_000,
        settings={"how": "one", "concurrency": 32},
        tried="16 or 32 side by side, 2 processes",
        noop=Noop(changes=60_000, settings={"concurrency": 16}),
    ),
    Contender(
        name=IN_TRANSACTION,
        module="with_keywise",
        promise="one at a time, newest wins",
        changes=20_000,
        settings={"how": "transaction"},
    ),
    Contender(
        name="Procrastinate",
        module="with_procrastinate",
        promise="one at a time, in the order sent",
        changes=5_000,
        processes=2,
        settings={"concurrency": 10, "pool": 10, "delete_jobs": "never"},
        tried="1 process, 30 side by side, finished jobs deleted",
        noop=Noop(changes=5_000),
    ),
    Contender(
        name="DBOS",
        module="with_dbos",
        promise="one at a time, in the order sent",
        changes=5_000,
        settings={"connections": 20, "pool": 20, "worker_concurrency": 0, "polling_interval_s": 0.05},
        tried="2 processes, at most 100 at once, polling every 0.2 and 0.5 s",
        noop=Noop(changes=5_000),
    ),
    Contender(
        name="PgQueuer",
        module="with_pgqueuer",
        promise="none",
        changes=60_000,
        settings={"connections": 16, "batch_size": 1000, "max_concurrent_tasks": 0},
        tried="batches of 10 (its default), 100 and 300, 2 processes",
        noop=Noop(changes=60_000),
    ),
    Contender(
        name="Dramatiq",
        module="with_dramatiq",
        promise="none",
        changes=20_000,
        settings={"processes": 2, "threads": 16},
        tried="1 process with 16 threads, 2 with 8 (the default number of threads), 4 with 8",
        noop=Noop(changes=20_000),
    ),
    Contender(
        name="lock and latest in Redis",
        module="with_locks",
        promise="one at a time, newest wins, while no lock expires",
        changes=20_000,
        processes=2,
        settings={"concurrency": 16, "prefetch": 100},
        tried="1 process, 64 side by side",
        noop=Noop(changes=20_000),
    ),
]
"""Settings of 0 mean no limit."""
