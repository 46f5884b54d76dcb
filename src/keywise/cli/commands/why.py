"""`keywise why KEY`: prints what the ledger knows of one key, and what would happen to its next change."""

import shlex
import time
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from keywise.cli.app_loader import AppOption, JsonOption, PipelineOption, with_pipelines
from keywise.cli.commands.status import format_held, format_move, format_pause
from keywise.cli.options import require_valid_key
from keywise.cli.output import (
    count,
    duration,
    fail,
    moment,
    print_facts,
    print_json,
    print_line,
    print_table,
    print_traceback,
    size,
    stamp,
)
from keywise.core.history import HistoryRecord
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest.keys import is_shortened, object_key
from keywise.ingest.object_report import ObjectReport, Progress, StoredObject, object_report_of
from keywise.ingest.open_objects import OpenObjects
from keywise.operate.inspect import LETTERS_MAX, LINES_SHOWN, ForecastRange, KeyReport, key_report_of

LETTERS_SHOWN = 10
MOMENTS = {"now", "at", "kept_until", "since", "until", "next_at", "repair_at", "missing_since"}
"""The fields of a report that are times."""
_Found: TypeAlias = tuple[KeyReport, ObjectReport | None]

FORECASTS = {
    "granted": "is applied",
    "stale": "is stale: acked, nothing is written",
    "duplicate": "is a duplicate: acked, nothing is written",
    "removed": "is acked, nothing is written: an operator has removed this version",
    "busy": "waits for the key{wait}",
    "deferred": "waits for the newer write whose outcome is unknown{wait}",
    "probation": "is applied on probation, because a worker died with this key",
    "paused": "waits until its key is resumed",
    "limited": "waits for the rate of its key{wait}",
    "mixed": "becomes a dead letter: versioned and unversioned changes of one key have no order",
}

OBJECT_FORECASTS = {
    "granted": "lets a worker read the object",
    "stale": "is stale: acked, nothing is read",
    "duplicate": "is a duplicate: acked, nothing is read",
    "probation": "lets a worker read the object on probation, because one died with it",
    "mixed": "becomes a dead letter: events with and without a version have no order",
}
"""What differs for the announcement of an object."""

COMPANY = {0: "", 1: ", on probation", 2: ", on probation by itself", 3: ", alone"}
"""How isolated the holder runs a change, by the level of the claim."""

REASONS = {
    "stale": "something newer was committed already",
    "duplicate": "this version was committed already",
    "superseded": "something newer was committed while it waited",
    "kept removed": "a reindex has read this version, at which the key is deleted",
    "claim lost": "another worker may have the key since",
    "taken over": "from a worker whose lease has expired",
}
"""The explanation of each kind of history record."""


def why(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key, or the URI of an object.")],
    app: AppOption = None,
    pipeline: PipelineOption = None,
    lines: Annotated[int, typer.Option("--lines", metavar="N", min=0, help="Lines of history to show.")] = LINES_SHOWN,
    json: JsonOption = False,
) -> None:
    """Explain the state of one key, and what happens next.

    Shows its mark, claim, failed attempts, suspicion and dead letters, whether it is paused or limited,
    what would happen to a change that arrives now, and its history, newest first: which versions were refused, and why.
    Of an object, shows also what the sink holds of it, how far it was read, and whether the store has other content.

    Exits with status 1 if no pipeline knows the key.

    \b
    Example:
      keywise why page-17 --app shop:app
      keywise why s3://uploads/2026/a.ndjson --app shop:app
    """
    require_valid_key(key)

    async def look(pipelines: list[OpenPipeline]) -> tuple[list[_Found], list[str]]:
        found = [await _look(opened, key, lines) for opened in pipelines]
        return [one for one in found if one is not None], [_place(opened) for opened in pipelines]

    found, places = with_pipelines(app, pipeline, look)
    if json:
        print_json({"key": key, "pipelines": [_report_json(*one) for one in found]}, moments=MOMENTS)
    else:
        for report, about in found:
            _print_report(report, about)
    if not found:
        fail(
            f"no change to {key!r} was committed, tried or set aside in {', '.join(places)}; it may still be queued "
            "(see keywise status), or its messages name another key"
        )


async def _look(opened: OpenPipeline, key: str, lines: int) -> "_Found | None":
    report = await key_report_of(opened, key, time.time(), lines)
    return (report, await object_report_of(opened, key, time.time())) if report is not None else None


def _place(opened: OpenPipeline) -> str:
    objects = opened.objects
    return f"{opened.name} ({objects.selection.root})" if isinstance(objects, OpenObjects) else opened.name


def _report_json(report: KeyReport, about: ObjectReport | None) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields | ({"object": msgspec.to_builtins(about) | {"differs": about.differs}} if about is not None else {})


def _print_report(report: KeyReport, about: ObjectReport | None) -> None:
    print_line(f"{report.key!r} in {report.pipeline} ({report.grade})", "bold")
    print_facts(_facts(report, about))
    for letter in report.letters[:1]:
        print_traceback(f"traceback of letter {letter.number}", letter.traceback)
    if report.history:
        print()
        columns = ("history", "what", "version", "by", "detail")
        print_table(columns, map(_row, report.history), numbers=("version",), fold=("detail",))
    print()


def _row(line: HistoryRecord) -> tuple[str, ...]:
    detail = "; ".join(part for part in (REASONS.get(line.what, ""), line.detail) if part)
    return stamp(line.at), line.what, "" if line.version is None else str(line.version), line.by, detail


def _facts(report: KeyReport, about: ObjectReport | None) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name and a text. A fact that is absent is left out, unless its absence matters."""
    yield from _about_mark(report)
    if about is not None:
        yield from _about_object(about, report.now)
    for facts in (_about_orders, _about_claim, _about_attempts):
        yield from facts(report)
    yield from _about_suspicion(report, is_object=about is not None)
    yield from _about_letters(report)
    for broker in report.brokers:
        if broker.held or broker.depth is None:
            yield "queue", f"{format_held(broker)}; changes to this key may be among them"
    yield "", ""
    yield "next", f"{'an announcement' if about is not None else 'a change'} that arrives now:"
    forecasts = FORECASTS if about is None else FORECASTS | OBJECT_FORECASTS
    if report.moves_to is not None:
        forecasts = forecasts | {"paused": "waits until the sink has moved"}
    is_unversioned = not all(one.versioned for one in report.next)
    for forecast_range in report.next:
        if about is not None and is_unversioned and forecast_range.versioned:
            continue  # All events of a pipeline of objects are on one scale.
        wait = f", at most {duration(forecast_range.wait_s)}" if forecast_range.wait_s else ""
        yield "", f"{_range(forecast_range):<24} {forecasts[forecast_range.answer].format(wait=wait)}"
    if about is not None and about.differs and about.progress is None:
        yield "", f"{'keywise force':<24} announces it above all of these, and a worker reads it"
        if not about.stays_removed:
            backfill = f"keywise objects backfill {shlex.quote(report.pipeline)}"
            yield "", f"{backfill:<24} does so for every object whose content differs"


def _about_mark(report: KeyReport) -> Iterator[tuple[str, str]]:
    mark = report.mark
    if mark is None:
        yield "mark", "none: nothing was committed yet"
        return
    era = f", era {mark.era}" if mark.era else ""
    generation = f", generation {mark.generation}" if mark.generation else ""
    when = moment(mark.at, report.now) if mark.at is not None else "at a time that is not stored"
    yield "mark", f"{_named(mark.version)}{era}{generation}, committed {when}"
    yield "tombstone", "yes: the newest change is a deletion" if mark.deleted else "no"
    kept = "for ever" if mark.kept_until is None else f"until {moment(mark.kept_until, report.now)} at least"
    yield "retention", f"the ledger keeps this key {kept}"


def _about_object(about: ObjectReport, now: float) -> Iterator[tuple[str, str]]:
    """Yield what the sink holds of an object, how far a newer version was read, and what the store has."""
    if about.uri and is_shortened(object_key(about.uri)):
        yield "uri", about.uri
    content, progress, stored = about.content, about.progress, about.stored
    if content is not None:
        bad = f", of which {content.bad:,} bad" if content.bad else ""
        gone = "nothing: an operator removed it" if content.removed else "nothing: it was gone"
        held = f"ETag {content.etag}, {count(content.records, 'record')}{bad}" if content.etag else gone
        yield "content", held
    if about.extent:
        yield "extent", f"{about.extent:,}: the sink has no record from this number on, of any version"
    if progress is not None:
        yield from _about_progress(progress, stored, now)
    if stored is not None and stored.cause:
        yield "store", f"gives no answer: {stored.cause}"
    elif stored is not None and not stored.etag:
        yield "store", "has no such object"
    elif stored is not None:
        what = "other content than was committed" if about.differs else "the same content"
        what = "the content that was removed" if about.stays_removed else what
        what = what if content is not None else "an object that was not committed yet"
        yield "store", f"has {what}: ETag {stored.etag}, {size(stored.size or 0)}"


def _about_progress(progress: Progress, stored: StoredObject | None, now: float) -> Iterator[tuple[str, str]]:
    version = _named(progress.version) + (f", generation {progress.generation}" if progress.generation else "")
    if progress.missing_since is not None:
        since = moment(progress.missing_since, now)
        yield "position", f"{version}: the store has no such object since {since}; if it stays missing, it is gone"
        return
    is_same = stored is not None and stored.etag == progress.etag
    whole = f" of {size(stored.size or 0)}" if stored is not None and is_same else ""
    done = f"{count(progress.records, 'record')} written, {size(progress.read)}{whole} read"
    if progress.deletes_tail:
        done = "all records written; those of an earlier version behind them are being deleted"
    yield "position", f"{version}: {done}; the next message that is not newer resumes there"
    if progress.etag:
        replaced = "" if is_same or stored is None or stored.cause else "; replaced since, so it is read from its start"
        yield "reading", f"ETag {progress.etag}{replaced}"


def _about_orders(report: KeyReport) -> Iterator[tuple[str, str]]:
    """Yield what an operator has set for the key, and its rate limit."""
    if report.era:
        is_new = report.mark is None or report.mark.era < report.era
        yield "era", f"{report.era}{'; the next change is newer than all before' if is_new else ''}"
    if not report.pauses:
        yield "paused", "no"
    for pause in report.pauses:
        yield "paused", format_pause(pause, report.now)
    if report.moves_to is not None:
        yield "move", format_move(report.moves_to)
    limit = report.limit
    if limit is not None:
        due = "now" if limit.next_at is None else f"not before {moment(limit.next_at, report.now)}"
        burst = f"{limit.n:,} at once, then " if limit.n > 1 else ""
        yield "rate", f"{burst}one in {duration(limit.per_s / limit.n)}; the next one {due}"


def _about_claim(report: KeyReport) -> Iterator[tuple[str, str]]:
    holder, now = report.holder, report.now
    if holder is None:
        yield "claim", "free"
    else:
        company = COMPANY[holder.level]
        yield "claim", f"held by {holder.owner}{company}, token {holder.token}"
        yield "since", moment(holder.since, now)
        ends = "expired" if holder.is_over else "until"
        gave_up = "; the holder gave up, the outcome of its write is unknown" if holder.gave_up else ""
        yield "lease", f"{ends} {moment(holder.until, now)}{gave_up}"
        if holder.intent is not None:
            yield "intent", f"{_named(holder.intent)}; older changes wait for it"
    if report.unknown is not None:
        until = moment(report.unknown.until, now)
        waits = f"older changes {'wait' if report.unknown.until > now else 'waited'} for it until {until}"
        yield "unknown", f"{_named(report.unknown.version)} may be in the sink without being committed; {waits}"


def _about_attempts(report: KeyReport) -> Iterator[tuple[str, str]]:
    tries = report.tries
    if tries is None:
        return
    deaths = f", {tries.crashes} of {tries.crashes_max} workers died alone with it" if tries.crashes else ""
    yield "attempts", f"{tries.attempts} of {tries.attempts_max} at {_named(tries.version)} failed{deaths}"
    next_at = tries.next_at
    yield (
        "next attempt",
        "when its message comes back" if next_at is None else f"not before {moment(next_at, report.now)}",
    )


def _about_suspicion(report: KeyReport, *, is_object: bool) -> Iterator[tuple[str, str]]:
    suspicion = report.suspicion
    if suspicion is None:
        return
    yield "suspect", f"{count(suspicion.count, 'time')}, the last {moment(suspicion.since, report.now)}"
    if suspicion.repair_at is None:
        yield "repair", "not possible: this pipeline needs an origin, or a function decorated with @pipeline.refetch"
    else:
        how = "announced again by a worker" if is_object else "by refetch"
        yield "repair", f"{how}, not before {moment(suspicion.repair_at, report.now)}"


def _about_letters(report: KeyReport) -> Iterator[tuple[str, str]]:
    if not report.letters_are_all:
        yield "dead", f"looked for among the {LETTERS_MAX:,} newest letters only"
    for letter in report.letters[:LETTERS_SHOWN]:
        number, version = letter.number, _named(letter.version)
        version += f", record {letter.record:,}" if letter.record is not None else ""
        yield "dead", f"letter {number}, {version}, {moment(letter.at, report.now)}: {letter.cause}"
    if len(report.letters) > LETTERS_SHOWN:
        yield "dead", f"and {len(report.letters) - LETTERS_SHOWN:,} more; see keywise dead list"


def _range(forecast_range: ForecastRange) -> str:
    lowest, highest = forecast_range.lowest, forecast_range.highest
    if not forecast_range.versioned:
        return "no version"
    if lowest is None and highest is None:
        return "any version"
    if lowest is None:
        return f"up to version {highest}"
    if highest is None:
        return f"version {lowest} or above"
    return f"version {lowest}" if lowest == highest else f"versions {lowest} to {highest}"


def _named(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
