"""`keywise status`: prints the figures of each pipeline."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import typer

from keywise.app import App
from keywise.cli.app_loader import AppOption, JsonOption, PipelineOption, choose_pipelines, load, warn_if_in_memory
from keywise.cli.commands.pause import named
from keywise.cli.live.watch import EveryOption, WatchOption, watch_or_once
from keywise.cli.output import count, moment, print_error, print_json, print_line, print_table, size
from keywise.cli.run_text import progress_text, waiting_texts
from keywise.core.controls import Pause
from keywise.core.errors import DatabaseError, KeywiseError, UnavailableError
from keywise.core.url import redacted
from keywise.flow.sink_check import advice_of, keys_missing
from keywise.ingest.object_report import ObjectFigures, object_figures_of
from keywise.ingest.versions import VersionScale
from keywise.operate.inspect import (
    JournalSummary,
    PipelineFigures,
    SourceFigures,
    Unreached,
    figures_of,
    journal_summary_of,
)
from keywise.reindex.report import RunReport, report_active_run

PAUSES_SHOWN = 5
"""How many pauses of single keys are shown."""
MOMENTS = {"at", "since", "resync_since", "started_at", "ended_at"}
"""The fields of the figures that are times."""
NUMBERS = ("keys", "tombstones", "claims", "suspects", "dead")


class PipelineStatus(msgspec.Struct, frozen=True):
    """What the command shows of one pipeline."""

    figures: PipelineFigures
    objects: ObjectFigures | None
    reindex: RunReport | None
    keys_missing: int
    """How many keys should be in the sink, if it is empty."""
    advice: str
    """How to fill it."""
    live: str = ""
    """The target that is live since the last swap; empty if there was none."""
    spare: str = ""
    """The target that was live before, and can be again."""

    @property
    def is_partial(self) -> bool:
        """Whether a queue or the store of the objects could not be reached."""
        is_store_away = self.objects is not None and bool(self.objects.cause)
        return is_store_away or any(source.cause for source in self.figures.sources)


def status(
    app: AppOption = None,
    pipeline: PipelineOption = None,
    watch: WatchOption = False,
    every: EveryOption = None,
    json: JsonOption = False,
) -> None:
    """Show the figures of each pipeline.

    These are its grade, the numbers of messages, keys, tombstones, live claims, suspects and dead letters,
    what is paused, its era, how far a reindex has come, and alarms of the last hour with what to do about them.
    Of a pipeline of objects: its store, what orders the versions, and the objects that workers read in parts now.
    If a queue or the store of the objects cannot be used, shows why, and what the ledger knows. If the ledger cannot
    be used, shows why, and the journals of the workers on this machine. Shows the other pipelines in both cases, and
    exits with status 1.

    \b
    Example:
      keywise status --app shop:app
      keywise status --app shop:app --watch --every 2s
    """
    loaded = load(app)
    warn_if_in_memory(loaded)
    names = choose_pipelines(loaded, [pipeline])

    def look() -> None:
        found, unreached = _look(loaded, names, json)
        partial = [one.figures.pipeline for one in found if one.is_partial]
        if partial and not watch:
            print_error(f"{', '.join(partial)} cannot be shown in full; see the cause above")
        if unreached and not watch:
            print_error(f"{', '.join(one.pipeline for one in unreached)} cannot be shown; see the cause above")
        if (partial or unreached) and not watch:
            raise typer.Exit(1)

    watch_or_once(look, watch=watch, every=every, json=json)


def _look(app: App, names: list[str], json: bool) -> tuple[list[PipelineStatus], list[Unreached]]:
    found, unreached = asyncio.run(_gathered(app, names))
    if json:
        result = {"ledger": redacted(app.ledger_url), "pipelines": [_figures_json(one) for one in found]}
        print_json(result | ({"unreached": unreached} if unreached else {}), moments=MOMENTS)
    else:
        _print_status(found, unreached, time.time())
    return found, unreached


def _figures_json(one: PipelineStatus) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one.figures)
    parts: dict[str, Any] = {
        "objects": one.objects,
        "reindex": one.reindex,
        "keys_missing": one.keys_missing or None,
        "live": one.live or None,
        "spare": one.spare or None,
    }
    return fields | {name: msgspec.to_builtins(part) for name, part in parts.items() if part is not None}


async def _gathered(app: App, names: list[str]) -> tuple[list[PipelineStatus], list[Unreached]]:
    found, unreached, errors = list[PipelineStatus](), list[Unreached](), list[KeywiseError]()
    for name in names:
        try:
            away: dict[str, str] = {}
            async with app.open(name, work=False, unreached=away) as pipeline:
                figures = await figures_of(pipeline, time.time(), away)
                objects, reindex = await object_figures_of(pipeline), await report_active_run(pipeline)
                missing, controls = await keys_missing(pipeline), await pipeline.control_store.controls()
                targets = controls.target, controls.spare
                found.append(PipelineStatus(figures, objects, reindex, missing, advice_of(pipeline), *targets))
        except (UnavailableError, DatabaseError) as error:
            settings = app.pipelines[name].settings
            errors.append(error)
            unreached.append(Unreached(name, str(error), journal_summary_of(settings, name)))
    if errors and not found and all(app.pipelines[name].settings.journal is None for name in names):
        raise errors[0]  # There is nothing to show.
    return found, unreached


def _print_status(found: list[PipelineStatus], unreached: list[Unreached], now: float) -> None:
    if found:
        _print_figures([one.figures for one in found])
    for one in found:
        for note in (*_object_notes(one.objects), *_reindex_notes(one), *_notes(one.figures, now)):
            print_line(f"{one.figures.pipeline}: {note}")
    for away in unreached:
        noted = "; ".join(format_journals(away.journal, now))
        print_line(f"{away.pipeline}: cannot be reached: {away.cause}{f'; {noted}' if noted else ''}")


def _print_figures(found: list[PipelineFigures]) -> None:
    counts = [
        (one.pipeline, one.grade.value, one.keys, one.tombstones, one.claims, one.suspects, one.dead) for one in found
    ]
    print_table(("pipeline", "grade", *NUMBERS), counts, numbers=NUMBERS)
    print()
    queues = [
        (one.pipeline, format_depth(source), source.strategy, source.source) for one in found for source in one.sources
    ]
    print_table(("pipeline", "depth", "strategy", "source"), queues, numbers=("depth",), fold=("source",))


def format_depth(source: SourceFigures) -> str:
    """Format the depth of a source; if it cannot count all messages, a lower bound."""
    if source.depth is not None:
        return str(source.depth)
    return f"{source.seen} or more" if source.seen else "unknown"


def format_held(source: SourceFigures) -> str:
    """Say how many messages consumers hold, or how to find out."""
    if source.held is not None:
        return f"consumers hold {count(source.held, 'message')} of {source.source}"
    return f"how many messages consumers hold of {source.source} is unknown; {source.advice or 'ask again in a moment'}"


def format_journals(journal: JournalSummary | None, now: float, advice: str = "") -> Iterator[str]:
    """Describe the journals: how many keys were written without the ledger, and which journals cannot be read."""
    if journal is not None and journal.journals:
        keys = f"{count(journal.keys, 'key')} {'is' if journal.keys == 1 else 'are'} noted"
        due = "; more were written than are noted, so a full resync is due" if journal.resync_due else ""
        noted = f"{keys} in {count(journal.journals, 'journal')}{due}{advice}"
        yield f"without the ledger since {moment(journal.since, now)}: {noted}"
    for cause in journal.unread if journal is not None else []:
        yield f"a journal cannot be read: {cause}"


def format_pause(pause: Pause, now: float) -> str:
    """Describe a pause: which keys, by whom, since when, and why."""
    keys = named(pause.keys, pause.is_pattern)
    by = f" by {pause.by}" if pause.by else ""
    return f"{keys}{by}, {moment(pause.at, now)}{': ' + pause.why if pause.why else ''}"


def _object_notes(objects: ObjectFigures | None) -> Iterator[str]:
    """Yield where the objects of a pipeline are, what orders them, and which of them are read in parts now."""
    if objects is None:
        return
    order = "their order is known from the first event"
    if objects.scale:
        by = "have no version" if objects.scale == VersionScale.UNVERSIONED else f"are ordered by {objects.scale}"
        order = f"events {by} ({objects.promise})"
    yield f"objects of {objects.store}; {order}"
    if objects.cause:
        yield f"their store gives no answer: {objects.cause}"
    if objects.in_parts:
        yield f"in parts now: {count(objects.in_parts, 'object')}"
    for one in objects.largest:
        yield f"  {count(one.records, 'record')}, {size(one.read)} read of {one.uri!r}"
    if objects.in_parts > len(objects.largest):
        yield f"  and {count(objects.in_parts - len(objects.largest), 'more object')}"


def _reindex_notes(one: PipelineStatus) -> Iterator[str]:
    """Yield how far a reindex has come, why it waits, and whether the sink needs one."""
    report = one.reindex
    if report is None and one.spare:
        yield (
            f"{one.live} is live since the last swap, and {one.spare} is kept: go back with keywise reindex rollback "
            f"{one.figures.pipeline}, or delete it with keywise reindex drop {one.figures.pipeline}"
        )
    if report is not None:
        yield progress_text(report)
        for text in waiting_texts(one.figures.pipeline, report):
            yield f"ALARM: reindex {report.run.generation} waits: {text}"
    if one.keys_missing and report is None:
        yield f"ALARM: the sink is empty, and the ledger has {count(one.keys_missing, 'key')} in it; {one.advice}"


def format_move(target: str) -> str:
    """Format the move of the sink's name to another target."""
    return f"the sink moves to target {target!r} now, and every change waits for that, some seconds"


def _notes(figures: PipelineFigures, now: float) -> Iterator[str]:
    """Yield notes on what an operator has set and on what is wrong; most pipelines have none."""
    if figures.era:
        yield f"era {figures.era}"
    if figures.moves_to is not None:
        yield format_move(figures.moves_to)
    keys = sorted((pause for pause in figures.pauses if not pause.is_pattern), key=lambda pause: pause.keys)
    for pause in (*(pause for pause in figures.pauses if pause.is_pattern), *keys[:PAUSES_SHOWN]):
        yield f"paused: {format_pause(pause, now)}"
    if len(keys) > PAUSES_SHOWN:
        more = count(len(keys) - PAUSES_SHOWN, "more key")
        yield f"paused: {more}; keywise why KEY shows the pauses of a key"
    yield from format_journals(figures.journal, now, "; a worker with this journal makes them suspect")
    if figures.resync_since is not None:
        yield (
            f"A FULL RESYNC IS DUE, since {moment(figures.resync_since, now)}: more keys are suspect than the "
            "ledger knows; write everything again, then run keywise repair --resynced"
        )
    for source in figures.sources:
        if source.cause:
            yield f"{source.source} cannot be reached: {source.cause}"
        elif source.held or source.depth is None:
            yield format_held(source)
    for alarm in figures.alarms:
        yield f"ALARM, {moment(alarm.at, now)}: {alarm.detail}"
