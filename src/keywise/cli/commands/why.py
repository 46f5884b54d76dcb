"""`keywise why KEY`: prints what the ledger knows of one key, and what would happen to its next change."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from keywise.cli.app_loader import AppOption, JsonOption, PipelineOption, with_pipelines
from keywise.cli.commands.status import format_held, format_pause
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
    stamp,
)
from keywise.core.history import HistoryRecord
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.inspect import LETTERS_MAX, LINES_SHOWN, ForecastRange, KeyReport, key_report_of

LETTERS_SHOWN = 10
MOMENTS = {"now", "at", "kept_until", "since", "until", "next_at", "repair_at"}
"""The fields of a report that are times."""

FORECASTS = {
    "granted": "is applied",
    "stale": "is stale: acked, nothing is written",
    "duplicate": "is a duplicate: acked, nothing is written",
    "busy": "waits for the key{wait}",
    "deferred": "waits for the newer write whose outcome is unknown{wait}",
    "probation": "is applied on probation, because a worker died with this key",
    "paused": "waits until its key is resumed",
    "limited": "waits for the rate of its key{wait}",
    "mixed": "becomes a dead letter: versioned and unversioned changes of one key have no order",
}

COMPANY = {0: "", 1: ", on probation", 2: ", on probation by itself", 3: ", alone"}
"""How isolated the holder runs a change, by the level of the claim."""

REASONS = {
    "stale": "something newer was committed already",
    "duplicate": "this version was committed already",
    "superseded": "something newer was committed while it waited",
    "claim lost": "another worker may have the key since",
    "taken over": "from a worker whose lease has expired",
}
"""The explanation of each kind of history record."""


def why(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    app: AppOption = None,
    pipeline: PipelineOption = None,
    lines: Annotated[int, typer.Option("--lines", metavar="N", min=0, help="Lines of history to show.")] = LINES_SHOWN,
    json: JsonOption = False,
) -> None:
    """Explain the state of one key, and what happens next.

    Shows its mark, claim, failed attempts, suspicion and dead letters, whether it is paused or limited,
    what would happen to a change that arrives now, and its history, newest first: which versions were refused, and why.

    Exits with status 1 if no pipeline knows the key.

    \b
    Example:
      keywise why page-17 --app shop:app
    """
    require_valid_key(key)

    async def look(pipelines: list[OpenPipeline]) -> tuple[list[KeyReport], list[str]]:
        found = [await key_report_of(opened, key, time.time(), lines) for opened in pipelines]
        return [report for report in found if report is not None], [opened.name for opened in pipelines]

    reports, names = with_pipelines(app, pipeline, look)
    if json:
        print_json({"key": key, "pipelines": reports}, moments=MOMENTS)
    else:
        for report in reports:
            _print_report(report)
    if not reports:
        fail(
            f"no change to {key!r} was committed, tried or set aside in {', '.join(names)}; it may still be queued "
            "(see keywise status), or its messages name another key"
        )


def _print_report(report: KeyReport) -> None:
    print_line(f"{report.key!r} in {report.pipeline} ({report.grade})", "bold")
    print_facts(_facts(report))
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


def _facts(report: KeyReport) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name and a text. A fact that is absent is left out, unless its absence matters."""
    for about in (_about_mark, _about_orders, _about_claim, _about_attempts, _about_suspicion, _about_letters):
        yield from about(report)
    for broker in report.brokers:
        if broker.held or broker.depth is None:
            yield "queue", f"{format_held(broker)}; changes to this key may be among them"
    yield "", ""
    yield "next", "a change that arrives now:"
    for forecast_range in report.next:
        wait = f", at most {duration(forecast_range.wait_s)}" if forecast_range.wait_s else ""
        yield "", f"{_range(forecast_range):<24} {FORECASTS[forecast_range.answer].format(wait=wait)}"


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


def _about_orders(report: KeyReport) -> Iterator[tuple[str, str]]:
    """Yield what an operator has set for the key, and its rate limit."""
    if report.era:
        is_new = report.mark is None or report.mark.era < report.era
        yield "era", f"{report.era}{'; the next change is newer than all before' if is_new else ''}"
    if not report.pauses:
        yield "paused", "no"
    for pause in report.pauses:
        yield "paused", format_pause(pause, report.now)
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


def _about_suspicion(report: KeyReport) -> Iterator[tuple[str, str]]:
    suspicion = report.suspicion
    if suspicion is None:
        return
    yield "suspect", f"{count(suspicion.count, 'time')}, the last {moment(suspicion.since, report.now)}"
    if suspicion.repair_at is None:
        yield "repair", "not possible: this pipeline has no refetch function; add one with @pipeline.refetch"
    else:
        yield "repair", f"by refetch, not before {moment(suspicion.repair_at, report.now)}"


def _about_letters(report: KeyReport) -> Iterator[tuple[str, str]]:
    if not report.letters_are_all:
        yield "dead", f"looked for among the {LETTERS_MAX:,} newest letters only"
    for letter in report.letters[:LETTERS_SHOWN]:
        number, version = letter.number, _named(letter.version)
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
