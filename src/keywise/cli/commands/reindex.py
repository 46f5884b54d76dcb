"""`keywise reindex`: reads every row of the origin again while live changes flow, and writes each where it belongs."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn

from keywise.cli.admin_options import AdminOptions, WhoOption, WhyOption, YesOption, audit_note, confirm, perform
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.options import grouped, require_storable
from keywise.cli.output import count, duration, fail, plain, print_facts, print_json, progress
from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.core.url import redacted
from keywise.operate.admin import PipelineAdmin
from keywise.reindex.admin import ReindexAdmin, needs_origin
from keywise.reindex.dry_run import DryRun, DryRunReport
from keywise.reindex.plan import SHARD_ROWS, RunPlan
from keywise.reindex.report import RunReport, ShardReport, report_run
from keywise.reindex.shards import READ

app = typer.Typer(help="Read every row of the origin again while live changes flow.", no_args_is_help=True)

UNATTENDED = "no worker takes part in it now; start one with keywise run, or see the log of the workers"
WATCH_S = 0.5
"""How often a command that waits for a run looks at it."""
MOMENTS = ("started_at", "ended_at")
PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE")]
DeleteOption = Annotated[
    int | None,
    typer.Option("--delete-max", metavar="N", min=0, help="Delete at most so many keys that are gone."),
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the rows here, count what a run would do, and write nothing.")
    ] = False
    notify: Annotated[
        str, typer.Option("--notify", metavar="URL", help="Send a message to this queue or URL when the run has ended.")
    ] = ""
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False


@app.command()
@grouped
def start(pipeline: PipelineArgument, *, chosen: StartOptions, options: ActOptions) -> None:
    """Write every row of the origin again, at a new generation, while live changes flow.

    Workers (keywise run) read the rows in shards and hand them to the pipeline. A newer live change wins over a row,
    and a deleted key stays deleted. After the scan, the run looks up every key that it has not met, and deletes those
    that are gone from the origin.

    \b
    Example:
      keywise reindex start search --dry-run --app shop:app
      keywise reindex start search --wait --app shop:app
      keywise reindex start search --ids keys.txt --app shop:app
      keywise reindex start search --notify 'https://ops:${TOKEN}@example.com/reindexed' --app shop:app
    """
    plan = RunPlan(
        generation=chosen.to,
        shard_rows=chosen.shard_rows,
        keys=_read_keys(chosen.ids) if chosen.ids is not None else None,
        limit=chosen.limit,
        also_removed=chosen.also_removed,
        delete_max=chosen.delete_max,
        is_checked=not chosen.unchecked,
        notify=chosen.notify,
    )

    if chosen.dry_run:
        name, counted = _perform(pipeline, options, lambda admin: _dry_run(admin, plan))
        _print_dry_run(name, counted, json=options.json)
        return

    async def act(admin: PipelineAdmin) -> tuple[ReindexRun, RunReport | None]:
        run = await _reindex_admin(admin, options).start(plan, _print_step)
        return run, await _until_ended(admin, run) if chosen.wait else None

    name, (run, report) = _perform(pipeline, options, act)
    if report is not None:
        _print_report(name, report, json=options.json)
        if report.run.state is not RunState.COMPLETE:
            raise typer.Exit(1)
        return
    text = f"reindex {run.generation} of {name} is {run.state.value}: {count(run.shards, 'shard')}"
    if run.state is RunState.SCANNING:
        text += f"; workers read the rows, see keywise reindex status {name}"
    _print_run(name, run, text, json=options.json)


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
    _print_report(name, report, json=options.json)


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
    """Go on with a paused run, or allow a run to delete the keys that are gone from the origin.

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
    """Say what the command does now to a person who waits for it."""
    if sys.stderr.isatty():
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


async def _dry_run(admin: PipelineAdmin, plan: RunPlan) -> DryRunReport:
    with progress(*_columns()) as bar:
        task = bar.add_task("reading rows", total=None)

        def show(stage: str, done: int, total: int | None) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        return await DryRun(admin.pipeline, plan).run(show)


async def _until_ended(admin: PipelineAdmin, run: ReindexRun) -> RunReport:
    """Show how far a run has come until it ends. Raise `AdminError` if it waits for the operator."""
    pipeline = admin.pipeline
    _, shards = needs_origin(pipeline)
    has_warned = False
    with progress(*_columns()) as bar:
        task = bar.add_task("reading rows", total=None)
        while True:
            report = await report_run(pipeline, shards)
            assert report is not None, "a run that was started stays in the controls"
            if report.run.generation != run.generation:
                raise AdminError(f"reindex {report.run.generation} has begun meanwhile; see keywise reindex status")
            if not report.run.is_active:
                return report
            if report.gone:
                raise AdminError(held_text(pipeline.name, report))
            if report.is_unattended and not has_warned:
                has_warned = True
                print(f"waiting: {UNATTENDED}", file=sys.stderr)
            bar.update(task, description=_stage(report), completed=report.rows_read, total=report.rows_expected)
            await asyncio.sleep(WATCH_S)


def _columns() -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()


def _stage(report: RunReport) -> str:
    if report.run.is_paused:
        return "paused"
    if report.is_unattended:
        return "waiting for a worker"
    return "reading rows" if report.run.state is RunState.SCANNING else "looking up other keys"


def _print_report(name: str, report: RunReport, *, json: bool) -> None:
    if json:
        figures = {"rows_per_s": round(report.rows_per_s, 1), "left_s": report.left_s}
        print_json({"pipeline": name, **msgspec.to_builtins(report), **figures}, moments=MOMENTS)
    else:
        print_facts(_facts(name, report))


def _print_dry_run(name: str, report: DryRunReport, *, json: bool) -> None:
    if json:
        print_json({"pipeline": name, **msgspec.to_builtins(report)})
        return
    gone = count(report.gone, "key")
    if report.gone > report.delete_max:
        gone += f", more than {report.delete_max:,}: a run would stop and ask"
    facts = [
        ("dry run", f"{name}, generation {report.generation}: nothing was written"),
        ("rows", f"{report.counts.get(READ, 0):,} read"),
        ("outcomes", _outcomes(report.counts)),
        ("gone", gone),
    ]
    print_facts(facts)


def _facts(name: str, report: RunReport) -> list[tuple[str, str]]:
    run = report.run
    state = f"{run.state.value}, paused" if run.is_paused else run.state.value
    facts = [
        ("reindex", f"{name}, generation {run.generation}: {state}"),
        ("shards", _shards_text(report)),
        ("rows", _rows_text(report)),
        ("outcomes", _outcomes(report.counts)),
        ("time", _time_text(report)),
    ]
    if report.postponed:
        facts.append(("postponed", f"{count(report.postponed, 'row')} did not end in time; the sweep writes them"))
    if report.swept:
        facts.append(("sweep", _outcomes(report.swept)))
    facts += [("waiting", text) for text in waiting_texts(name, report)]
    facts += [("reading", _shard_text(one)) for one in report.working if one not in report.stalled]
    if run.notify:
        sent = "sent to" if run.is_notified else "to be sent to" if not run.is_active else "at the end, to"
        facts.append(("notice", f"{sent} {redacted(run.notify)}"))
    if run.why or run.by:
        facts.append(("started by", "; ".join(part for part in (run.by, run.why) if part)))
    return facts


def _rows_text(report: RunReport) -> str:
    return f"{_rows_read(report)} read, {report.rows_per_s:,.0f}/s"


def _rows_read(report: RunReport) -> str:
    is_guess = report.rows_expected is not None and report.run.state is RunState.SCANNING
    of = f" of about {report.rows_expected:,}" if is_guess else ""
    return f"{report.rows_read:,}{of}"


def _time_text(report: RunReport) -> str:
    left = f", about {duration(report.left_s)} left" if report.left_s is not None else ""
    return f"{duration(report.seconds)}{left}"


def _shards_text(report: RunReport) -> str:
    begun = f", {report.shards_begun:,} begun" if report.shards_begun else ""
    return f"{report.shards_read:,} of {report.run.shards:,} read{begun}"


def _outcomes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()) if name != READ) or "-"


def progress_text(report: RunReport) -> str:
    """Describe in one line how far a run has come."""
    run = report.run
    state = f"{run.state.value}, paused" if run.is_paused else run.state.value
    return f"reindex {run.generation} is {state}: {_rows_read(report)} rows read"


def waiting_texts(name: str, report: RunReport) -> list[str]:
    """Say why a run does not go on by itself, and what to do; empty if it does."""
    if report.gone:
        return [held_text(name, report)]
    if report.run.state is RunState.STARTING and report.is_unattended:
        return [f"its start was broken off; repeat it with keywise reindex start {name}"]
    if report.is_unattended:
        return [UNATTENDED]
    return [f"{_shard_text(one)}; see the log of the workers for the cause" for one in report.stalled]


def held_text(name: str, report: RunReport) -> str:
    """Say that a run needs the operator's consent to delete, and how to give or refuse it."""
    return (
        f"the origin does not have {count(report.gone, 'key')} of the ledger, which is more than a run deletes by "
        f"itself; to delete them, run keywise reindex resume {name} --delete-max {report.gone}; to keep them, run "
        f"keywise reindex cancel {name}"
    )


def _shard_text(one: ShardReport) -> str:
    by = f"read by {one.owner}" if one.owner else "no worker reads it now"
    failed = f", {count(one.attempts, 'attempt')} failed in a row" if one.attempts else ""
    rows = f", {count(one.rows, 'row')}" if one.rows else ""
    return f"{one.name}{rows}, {by}, moved {duration(one.quiet_s)} ago{failed}"
