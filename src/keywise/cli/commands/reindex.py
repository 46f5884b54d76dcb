"""`keywise reindex`: reads every row of the origin again while live changes flow, and writes each where it belongs."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from keywise.cli.admin_options import AdminOptions, WhoOption, WhyOption, YesOption, audit_note, confirm, perform
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.options import grouped, require_storable
from keywise.cli.output import count, duration, fail, plain, print_facts, print_json, progress
from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.operate.admin import PipelineAdmin
from keywise.reindex.admin import ReindexAdmin, needs_origin
from keywise.reindex.plan import SHARD_ROWS, RunPlan
from keywise.reindex.report import RunReport, ShardReport, report_run

app = typer.Typer(help="Read every row of the origin again while live changes flow.", no_args_is_help=True)

WATCH_S = 0.5
"""How often a command that waits for a run looks at it."""
MOMENTS = ("started_at", "ended_at")
PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE")]
DeleteOption = Annotated[
    int | None,
    typer.Option("--delete-max", metavar="N", min=0, help="Delete at most so many keys that the origin has not."),
]


@dataclass(frozen=True, kw_only=True)
class ActOptions:
    """The options of an operator's command on one pipeline, whose name is an argument."""

    app: AppOption = None
    why: WhyOption = ""
    who: WhoOption = ""
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Which rows are read, and how."""

    to: Annotated[int | None, typer.Option(metavar="N", min=1, help="The generation; else the next one.")] = None
    ids: Annotated[str | None, typer.Option(metavar="FILE", help="Only these keys, one a line; - is stdin.")] = None
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Read at most so many rows.")] = None
    shard_rows: Annotated[int, typer.Option(metavar="N", min=1, help="About how many rows a shard has.")] = SHARD_ROWS
    also_removed: Annotated[
        bool, typer.Option("--also-removed", help="Also write rows that an operator has removed.")
    ] = False
    delete_max: DeleteOption = None
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not compare versions of the origin with the ledger first.")
    ] = False
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False


@app.command()
@grouped
def start(pipeline: PipelineArgument, *, chosen: StartOptions, options: ActOptions) -> None:
    """Write every row of the origin again, at a new generation, while live changes flow.

    Workers (keywise run) read the rows in shards and hand them to the pipeline. A live change always wins over the row
    of the same key, and a deletion stays deleted. Afterwards keys that the origin has not are looked up again, and
    deleted if they are gone.

    \b
    Example:
      keywise reindex start search --wait --app shop:app
      keywise reindex start search --ids keys.txt --app shop:app
    """
    plan = RunPlan(
        generation=chosen.to,
        shard_rows=chosen.shard_rows,
        keys=_read_keys(chosen.ids) if chosen.ids is not None else None,
        limit=chosen.limit,
        also_removed=chosen.also_removed,
        delete_max=chosen.delete_max,
        is_checked=not chosen.unchecked,
    )

    async def act(admin: PipelineAdmin) -> ReindexRun:
        run = await _reindex_admin(admin, options).start(plan, _print_step)
        return await _until_ended(admin, run) if chosen.wait else run

    name, run = _perform(pipeline, options, act)
    text = f"reindex {run.generation} of {name} is {run.state.value}: {count(run.shards, 'shard')}"
    if run.state is RunState.SCANNING:
        text += "; workers read them, see keywise reindex status"
    _print_run(name, run, text, json=options.json)
    if run.state is RunState.CANCELLED:
        raise typer.Exit(1)


@app.command()
@grouped
def status(pipeline: PipelineArgument, *, options: ActOptions) -> None:
    """Show how far the last run has come, what became of its rows, and why it waits.

    \b
    Example:
      keywise reindex status search --app shop:app
    """

    async def act(admin: PipelineAdmin) -> RunReport | None:
        _, shards = needs_origin(admin.pipeline)
        return await report_run(admin.pipeline, shards)

    name, report = _perform(pipeline, options, act)
    if report is None:
        fail(f"pipeline {name!r} was never reindexed; start with: keywise reindex start {name}")
    if options.json:
        figures = {"rows_per_s": round(report.rows_per_s, 1), "left_s": report.left_s}
        print_json({"pipeline": name, **msgspec.to_builtins(report), **figures}, moments=MOMENTS)
    else:
        print_facts(_facts(name, report))


@app.command()
@grouped
def pause(pipeline: PipelineArgument, *, options: ActOptions) -> None:
    """Let workers read no more pages. Every shard keeps its place, and live changes go on.

    \b
    Example:
      keywise reindex pause search --why "month's end" --app shop:app
    """
    name, run = _perform(pipeline, options, lambda admin: _reindex_admin(admin, options).pause())
    _print_run(name, run, f"reindex {run.generation} of {name} is paused", json=options.json)


@app.command()
@grouped
def resume(pipeline: PipelineArgument, *, delete_max: DeleteOption = None, options: ActOptions) -> None:
    """Go on with a paused run, or with one that wants to delete more keys than it may.

    \b
    Example:
      keywise reindex resume search --delete-max 5000 --app shop:app
    """
    name, run = _perform(pipeline, options, lambda admin: _reindex_admin(admin, options).resume(delete_max))
    _print_run(name, run, f"reindex {run.generation} of {name} goes on", json=options.json)


@app.command()
@grouped
def cancel(pipeline: PipelineArgument, *, yes: YesOption = False, options: ActOptions) -> None:
    """End a run where it is. Rows that were written stay: each has its current version.

    \b
    Example:
      keywise reindex cancel search --yes --app shop:app
    """
    confirm(f"End the reindex of {pipeline}?", yes=yes)
    name, run = _perform(pipeline, options, lambda admin: _reindex_admin(admin, options).cancel())
    _print_run(name, run, f"reindex {run.generation} of {name} is cancelled", json=options.json)


def _perform(pipeline: str, options: ActOptions, act: Any) -> tuple[str, Any]:
    return perform(AdminOptions(**vars(options), pipeline=pipeline), act)


def _reindex_admin(admin: PipelineAdmin, options: ActOptions) -> ReindexAdmin:
    return ReindexAdmin(admin, audit_note(options.who, options.why))


def _print_step(text: str) -> None:
    print(plain(text), file=sys.stderr)


def _print_run(name: str, run: ReindexRun, text: str, *, json: bool) -> None:
    if json:
        print_json({"pipeline": name, **msgspec.to_builtins(run)}, moments=MOMENTS)
    else:
        print(plain(text))


def _read_keys(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AdminError(f"the keys in {path!r} cannot be read: {error}") from error
    keys = [line for line in text.splitlines() if line]
    for key in keys:
        require_storable(key, "a key")
    return keys


async def _until_ended(admin: PipelineAdmin, run: ReindexRun) -> ReindexRun:
    """Show how far a run has come until it ends, or waits for the operator."""
    pipeline = admin.pipeline
    _, shards = needs_origin(pipeline)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress(*columns) as bar:
        task = bar.add_task("reading rows", total=None)
        while True:
            report = await report_run(pipeline, shards)
            assert report is not None, "a run that was started stays in the controls"
            if report.run.generation != run.generation or not report.run.is_active:
                return report.run
            if report.gone:
                raise AdminError(_held_text(report))
            bar.update(task, description=_stage(report), completed=report.rows_read, total=report.rows_expected)
            await asyncio.sleep(WATCH_S)


def _stage(report: RunReport) -> str:
    if report.run.is_paused:
        return "paused"
    return "reading rows" if report.run.state is RunState.SCANNING else "looking up the other keys"


def _facts(name: str, report: RunReport) -> list[tuple[str, str]]:
    run = report.run
    state = f"{run.state.value}, paused" if run.is_paused else run.state.value
    facts = [
        ("reindex", f"{name}, generation {run.generation}: {state}"),
        ("shards", f"{report.shards_read:,} of {run.shards:,} read, {report.shards_begun:,} begun"),
        ("rows", _rows_text(report)),
        ("outcomes", ", ".join(f"{name} {n:,}" for name, n in sorted(report.counts.items()) if name != "read") or "-"),
        ("time", _time_text(report)),
    ]
    if report.postponed:
        facts.append(("postponed", f"{count(report.postponed, 'row')} not settled in time; the sweep writes them"))
    if report.gone:
        facts.append(("held", _held_text(report)))
    facts += [("stalled", _shard_text(one)) for one in report.stalled]
    facts += [("reading", _shard_text(one)) for one in report.working if one not in report.stalled]
    if run.why or run.by:
        facts.append(("started by", "; ".join(part for part in (run.by, run.why) if part)))
    return facts


def _rows_text(report: RunReport) -> str:
    of = f" of about {report.rows_expected:,}" if report.rows_expected is not None else ""
    return f"{report.rows_read:,}{of} read, {report.rows_per_s:,.0f}/s"


def _time_text(report: RunReport) -> str:
    left = f", about {duration(report.left_s)} left" if report.left_s is not None else ""
    return f"{duration(report.seconds)}{left}"


def _held_text(report: RunReport) -> str:
    return (
        f"the origin does not have {count(report.gone, 'key')} that the ledger knows, which is more than a run deletes "
        f"without a question; if that is right, run keywise reindex resume --delete-max {report.gone}"
    )


def _shard_text(one: ShardReport) -> str:
    by = f" by {one.owner}" if one.owner else ", no worker reads it"
    failed = f", {count(one.attempts, 'attempt')} failed" if one.attempts else ""
    return f"{one.name}: {one.rows:,} rows{by}, last page {duration(one.quiet_s)} ago{failed}"
