"""An open pipeline: the parts that its workers share, how they wait for one that cannot be reached, and its events."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from keywise.core import events
from keywise.core.admin import ControlStore, LedgerAdmin
from keywise.core.backoff import backoff_s
from keywise.core.clock import Clock, boot_time
from keywise.core.controls import PLAIN, Controls
from keywise.core.database import FairWriteDatabase
from keywise.core.errors import SettingsError, UnavailableError
from keywise.core.history import HistoryStore, Reporter
from keywise.core.ledger import Ledger, MarkingLedger, PluggedLedger
from keywise.core.limits import Debounce, Rate
from keywise.core.notifier import Notifier
from keywise.core.origin import Origin
from keywise.core.settings import Settings
from keywise.core.sink import AtomicSink, Grade, Sink, is_atomic
from keywise.core.source import Source
from keywise.core.url import redacted
from keywise.flow.availability import Availability
from keywise.flow.degraded.journal import JournalStore
from keywise.flow.intake import Intake
from keywise.flow.outage import Outage

if TYPE_CHECKING:
    from keywise.flow.heartbeat import Heartbeat
    from keywise.flow.leased.executors import Executor
    from keywise.flow.settlement import Settlement

T = TypeVar("T")

LEDGER = "ledger"
"""The name of the ledger in `Unavailable` events."""
OVER_LOOK_S = 0.5
"""How often a wait for a part that is away looks whether the work is over."""


class ObjectWork(Protocol):
    """What a pipeline does differently whose keys are objects of a store, which are read as they are processed."""

    def executor(self, pipeline: "OpenPipeline", settlement: "Settlement", heartbeat: "Heartbeat") -> "Executor":
        """Make the executor of its claimed changes."""

    async def key_of(self, pipeline: "OpenPipeline", given: str) -> str:
        """Return the key of an object in the ledger; an operator may give its URI, which can be longer, or the key."""

    async def announce(self, pipeline: "OpenPipeline", key: str, *, removed: bool = False) -> bytes:
        """Send a message with which the object is read again, or its records are deleted; return its body.

        Its order is above all that was written or begun, and below the next version.
        """


def _never() -> bool:
    return False


def _no_notifier(url: str) -> Notifier:
    raise SettingsError(f"nothing here can connect {redacted(url)}")


@dataclass(slots=True, kw_only=True)
class OpenPipeline:
    """The open parts of a pipeline that one consumer works with. The caller opens and closes them."""

    name: str
    sources: Sequence[tuple[str, Source]]
    """Each source with its display name."""
    ledger: Ledger
    admin: LedgerAdmin
    control_store: ControlStore
    history_store: HistoryStore
    sink: Sink | AtomicSink
    reader: Intake
    settings: Settings
    owner: str
    observers: Sequence[events.Observer] = ()
    reporters: Sequence[Reporter] = ()
    """Observers that also store what they have seen; maintenance flushes them."""
    origin: Origin | None = None
    """The source of truth, row by row; None if the pipeline names none."""
    refetch: Callable[[str], Any] | None = None
    """Reads the current body of a key from the source of truth; it returns None if the key is gone."""
    shard_ledger: PluggedLedger | None = None
    """The ledger scope in which a reindex keeps its shards; set if there is an origin."""
    lookup: Callable[[str], Any] | None = None
    """Reads what a handler's store holds of a key, the body or some of its fields; None if the key is not there."""
    objects: ObjectWork | None = None
    """Set if the keys are objects of a store."""
    connect_notifier: Callable[[str], Notifier] = _no_notifier
    """Connects the receiver of a notice by its URL, in which `${NAME}` stands for a variable of the environment."""
    connect_heartbeat: Callable[[], Ledger] | None = None
    """Opens a second connection to the ledger, for a heartbeat in its own thread."""
    bulk: frozenset[int] = frozenset()
    """Indexes of the sources whose changes give way to those of the others."""
    debounce: Debounce | None = None
    rate: Rate | None = None
    journal_store: JournalStore | None = None
    """Where keys are journaled that are written without the ledger; None if the pipeline waits for the ledger."""
    open_target: Callable[[str, int], AbstractAsyncContextManager["OpenPipeline"]] | None = None
    """Opens the pipeline on another target of its sink, in the ledger scope of the run of that generation; None if the
    sink has only one target."""
    move_token: int = 0
    """The token with which claims pass the barrier of a swap; 0: they pass none."""
    controls: Controls = PLAIN
    """The operator's controls, as they were last read."""
    clock: Clock = boot_time
    wall: Clock = time.time
    rng: random.Random = field(default_factory=random.Random)
    outage: Outage = field(init=False)
    availability: Availability = field(default_factory=Availability)
    marking_ledger: MarkingLedger | None = field(init=False)
    """The ledger, if it can decide and mark in one step."""

    def __post_init__(self) -> None:
        self.outage = Outage(
            self.settings.ledger_grace_s, self.clock, self._report_ledger_down, self._report_ledger_back
        )
        self.marking_ledger = self.ledger if isinstance(self.ledger, MarkingLedger) else None

    @property
    def grade(self) -> Grade:
        return self.sink.grade

    @property
    def has_suspects(self) -> bool:
        """Whether keys can become suspect: the sink accepts an older write after a newer one."""
        return may_show_older(self.sink, has_origin=self.origin is not None)

    @property
    def is_without_ledger(self) -> bool:
        """Whether the ledger is down and the pipeline writes without it."""
        return self.outage.is_down and self.journal_store is not None

    @property
    def has_both_lanes(self) -> bool:
        """Whether some sources are bulk and others live; only then does one kind give way to the other."""
        return 0 < len(self.bulk) < len(self.sources)

    async def key_of(self, given: str) -> str:
        """Return the key that an operator means: the key itself, or that of an object whose URI is given."""
        return given if self.objects is None else await self.objects.key_of(self, given)

    def enable_fair_writes(self) -> None:
        """Let producers write between the batches of this pipeline, if it has live and bulk sources.

        A database with one writer at a time would otherwise keep producers of live changes waiting for bulk work.
        """
        if not self.has_both_lanes:
            return
        for database in (self.ledger.database, *(source.database for _, source in self.sources)):
            if isinstance(database, FairWriteDatabase):
                database.enable_fair_writes()

    def emit(self, event: events.Event) -> None:
        events.notify(self.observers, event)
        events.notify(self.reporters, event)

    @contextmanager
    def batch(self, changes: int) -> Iterator[None]:
        """Emit `BatchOpened` on entry and `BatchClosed` on exit, also after an error."""
        self.emit(events.BatchOpened(pipeline=self.name, changes=changes))
        try:
            yield
        finally:
            self.emit(events.BatchClosed(pipeline=self.name, changes=changes))

    def retry_s(self, attempts: int) -> float:
        return backoff_s(attempts, self.settings.backoff_s, self.settings.backoff_max_s, self.rng)

    def until(self, due: float | None) -> float | None:
        """Return the seconds from now until `due`, a reading of `clock`; None if it is never due."""
        return None if due is None or due == float("inf") else max(0.0, due - self.clock())

    async def retry_until_reachable(
        self, what: str, act: Callable[[], Awaitable[T]], is_over: Callable[[], bool] = _never
    ) -> T:
        """Repeat a call, with backoff, until the source, ledger or sink can be reached.

        Raises UnavailableError once the ledger is down and the pipeline writes without it, and if `is_over` is true
        after a call has failed, or while the next one is waited for.
        """
        attempts = 0
        while True:
            try:
                result = await act()
            except UnavailableError as error:
                attempts += 1
                await self.back_off(what, error, attempts, is_over)
                if is_over() or (what == LEDGER and self.is_without_ledger):
                    raise
            else:
                if what == LEDGER:
                    self.outage.answered()
                return result

    async def back_off(
        self, what: str, error: UnavailableError, attempts: int, is_over: Callable[[], bool] = _never
    ) -> None:
        """Report that a source, ledger or sink cannot be reached, and wait, at most until `is_over` is true."""
        ends_at = self.clock() + self.report_unavailable(what, error, attempts)
        look_s = float("inf") if is_over is _never else OVER_LOOK_S
        while (left_s := ends_at - self.clock()) > 0 and not is_over():  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(min(look_s, left_s))

    def report_unavailable(self, what: str, error: UnavailableError, attempts: int) -> float:
        """Report that a source, ledger or sink cannot be reached; return the seconds to wait."""
        retry_s = self.retry_s(attempts)
        if what == LEDGER:
            self.outage.failed(str(error))
        self.count_unavailable(what, error, retry_s)
        return retry_s

    def count_unavailable(self, what: str, error: UnavailableError, retry_s: float) -> None:
        """Emit that a part cannot be reached, with the number of calls that have failed."""
        calls = self.availability.failed(what, self.clock())
        event = events.Unavailable(pipeline=self.name, what=what, cause=str(error), retry_s=retry_s, calls=calls)
        self.emit(event)

    def report_answer(self, what: str) -> None:
        """Note that a source, ledger or sink has answered."""
        if what in self.availability:
            self.availability.answered(what, self.clock())

    def report_restored(self) -> None:
        """Emit which parts are back."""
        if self.outage.seconds == 0.0:
            self.report_answer(LEDGER)
        for back in self.availability.restored(self.clock()):
            event = events.Available(pipeline=self.name, what=back.what, seconds=back.seconds, calls=back.calls)
            self.emit(event)

    def _report_ledger_down(self, seconds: float, cause: str) -> None:
        mode = self.settings.on_ledger_down
        self.emit(events.LedgerDown(pipeline=self.name, since=self.wall() - seconds, cause=cause, mode=mode))

    def _report_ledger_back(self, seconds: float) -> None:
        # LedgerBack says it; a second event would say it again.
        self.availability.forget(LEDGER)
        self.emit(events.LedgerBack(pipeline=self.name, since=self.wall() - seconds, seconds=seconds))


def may_show_older(sink: Sink | AtomicSink, *, has_origin: bool) -> bool:
    """Whether the sink may accept an older write after a newer one: then claims need intents, and keys can be suspect.

    A reindex writes a key again at the version that it has, and a conditional sink accepts an equal version: a stopped
    worker of an earlier run could overwrite what a later run has written.
    """
    return not is_atomic(sink) and (sink.grade is Grade.PLAIN or sink.forgets_deletions or has_origin)
