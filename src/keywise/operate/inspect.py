"""What an operator asks: the figures of a pipeline, and the report on one key with what would happen to it next."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from keywise.core.change import VERSION_MAX, VERSION_MIN, ChangeHeader, Order, is_unversioned, order_of
from keywise.core.controls import PLAIN, Controls, Pause
from keywise.core.entry import Entry, LeaseTerms, LedgerPolicy
from keywise.core.history import ALARM, ENDS_ALARM, HistoryRecord
from keywise.core.rules import decide_under, era_of
from keywise.core.settings import Settings
from keywise.core.sink import Grade, is_atomic
from keywise.flow.degraded.journal_files import contents_in
from keywise.flow.pipeline import Pipeline
from keywise.flow.strategy import choose_strategy

Dated = TypeVar("Dated", Pause, HistoryRecord)

LETTERS_MAX = 1000
"""A key's dead letters are looked for among so many of the newest."""
LINES_SHOWN = 20
ALARM_S = 3600.0
"""An alarm is shown for so long, unless it is over."""
ALARM_LINES = 1000
"""It is looked for among so many of the newest lines that concern the whole pipeline."""


class SourceFigures(msgspec.Struct, frozen=True):
    """One source of a pipeline: how its batches go, and how many messages it holds."""

    source: str
    strategy: str
    depth: int


class JournalSummary(msgspec.Struct, frozen=True):
    """What workers on this machine have noted on disk, and the ledger does not know yet."""

    since: float
    """When the ledger could be reached last, by the wall clock."""
    keys: int
    journals: int
    resync_due: bool
    """More keys were written than are noted."""
    unread: list[str] = []
    """Which journals cannot be read, and why."""


class PipelineFigures(msgspec.Struct, frozen=True):
    """A pipeline in figures."""

    pipeline: str
    grade: Grade
    sources: list[SourceFigures]
    keys: int
    tombstones: int
    claims: int
    suspects: int
    dead: int
    era: int = 0
    pauses: list[Pause] = []
    alarms: list[HistoryRecord] = []
    """Of the last hour, and not over."""
    journal: JournalSummary | None = None
    resync_since: float | None = None
    """Since when a full resync is due; None: it is not."""


class Unreached(msgspec.Struct, frozen=True):
    """A pipeline whose ledger or queue cannot be reached now."""

    pipeline: str
    cause: str
    journal: JournalSummary | None


class Mark(msgspec.Struct, frozen=True):
    """The newest committed change of a key."""

    era: int
    version: int | None
    generation: int
    deleted: bool
    at: float | None
    """None: something else happened to the key since, and only that moment is remembered."""
    kept_until: float | None
    """The first moment at which a prune may forget it; None: never."""


class Holder(msgspec.Struct, frozen=True):
    """Who works on the key, or did when it died."""

    owner: str
    token: int
    since: float
    until: float
    is_over: bool
    gave_up: bool
    """It lives and does not know what became of its write: the lease has to run out."""
    isolated: bool
    intent: int | None
    """The version that it is about to write, where that makes older changes wait."""


class UnknownWrite(msgspec.Struct, frozen=True):
    """A write that may be in the sink without being committed; older changes wait for it."""

    version: int | None
    until: float


class Tries(msgspec.Struct, frozen=True):
    """Failed tries at one version, and deaths of workers that were alone with it."""

    version: int | None
    attempts: int
    attempts_max: int
    crashes: int
    crashes_max: int
    next_at: float | None
    """Not before; None: as soon as its message comes back."""


class Suspicion(msgspec.Struct, frozen=True):
    """The sink may hold something else than the mark says."""

    count: int
    since: float
    repair_at: float | None
    """Not before; None: this pipeline has no refetch, so nobody repairs it."""


class Limit(msgspec.Struct, frozen=True):
    """How often the key may be dispatched."""

    n: int
    per_s: float
    next_at: float | None
    """Not before; None: now."""


class DeadLetterSummary(msgspec.Struct, frozen=True):
    """A dead letter of the key."""

    number: int
    at: float
    version: int | None
    cause: str


class ForecastRange(msgspec.Struct, frozen=True):
    """What changes between two versions would meet now; None stands for no limit on that side."""

    lowest: int | None
    highest: int | None
    answer: str
    """`granted`, or one of the refusals in `rules.RefusalReason`."""
    wait_s: float = 0.0
    versioned: bool = True
    """False: this is about changes without a version."""


class KeyReport(msgspec.Struct, frozen=True):
    """All that a pipeline knows of one key; moments are seconds of the wall clock."""

    pipeline: str
    grade: Grade
    key: str
    now: float
    mark: Mark | None
    holder: Holder | None
    unknown: UnknownWrite | None
    tries: Tries | None
    suspicion: Suspicion | None
    letters: list[DeadLetterSummary]
    letters_are_all: bool
    """False: there are so many dead letters that only the newest were looked at."""
    next: list[ForecastRange]
    era: int
    """What changes of the key belong to now."""
    pauses: list[Pause]
    """Those that cover the key."""
    limit: Limit | None
    history: list[HistoryRecord]
    """Newest first, and not more than were asked for."""


async def figures_of(pipeline: Pipeline, wall: float) -> PipelineFigures:
    """Count what is queued, remembered and set aside. `wall` is the time now."""
    sources = [
        SourceFigures(name, choose_strategy(pipeline, source).value, await source.depth())
        for name, source in pipeline.sources
    ]
    counts, controls = await pipeline.admin.counts(), await pipeline.control_store.controls()
    now = await pipeline.admin.now()
    alarm = active_alarm(await pipeline.history_store.history("", ALARM_LINES), now - ALARM_S)
    return PipelineFigures(
        pipeline=pipeline.name,
        grade=pipeline.grade,
        sources=sources,
        keys=counts.keys,
        tombstones=counts.tombstones,
        claims=counts.claims,
        suspects=counts.suspects,
        dead=counts.dead,
        era=controls.era,
        pauses=_on_the_wall(controls.pauses, wall - now),
        alarms=_on_the_wall([alarm] if alarm is not None else [], wall - now),
        journal=journal_summary_of(pipeline.settings, pipeline.name),
        resync_since=controls.resync_at + wall - now if controls.resync_at else None,
    )


def journal_summary_of(settings: Settings, pipeline: str) -> JournalSummary | None:
    """What is noted in the journals of a pipeline on this machine; None if that is nothing."""
    contents, unread = contents_in(settings.journal, pipeline) if settings.journal is not None else ([], [])
    if not (contents or unread):
        return None
    keys = {key for one in contents for key in one.keys}
    since = min((one.since for one in contents if one.since), default=0.0)
    return JournalSummary(since, len(keys), len(contents), any(one.is_full for one in contents), unread)


async def key_report_of(pipeline: Pipeline, key: str, wall: float, lines: int = LINES_SHOWN) -> KeyReport | None:
    """Tell what the ledger remembers of a key; None if that is nothing at all. `wall` is the time now."""
    admin = pipeline.admin
    entry, now, controls = await admin.inspect(key), await admin.now(), await pipeline.control_store.controls()
    history = await pipeline.history_store.history(key, max(1, lines))
    newest = await admin.dead_letters(LETTERS_MAX)
    ahead_s = wall - now
    letters = [
        DeadLetterSummary(number, buried_at + ahead_s, letter.version, letter.cause)
        for number, buried_at, letter in newest
        if letter.key == key
    ]
    pauses = [pause for pause in controls.pauses if pause.covers(key)]
    if entry is None and not letters and not history and all(pause.is_pattern for pause in pauses):
        return None
    entry = entry or Entry()
    policy = LedgerPolicy(redelivery_s=pipeline.settings.redelivery_s, rate=pipeline.rate)
    return KeyReport(
        pipeline=pipeline.name,
        grade=pipeline.grade,
        key=key,
        now=wall,
        mark=_mark(entry, pipeline, ahead_s),
        holder=_holder(entry, now, ahead_s),
        unknown=UnknownWrite(_version(entry.unknown), entry.unknown_until + ahead_s) if entry.unknown else None,
        tries=_tries(entry, pipeline, ahead_s),
        suspicion=_suspicion(entry, pipeline, ahead_s),
        letters=letters,
        letters_are_all=len(newest) < LETTERS_MAX,
        next=forecast(entry, now, policy, _terms(pipeline), controls, key),
        era=era_of(entry, controls),
        pauses=_on_the_wall(pauses, ahead_s),
        limit=_limit(entry, pipeline, now, ahead_s),
        history=_on_the_wall(history[:lines], ahead_s),
    )


def forecast(
    entry: Entry, now: float, policy: LedgerPolicy, terms: LeaseTerms | None, controls: Controls = PLAIN, key: str = ""
) -> list[ForecastRange]:
    """What a change would meet now, from the lowest version to the highest; equal answers are told together."""

    def meet(version: int | None) -> ForecastRange:
        refusal = decide_under(controls, entry, ChangeHeader(key, order_of(version)), now, policy, terms)
        answer, wait_s = (refusal.reason.value, refusal.wait_s) if refusal is not None else ("granted", 0.0)
        return ForecastRange(version, version, answer, wait_s, versioned=version is not None)

    if any(is_unversioned(order) for order in _named(entry)):
        return [meet(None), replace(meet(0), lowest=None, highest=None)]
    found: list[ForecastRange] = []
    for version in _distinguishing_versions(entry):
        forecast_range = meet(version)
        last = found[-1] if found else None
        if last is not None and (last.answer, last.wait_s) == (forecast_range.answer, forecast_range.wait_s):
            found[-1] = replace(last, highest=version)
        else:
            found.append(forecast_range)
    found[0] = replace(found[0], lowest=None)
    found[-1] = replace(found[-1], highest=None)
    return found


def _distinguishing_versions(entry: Entry) -> Sequence[int]:
    """Each version that the entry names, and its neighbours: between them nothing changes."""
    near = {order[1] + step for order in _named(entry) for step in (-1, 0, 1)} or {0}
    return sorted(version for version in near if VERSION_MIN <= version <= VERSION_MAX)


def _named(entry: Entry) -> list[Order]:
    return [order for order in (entry.mark, entry.intent, entry.unknown, entry.tried) if order is not None]


def _terms(pipeline: Pipeline) -> LeaseTerms | None:
    """What a worker that is not the holder would ask with; None where batches take no claim."""
    sink = pipeline.sink
    if is_atomic(sink) and not sink.runs_user_code:
        return None
    return LeaseTerms(owner="", lease_s=pipeline.settings.lease_s)


def _mark(entry: Entry, pipeline: Pipeline, ahead_s: float) -> Mark | None:
    if entry.mark is None:
        return None
    (era, _, generation), settings = entry.mark, pipeline.settings
    is_idle = Entry(entry.mark, entry.deleted, entry.updated_at) == replace(entry, rate_at=0.0)
    touched_at = entry.updated_at + ahead_s
    return Mark(
        era=era,
        version=_version(entry.mark),
        generation=max(0, generation),
        deleted=entry.deleted,
        at=touched_at if is_idle else None,
        kept_until=None if settings.retention_s is None else touched_at + settings.retention_s + settings.redelivery_s,
    )


def _holder(entry: Entry, now: float, ahead_s: float) -> Holder | None:
    if entry.token == 0:
        return None
    return Holder(
        owner=entry.owner,
        token=entry.token,
        since=entry.updated_at + ahead_s,
        until=entry.lease_until + ahead_s,
        is_over=now >= entry.lease_until,
        gave_up=entry.abandoned,
        isolated=entry.isolated,
        intent=_version(entry.intent),
    )


def _tries(entry: Entry, pipeline: Pipeline, ahead_s: float) -> Tries | None:
    if entry.tried is None or not (entry.attempts or entry.crashes):
        return None
    settings = pipeline.settings
    return Tries(
        version=_version(entry.tried),
        attempts=entry.attempts,
        attempts_max=settings.attempts_max,
        crashes=entry.crashes,
        crashes_max=settings.crashes_max,
        next_at=entry.not_before + ahead_s if entry.not_before else None,
    )


def _suspicion(entry: Entry, pipeline: Pipeline, ahead_s: float) -> Suspicion | None:
    if not entry.suspicions:
        return None
    since = entry.suspected_at + ahead_s
    repair_at = since + pipeline.settings.horizon_s if pipeline.refetch is not None else None
    return Suspicion(entry.suspicions, since, repair_at)


def _limit(entry: Entry, pipeline: Pipeline, now: float, ahead_s: float) -> Limit | None:
    rate = pipeline.rate
    if rate is None:
        return None
    next_at = entry.rate_at - rate.burst_s
    return Limit(rate.n, float(rate.per), next_at + ahead_s if next_at > now else None)


def _on_the_wall(dated: Sequence[Dated], ahead_s: float) -> list[Dated]:
    """Moments of the store's clock as those of the wall clock."""
    return [replace(one, at=one.at + ahead_s) for one in dated]


def _version(order: Order | None) -> int | None:
    return None if order is None or is_unversioned(order) else order[1]


def active_alarm(lines: Sequence[HistoryRecord], since: float) -> HistoryRecord | None:
    """The newest alarm of a pipeline's lines, newest first; None if it is over, or older than that."""
    newest = next((line for line in lines if line.what in (ALARM, *ENDS_ALARM)), None)
    return newest if newest is not None and newest.what == ALARM and newest.at >= since else None
