"""Reports for an operator: the figures of a pipeline, and the state of one key with a forecast for its next change."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec
from msgspec.structs import asdict, replace

from keywise.core.change import VERSION_MAX, VERSION_MIN, ChangeHeader, Order, is_unversioned, order_of
from keywise.core.controls import PLAIN, Controls, Pause
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry, LeaseTerms, LedgerPolicy
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.history import ALARM, ENDS_ALARM, HistoryRecord
from keywise.core.record import OBJECT_HEADER
from keywise.core.rules import decide_under, era_of
from keywise.core.settings import Settings
from keywise.core.sink import Grade, is_atomic
from keywise.core.source import BacklogSource, Source, backlog_of
from keywise.flow.degraded.journal_files import contents_in
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.strategy import choose_strategy

Dated = TypeVar("Dated", Pause, HistoryRecord)

LETTERS_MAX = 1000
"""The dead letters of a key are searched among this many of the newest ones of the pipeline."""
LINES_SHOWN = 20
REFUSED = ("stale", "duplicate", "superseded", "kept removed")
"""Kinds of history records about changes that the mark has refused."""
ALARM_S = 3600.0
"""How long an alarm is shown, unless it has been cleared."""
ALARM_LINES = 1000
"""An alarm is searched among this many of the newest history records that concern the whole pipeline."""


class SourceFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """One source of a pipeline: its commit strategy, and how many messages it holds."""

    source: str
    strategy: str
    depth: int | None
    """None if the source cannot count all of its messages."""
    seen: int | None = None
    """How many it can count, if these are not all."""
    held: int | None = None
    """How many messages consumers hold, in any process; None if the source does not know."""
    advice: str = ""
    """What makes it possible to count all messages."""
    cause: str = ""
    """Why the source cannot be reached."""


class JournalSummary(msgspec.Struct, frozen=True):
    """What the journals of workers on this machine contain that the ledger does not know yet."""

    since: float
    """When the outage began, by the wall clock."""
    keys: int
    journals: int
    resync_due: bool
    """More keys were written than the journals can hold."""
    unread: list[str] = []
    """The journals that cannot be read, each with the cause."""


class PipelineFigures(msgspec.Struct, frozen=True):
    """The figures of a pipeline."""

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
    """Alarms of the last hour that have not been cleared."""
    journal: JournalSummary | None = None
    resync_since: float | None = None
    """Since when a full resync is due; None if it is not."""
    moves_to: str | None = None
    """The target that the name of the sink moves to now; None if it does not move."""


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
    """When it was committed; None if the entry was touched later, because it stores only one time."""
    kept_until: float | None
    """From when on a prune may forget it; None: never."""


class Holder(msgspec.Struct, frozen=True):
    """The claim that holds the key, perhaps with an expired lease."""

    owner: str
    token: int
    since: float
    until: float
    is_over: bool
    gave_up: bool
    """The holder is alive and has reported an unknown outcome: the lease has to expire."""
    level: int
    """How isolated its change runs: 0 as usual, 1 and 2 on probation, 3 alone."""
    intent: int | None
    """The version that it is about to write; None if older changes need not wait for it."""


class UnknownWrite(msgspec.Struct, frozen=True):
    """A write that may be in the sink although it is not committed; older changes wait for it."""

    version: int | None
    until: float


class Tries(msgspec.Struct, frozen=True):
    """The failed attempts at one version, and the crashes of workers that ran it alone."""

    version: int | None
    attempts: int
    attempts_max: int
    crashes: int
    crashes_max: int
    next_at: float | None
    """When the next attempt is due; None: as soon as the message is redelivered."""


class Suspicion(msgspec.Struct, frozen=True):
    """The key is suspect: the sink may hold another state than the mark says."""

    count: int
    since: float
    repair_at: float | None
    """When the key can be repaired; None if the pipeline can neither refetch a key nor read an object again."""


class Limit(msgspec.Struct, frozen=True):
    """The rate limit of the key."""

    n: int
    per_s: float
    next_at: float | None
    """When the next dispatch is allowed; None: now."""


class DeadLetterSummary(msgspec.Struct, frozen=True):
    """A dead letter of the key."""

    number: int
    at: float
    version: int | None
    cause: str
    traceback: str = ""
    record: int | None = None
    """The ordinal of the record that it has; None if it is about the whole object, or about any other key."""


class ForecastRange(msgspec.Struct, frozen=True):
    """The ledger's answer to changes in a range of versions, if they arrived now; None means no limit on that side."""

    lowest: int | None
    highest: int | None
    answer: str
    """`granted`, or one of the refusals in `rules.RefusalReason`."""
    wait_s: float = 0.0
    versioned: bool = True
    """False for unversioned changes."""


class KeyReport(msgspec.Struct, frozen=True):
    """What a pipeline knows of one key. Times are seconds of the wall clock."""

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
    """False if the pipeline has so many dead letters that only the newest were searched."""
    next: list[ForecastRange]
    era: int
    """The era that new changes of the key belong to."""
    pauses: list[Pause]
    """The pauses that cover the key."""
    limit: Limit | None
    history: list[HistoryRecord]
    """The newest records first, up to the requested number, and the commit of the current mark."""
    brokers: list[SourceFigures] = []
    """Sources whose consumers may hold messages that the ledger does not know; changes to this key may be among
    them."""
    moves_to: str | None = None
    """The target that the name of the sink moves to now, so that every key waits; None if it does not move."""


async def figures_of(
    pipeline: OpenPipeline, wall: float, unreached: Mapping[str, str] = MappingProxyType({})
) -> PipelineFigures:
    """Count messages, keys, claims and dead letters; `wall` is the current time.

    `unreached` has the sources that could not be opened, each with the cause.
    """
    sources = [await _reached_figures(pipeline, name, source) for name, source in pipeline.sources]
    sources += [SourceFigures(name, "unknown", None, cause=cause) for name, cause in unreached.items()]
    counts, controls = await pipeline.admin.counts(), await pipeline.control_store.controls()
    now = await pipeline.admin.now()
    alarm = active_alarm(await pipeline.history_store.history("", ALARM_LINES), now - ALARM_S)
    return PipelineFigures(
        pipeline=pipeline.name,
        grade=pipeline.grade,
        sources=sources,
        **asdict(counts),
        era=controls.era,
        pauses=_at_wall_clock(controls.pauses, wall - now),
        alarms=_at_wall_clock([alarm] if alarm is not None else [], wall - now),
        journal=journal_summary_of(pipeline.settings, pipeline.name),
        resync_since=controls.resync_at + wall - now if controls.resync_at else None,
        moves_to=controls.move.after if controls.move is not None else None,
    )


async def _reached_figures(pipeline: OpenPipeline, name: str, source: Source) -> SourceFigures:
    try:
        return await _source_figures(pipeline, name, source)
    except (UnavailableError, DatabaseError) as error:
        return SourceFigures(name, choose_strategy(pipeline, source).value, None, cause=str(error))


async def _source_figures(pipeline: OpenPipeline, name: str, source: Source) -> SourceFigures:
    backlog = await backlog_of(source)
    strategy = choose_strategy(pipeline, source).value
    seen = None if backlog.is_all else backlog.seen
    return SourceFigures(name, strategy, backlog.depth, seen, backlog.held, backlog.advice)


def journal_summary_of(settings: Settings, pipeline: str) -> JournalSummary | None:
    """Summarise the journals of a pipeline on this machine; None if there are none."""
    contents, unread = contents_in(settings.journal, pipeline) if settings.journal is not None else ([], [])
    if not (contents or unread):
        return None
    keys = {key for one in contents for key in one.keys}
    since = min((one.since for one in contents if one.since), default=0.0)
    return JournalSummary(since, len(keys), len(contents), any(one.is_full for one in contents), unread)


async def key_report_of(pipeline: OpenPipeline, key: str, wall: float, lines: int = LINES_SHOWN) -> KeyReport | None:
    """Report what the ledger knows of a key; None if it knows nothing. `wall` is the current time."""
    admin, given, key = pipeline.admin, key, await pipeline.key_of(key)
    entry, now, controls = await admin.inspect(key), await admin.now(), await pipeline.control_store.controls()
    history = await pipeline.history_store.history(key, max(1, lines))
    newest = await admin.dead_letters(LETTERS_MAX)
    ahead_s = wall - now
    names = {key, given} if pipeline.objects is not None else {key}
    letters = [
        DeadLetterSummary(number, at + ahead_s, letter.version, letter.cause, letter.traceback, _ordinal(letter))
        for number, at, letter in newest
        if letter.key == key or (letter.headers or {}).get(OBJECT_HEADER) in names
    ]
    pauses = [pause for pause in controls.pauses if pause.covers(key)]
    if entry is None and not letters and not history and all(pause.is_pattern for pause in pauses):
        return None
    entry = entry or Entry()
    policy = LedgerPolicy(redelivery_s=pipeline.settings.redelivery_s, rate=pipeline.rate)
    mark, shown = _mark(entry, pipeline, ahead_s), _at_wall_clock(history[:lines], ahead_s)
    return KeyReport(
        pipeline=pipeline.name,
        grade=pipeline.grade,
        key=key,
        now=wall,
        mark=mark,
        holder=_holder(entry, now, ahead_s),
        unknown=UnknownWrite(_version(entry.unknown), entry.unknown_until + ahead_s) if entry.unknown else None,
        tries=_tries(entry, pipeline, ahead_s),
        suspicion=_suspicion(entry, pipeline, ahead_s),
        letters=letters,
        letters_are_all=len(newest) < LETTERS_MAX,
        next=forecast(entry, now, policy, _terms(pipeline), controls, key),
        era=era_of(entry, controls),
        pauses=_at_wall_clock(pauses, ahead_s),
        limit=_limit(entry, pipeline, now, ahead_s),
        history=_with_commit(shown, key, mark) if lines else [],
        brokers=[
            await _source_figures(pipeline, name, source)
            for name, source in pipeline.sources
            if isinstance(source, BacklogSource)
        ],
        moves_to=controls.move.after if controls.move is not None else None,
    )


def _ordinal(letter: DeadLetter) -> int | None:
    headers = letter.headers or {}
    ordinal = headers.get("ordinal", "")
    return int(ordinal) if OBJECT_HEADER in headers and ordinal.isdecimal() else None


def forecast(
    entry: Entry, now: float, policy: LedgerPolicy, terms: LeaseTerms | None, controls: Controls = PLAIN, key: str = ""
) -> list[ForecastRange]:
    """Return the answers that changes would get now, from the lowest version to the highest.

    Neighbouring versions with the same answer form one range.
    """

    def answer_to(version: int | None) -> ForecastRange:
        refusal = decide_under(controls, entry, ChangeHeader(key, order_of(version)), now, policy, terms)
        answer, wait_s = (refusal.reason.value, refusal.wait_s) if refusal is not None else ("granted", 0.0)
        return ForecastRange(version, version, answer, wait_s, versioned=version is not None)

    if any(is_unversioned(order) for order in _orders_in(entry)):
        return [answer_to(None), replace(answer_to(0), lowest=None, highest=None)]
    found: list[ForecastRange] = []
    # The answer can change only at the versions in the entry, and at their neighbours.
    near = {order[1] + step for order in _orders_in(entry) for step in (-1, 0, 1)} or {0}
    for version in sorted(version for version in near if VERSION_MIN <= version <= VERSION_MAX):
        forecast_range = answer_to(version)
        last = found[-1] if found else None
        if last is not None and (last.answer, last.wait_s) == (forecast_range.answer, forecast_range.wait_s):
            found[-1] = replace(last, highest=version)
        else:
            found.append(forecast_range)
    found[0] = replace(found[0], lowest=None)
    found[-1] = replace(found[-1], highest=None)
    return found


def _orders_in(entry: Entry) -> list[Order]:
    orders = (entry.mark, entry.intent, entry.unknown, entry.tried, entry.advanced)
    return [order for order in orders if order is not None]


def _terms(pipeline: OpenPipeline) -> LeaseTerms | None:
    """Return the terms of a worker that is not the holder; None if the commit strategy takes no claim."""
    sink = pipeline.sink
    if is_atomic(sink) and not sink.runs_user_code and pipeline.objects is None:
        return None
    return LeaseTerms(owner="", lease_s=pipeline.settings.lease_s)


def _mark(entry: Entry, pipeline: OpenPipeline, ahead_s: float) -> Mark | None:
    if entry.mark is None:
        return None
    (era, _, generation), settings = entry.mark, pipeline.settings
    # A suspicion, and what is remembered of the content, do not move the time of the commit.
    is_idle = replace(entry, suspicions=0, suspected_at=0.0, note=b"", extent=0).is_idle
    is_suspected_since = entry.suspicions > 0 and entry.suspected_at >= entry.updated_at
    touched_at = entry.updated_at + ahead_s
    return Mark(
        era=era,
        version=_version(entry.mark),
        generation=max(0, generation),
        deleted=entry.deleted,
        at=touched_at if is_idle and not is_suspected_since else None,
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
        level=entry.deaths,
        intent=_version(entry.intent),
    )


def _tries(entry: Entry, pipeline: OpenPipeline, ahead_s: float) -> Tries | None:
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


def _suspicion(entry: Entry, pipeline: OpenPipeline, ahead_s: float) -> Suspicion | None:
    if not entry.suspicions:
        return None
    since = entry.suspected_at + ahead_s
    can_repair = pipeline.refetch is not None or pipeline.objects is not None
    repair_at = since + pipeline.settings.horizon_s if can_repair else None
    return Suspicion(entry.suspicions, since, repair_at)


def _limit(entry: Entry, pipeline: OpenPipeline, now: float, ahead_s: float) -> Limit | None:
    rate = pipeline.rate
    if rate is None:
        return None
    next_at = entry.rate_at - rate.burst_s
    return Limit(rate.n, float(rate.per), next_at + ahead_s if next_at > now else None)


def _with_commit(history: list[HistoryRecord], key: str, mark: Mark | None) -> list[HistoryRecord]:
    """Add the commit of the current mark. Workers record applied changes only if the setting `history` is "all"."""
    is_recorded = mark is not None and any(one.what == "applied" and one.version == mark.version for one in history)
    if mark is None or mark.at is None or is_recorded:
        return history
    detail = "a deletion; the current mark" if mark.deleted else "the current mark"
    commit = HistoryRecord(mark.at, "applied", key, mark.version, detail)
    # An idle entry stores whole seconds, rounded up. A change that the mark refused within that second came after the
    # commit.
    before = (one.at < (mark.at - 1.0 if one.what in REFUSED else mark.at) for one in history)
    index = next((index for index, is_older in enumerate(before) if is_older), len(history))
    return [*history[:index], commit, *history[index:]]


def _at_wall_clock(dated: Sequence[Dated], ahead_s: float) -> list[Dated]:
    """Convert times of the store's clock to the wall clock."""
    return [replace(one, at=one.at + ahead_s) for one in dated]


def _version(order: Order | None) -> int | None:
    return None if order is None or is_unversioned(order) else order[1]


def active_alarm(lines: Sequence[HistoryRecord], since: float) -> HistoryRecord | None:
    """Return the newest alarm among history records, which are sorted newest first.

    None if it was cleared, or is older than `since`.
    """
    newest = next((line for line in lines if line.what in (ALARM, *ENDS_ALARM)), None)
    return newest if newest is not None and newest.what == ALARM and newest.at >= since else None
