"""Kills or stops a worker that holds hundreds of claims, and prints how long keys were silent meanwhile.

Two workers run a handler with slow calls. A live stream of changes to many keys goes on the whole time, and a burst
makes one of the workers claim hundreds of changes. This worker is then killed (`kill -9`), or stopped (SIGSTOP) for
longer than its lease and woken up. The silence of a change is the time from its sending until its version or a newer
one is written. A limit that is not kept is reported as MISSED, and the exit status is 1.
"""

import argparse
import itertools
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.fleet import Worker, drained, pause, until
from chaos.kill import SHELVES
from chaos.rabbitmq_backend import RabbitShelf
from chaos.sqlite_backend import SqliteShelf
from chaos.store import Shelf, Store
from chaos.time_line import (
    Effect,
    Limits,
    NothingMeasuredError,
    Record,
    Sent,
    Silence,
    Wait,
    effects,
    judge,
    longest_before,
    readings,
    waits,
)
from keywise.core.clock import boot_time
from keywise.core.settings import seconds
from servers.rabbitmq import DEFAULT, rabbit_server

FAULTS = ("kill", "stop")
STEP_S = 0.1
WARM_UP_S = 5.0
AFTER_S = 10.0
"""The live stream goes on for so long after the victim runs again, or after its leases have expired."""
STOP_FACTOR, STOP_MORE_S = 1.2, 3.0
HEARTBEAT_MIN_S = 2.0
LATE_S = 60.0
"""A change that is written later than this after all limits counts as never written."""
BURSTS_MAX = 8
CLAIMS_LIMIT_S = 2.0
"""A burst that has not made a worker claim enough by then is followed by another one."""


class Setup(msgspec.Struct, frozen=True):
    """The settings of the workers, and the load."""

    lease_s: float = 30.0
    visibility_s: float | None = None
    """Of SQLite and Postgres queues; None: one lease, as keywise sets it."""
    call_s: float = 0.2
    concurrency: int = 200
    live: int = 40
    """Changes a second in the live stream."""
    keys: int = 1000
    """Of the live stream, changed one after another."""
    burst: int = 1200
    """Changes of the burst: half of them to keys of the live stream, half to keys that never change again."""
    claims_min: int = 300

    @property
    def options(self) -> dict[str, object]:
        """The settings of a pipeline that are not the defaults."""
        margin = {"margin": self.lease_s / 4} if self.lease_s < 8.0 else {}
        return {"lease": self.lease_s, "concurrency": self.concurrency, **margin}


class Trial(msgspec.Struct):
    """What one fault on one ledger came to."""

    on: str
    fault: str
    claims: int
    """How many claims the victim held at the fault."""
    sent: int
    """Changes sent during the fault."""
    before_s: float
    """The longest silence before the burst and the fault."""
    starved: float | None
    """The share of the time during the fault in which the other worker waited for a CPU; None where it is unknown.

    A limit that is missed with much of this says more about the machine than about keywise."""
    silences: list[Silence]

    @property
    def line(self) -> str:
        longest = (f"{one.keys} {_told(one)} ({one.verdict})" for one in self.silences)
        return f"  {self.claims} claims, {self.sent} sent; longest silence: {', '.join(longest)}"


def _told(silence: Silence) -> str:
    return "none" if silence.longest_s is None else f"{silence.longest_s:.1f} s"


@contextmanager
def _on_default_rabbitmq(folder: Path) -> Iterator[Shelf]:
    with rabbit_server(advanced=DEFAULT) as server:
        yield RabbitShelf(server, SqliteShelf(folder), arguments={"x-queue-type": "quorum"})


SILENCE_SHELVES = SHELVES | {"rabbitmq": _on_default_rabbitmq}


class LiveStream:
    """Sends changes at a steady pace, and notes when."""

    def __init__(self, store: Store, setup: Setup) -> None:
        self.sent: list[Sent] = []
        self._store, self._setup = store, setup
        keys = [f"k{number}" for number in range(setup.keys)]
        random.Random(setup.keys).shuffle(keys)
        self._keys = itertools.cycle(keys)
        self._versions = itertools.count(1)
        self._once = itertools.count(1)
        self._due = boot_time()

    def run_until(self, moment: float) -> None:
        while boot_time() < moment:
            self.step()

    def step(self) -> None:
        """Send what is due, then wait for a moment."""
        count = int((boot_time() - self._due) * self._setup.live)
        if count > 0:
            # Not more than a second's worth: after a pause of this process, the pace goes on instead of a burst.
            self._send([next(self._keys) for _ in range(min(count, self._setup.live))])
            self._due = boot_time()
        pause(STEP_S)

    def burst(self) -> None:
        half = self._setup.burst // 2
        self._send([*(next(self._keys) for _ in range(half)), *(f"once{next(self._once)}" for _ in range(half))])

    def _send(self, keys: list[str]) -> None:
        at = boot_time()
        news = [Sent(key, next(self._versions), at) for key in keys]
        self._store.send(
            *({"key": one.key, "version": one.version, "call_s": self._setup.call_s} for one in news),
        )
        self.sent += news


class Run:
    """One store, two workers, one stream, and one fault."""

    def __init__(self, folder: Path, shelf: Shelf, setup: Setup) -> None:
        self._setup = setup
        self._store = Store(folder, shelf)
        visibility = "" if setup.visibility_s is None else f"{setup.visibility_s:g}s"
        self._workers = [
            Worker(self._store, "slow", name, visibility=visibility, **setup.options) for name in ("one", "two")
        ]
        self._stream = LiveStream(self._store, setup)

    def trial(self, fault: str) -> Trial:
        try:
            return self._trial(fault)
        finally:
            for worker in self._workers:
                worker.close()
            self._store.close()

    def _trial(self, fault: str) -> Trial:
        setup, stream, on = self._setup, self._stream, self._store.shelf.on
        for worker in self._workers:
            worker.start()
        stream.run_until(boot_time() + WARM_UP_S)
        burst_at = boot_time()
        victim = self._harm(fault)
        began, survivor = boot_time(), next(worker for worker in self._workers if worker is not victim)
        waited_s = survivor.cpu_wait_s
        stream.step()
        claimed = self._store.held_by(victim.process.pid)
        if fault == "stop":
            stream.run_until(began + setup.lease_s * STOP_FACTOR + STOP_MORE_S)
            victim.signal(signal.SIGCONT)
        else:
            stream.run_until(began + setup.lease_s)
        stream.run_until(boot_time() + AFTER_S)
        ended = boot_time()
        starved = None if waited_s is None else ((survivor.cpu_wait_s or 0.0) - waited_s) / (ended - began)
        limits = Limits(setup.lease_s, _redelivery_s(on, fault, setup), setup.call_s, setup.concurrency)
        self._finish(victim if fault == "kill" else None, began + max(setup.lease_s, limits.redelivery_s) + LATE_S)
        record = Record(victim=victim.name, claimed=claimed, began=began, ended=ended, judged_at=boot_time())
        record.sent = stream.sent
        record.effects = self._effects()
        record.readings = [one for worker in self._workers for one in readings(worker.name, worker.notes)]
        sent = sum(began <= one.at for one in record.sent)
        silences = judge(record, limits)
        return Trial(on, fault, len(claimed), sent, longest_before(record, burst_at), starved, silences)

    def _harm(self, fault: str) -> Worker:
        """Kill or stop the first worker that holds enough claims."""
        for _ in range(BURSTS_MAX):
            self._stream.burst()
            try:
                until(lambda: self._loaded() is not None, "claims", self._check, limit_s=CLAIMS_LIMIT_S)
            except TimeoutError:
                continue
            # On SQLite, a process that is stopped inside a write would keep every other process from writing.
            with self._locked() if fault == "stop" else nullcontext():
                victim = self._loaded()
                if victim is not None:
                    victim.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                    return victim
        raise NothingMeasuredError(f"no worker ever held {self._setup.claims_min} claims")

    def _loaded(self) -> Worker | None:
        return next((worker for worker in self._workers if worker.open_changes >= self._setup.claims_min), None)

    def _check(self) -> None:
        for worker in self._workers:
            worker.check()

    def _locked(self) -> AbstractContextManager[None]:
        on = self._store.shelf.on
        return SqliteShelf(self._store.folder).locked() if on in ("sqlite", "rabbitmq") else nullcontext()

    def _finish(self, killed: Worker | None, give_up_at: float) -> None:
        """Wait until everything is written or it is too late, then end the workers."""
        while boot_time() < give_up_at and any(wait.written_at is None for wait in self._waits()):
            pause(STEP_S * 5)
        drained(*(worker for worker in self._workers if worker is not killed))

    def _waits(self) -> list[Wait]:
        return waits(self._stream.sent, self._effects())

    def _effects(self) -> list[Effect]:
        return [one for worker in self._workers for one in effects(worker.notes)]


def _redelivery_s(on: str, fault: str, setup: Setup) -> float:
    if on != "rabbitmq":
        return setup.visibility_s or setup.lease_s
    # The broker redelivers when a connection ends. It gives up a silent one after two intervals of its heartbeat.
    return 0.0 if fault == "kill" else 2 * max(HEARTBEAT_MIN_S, setup.lease_s / 3)


def main() -> int:
    options = _options()
    console = Console(stderr=True)
    lease_s = seconds(options.lease)
    visibility_s = seconds(options.visibility) if options.visibility else None
    setup = Setup(lease_s=lease_s, visibility_s=visibility_s, live=options.live, call_s=seconds(options.call))
    trials, failures = list[Trial](), list[str]()
    for on, fault in itertools.product(options.on or SILENCE_SHELVES, options.fault or FAULTS):
        console.print(f"{on}, {fault} …")
        try:
            trials.append(_run(on, fault, setup))
            console.print(trials[-1].line, soft_wrap=True)
        except NothingMeasuredError as error:
            failures.append(f"{on}, {fault}: nothing was measured: {error}")
    _show(trials, setup)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"setup": setup, "trials": trials})))
    failures += [
        f"{trial.on}, {trial.fault}, {one.keys}: MISSED, silent for {one.longest_s:.1f} s, limit {one.limit_s:.1f} s"
        for trial in trials
        for one in trial.silences
        if one.longest_s is not None and one.verdict == "MISSED"
    ]
    for failure in failures:
        console.print(failure, markup=False)
    return 1 if failures else 0


def _run(on: str, fault: str, setup: Setup) -> Trial:
    with tempfile.TemporaryDirectory() as folder, SILENCE_SHELVES[on](Path(folder)) as shelf:
        return Run(Path(folder), shelf, setup).trial(fault)


def _show(trials: list[Trial], setup: Setup) -> None:
    console = Console(width=130)
    console.print(
        f"lease {setup.lease_s:g} s; visibility of SQLite and Postgres {setup.visibility_s or setup.lease_s:g} s; "
        f"calls of {setup.call_s:g} s, concurrency {setup.concurrency}, {setup.live} changes a second; "
        "RabbitMQ with its own defaults",
        soft_wrap=True,
    )
    table = Table("ledger, queue", "fault", "claims", "sent", "starved", "before", "keys", "changes")
    for column in ("longest silence", "limit", "verdict"):
        table.add_column(column, justify="right")
    for trial in trials:
        told = (
            trial.on,
            trial.fault,
            str(trial.claims),
            str(trial.sent),
            "?" if trial.starved is None else f"{trial.starved:.0%}",
        )
        for silence in trial.silences:
            figures = (_told(silence), f"{silence.limit_s:.1f} s", silence.verdict)
            table.add_row(*told, f"{trial.before_s:.1f} s", silence.keys, str(silence.changes), *figures)
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", action="append", choices=SILENCE_SHELVES, help="only there; may be given several times")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one")
    parser.add_argument("--lease", default="30s", help="of the workers (default: 30s, as keywise has it)")
    parser.add_argument("--visibility", help="of SQLite and Postgres queues (default: the lease, as keywise has it)")
    parser.add_argument("--call", default="200ms", help="how long each call of the handler takes (default: 200ms)")
    parser.add_argument("--live", type=int, default=Setup().live, help="changes a second in the live stream")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
