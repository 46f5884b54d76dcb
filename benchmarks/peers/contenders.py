"""Who takes part, with the settings that were found best for each within what it promises."""

from typing import Any

import msgspec

from benchmarks.machine import ROOT

OURS = ROOT / ".venv" / "bin" / "python"
THEIRS = ROOT / "build" / "peers" / "bin" / "python"


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

    @property
    def is_ours(self) -> bool:
        return self.module == "with_keywise"

    @property
    def needs_redis(self) -> bool:
        return self.module in ("with_dramatiq", "with_locks")

    @property
    def python(self) -> str:
        return str(OURS if self.is_ours else THEIRS)

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
        changes=100_000,
        settings={"how": "batch"},
    ),
    Contender(
        name=ONE_CHANGE,
        module="with_keywise",
        promise="one at a time, newest wins",
        changes=50_000,
        settings={"how": "one", "concurrency": 16},
    ),
    Contender(
        name=IN_TRANSACTION,
        module="with_keywise",
        promise="one at a time, newest wins",
        changes=50_000,
        settings={"how": "transaction"},
    ),
    Contender(
        name="Procrastinate",
        module="with_procrastinate",
        promise="one at a time, in the order sent",
        changes=5_000,
        settings={"concurrency": 10, "pool": 10, "delete_jobs": "never"},
    ),
    Contender(
        name="DBOS",
        module="with_dbos",
        promise="one at a time, in the order sent",
        changes=5_000,
        settings={"connections": 20, "pool": 20, "worker_concurrency": 100, "polling_interval_s": 0.05},
    ),
    Contender(
        name="PgQueuer",
        module="with_pgqueuer",
        promise="none",
        changes=20_000,
        settings={"connections": 16, "batch_size": 100, "max_concurrent_tasks": 0},
    ),
    Contender(
        name="Dramatiq",
        module="with_dramatiq",
        promise="none",
        changes=20_000,
        settings={"processes": 2, "threads": 8},
    ),
    Contender(
        name="lock and latest in Redis",
        module="with_locks",
        promise="one at a time, newest wins, while no lock expires",
        changes=20_000,
        settings={"concurrency": 16, "prefetch": 100},
    ),
]
