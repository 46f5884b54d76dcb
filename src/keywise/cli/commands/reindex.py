"""`keywise reindex`: reads every row of the origin again while live changes flow, and writes it to the sink."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from keywise.cli.admin_options import AdminOptions, WhoOption, WhyOption, YesOption, audit_note, confirm, perform
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.group import CommandGroup
from keywise.cli.options import grouped, require_storable
from keywise.cli.output import count, fail, plain, print_facts, print_json, progress, refuse
from keywise.cli.run_text import bar_columns, next_step, outcomes, run_facts, showing_run
from keywise.core.controls import ReindexRun, RunState
from keywise.core.errors import AdminError
from keywise.operate.admin import PipelineAdmin
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.dry_run import DryRun, DryRunReport
from keywise.reindex.plan import SHARD_ROWS, RunPlan, keys_without_row
from keywise.reindex.report import RunReport, report_run
from keywise.reindex.run_watch import RunWatch
from keywise.reindex.shards import READ

app = typer.Typer(
    cls=CommandGroup, help="Read every row of the origin again while live changes flow.", no_args_is_help=True
)

NAMED_MAX = 5
"""How many keys of --ids without a row are named."""
MOMENTS = ("started_at", "ended_at")
PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE")]
DeleteOption = Annotated[
    int | None,
    typer.Option("--delete-max", metavar="N", min=0, help="Delete at most N keys that are gone without asking."),
]
MappingOption = Annotated[
    str | None, typer.Option("--mapping", metavar="FILE", help="A file that defines the index of --into, as JSON.")
]
NotifyOption = Annotated[
    str, typer.Option("--notify", metavar="URL", help="Send a message to this queue or URL when the run has ended.")
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
    """Which rows are read, and where they are written."""

    into: Annotated[
        str | None,
        typer.Option("--into", metavar="NAME", help="Fill this target beside the live one; {generation} is filled in."),
    ] = None
    mapping: MappingOption = None
    to: Annotated[int | None, typer.Option(metavar="N", min=1, help="The generation; else the next one.")] = None
    ids: Annotated[str | None, typer.Option(metavar="FILE", help="Only these keys, one a line; - is stdin.")] = None
    where: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help="Only rows for which this SQL condition holds."),
    ] = None
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Read at most N rows.")] = None
    shard_rows: Annotated[int, typer.Option(metavar="N", min=1, help="About how many rows a shard has.")] = SHARD_ROWS
    also_removed: Annotated[
        bool, typer.Option("--also-removed", help="Also write rows that an operator has removed.")
    ] = False
    delete_max: DeleteOption = None
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not check rows and versions before the first write.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the rows here, count what a run would do, and write nothing.")
    ] = False
    notify: NotifyOption = ""
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended, or its target has caught up.")] = (
        False
    )

    def plan(self) -> RunPlan:
        """Return the plan; exit with status 2 if options do not fit together."""
        require_text({"--into": self.into, "--where": self.where})
        if self.mapping is not None and not self.into:
            refuse("--mapping defines the target of --into; name both")
        if self.dry_run and self.into:
            refuse("--dry-run counts what a run in place would do, and a new target gets every row; leave out --into")
        if self.where and (self.ids is not None or self.limit is not None):
            refuse("--where chooses rows by itself; leave out --ids and --limit")
        return RunPlan(
            into=self.into or "",
            definition=read_definition(self.mapping),
            generation=self.to,
            shard_rows=self.shard_rows,
            keys=_read_keys(self.ids) if self.ids is not None else None,
            limit=self.limit,
            where=self.where or "",
            also_removed=self.also_removed,
            delete_max=self.delete_max,
            is_checked=not self.unchecked,
            notify=self.notify,
        )


@app.command()
@grouped
def start(pipeline: PipelineArgument, *, chosen: StartOptions, options: ActOptions) -> None:
    """Write every row of the origin again, at a new generation, while live changes flow.

    Workers (keywise run) read the rows in shards and hand them to the pipeline. A newer live change wins over a row,
    and a deleted key stays deleted. After the scan, the run looks up every key that it has not written, and deletes
    those that are gone from the origin.

    With --into, the rows go to a new index or table beside the live one, which then follows the live changes. It
    becomes the live one with keywise reindex swap.

    \b
    Example:
      keywise reindex start search --dry-run --app shop:app
      keywise reindex start search --wait --app shop:app
      keywise reindex start search --ids keys.txt --app shop:app
      keywise reindex start search --where "edited_at > '2026-10-01'" --app shop:app
      keywise reindex start search --into 'pages-{generation}' --mapping pages.json --app shop:app
      keywise reindex start search --notify 'https://ops:${TOKEN}@example.com/reindexed' --app shop:app
    """
    plan = chosen.plan()
    if chosen.dry_run:
        name, counted = perform_on(pipeline, options, lambda admin: _dry_run(admin, plan))
        _print_dry_run(name, counted, json=options.json)
        return

    async def act(admin: PipelineAdmin) -> tuple[ReindexRun, RunReport | None]:
        await _report_missing(admin, plan)
        run = await reindex_admin(admin, options).start(plan, print_step)
        return run, await _until_built(admin, run) if chosen.wait else None

    name, (run, report) = perform_on(pipeline, options, act)
    if report is not None:
        _print_report(name, report, json=options.json)
        if report.run.state is RunState.CANCELLED:
            raise typer.Exit(1)
        return
    into = f" into {run.into}" if run.is_beside else ""
    text = f"reindex {run.generation} of {name} is {run.state.value}: {count(run.shards, 'shard')}{into}"
    if run.state is RunState.SCANNING:
        text += f"; {next_step(name, run)}"
    print_run(name, run, text, json=options.json)


@app.command()
@grouped
def status(pipeline: PipelineArgument, *, options: ActOptions) -> None:
    """Show how far the last run has come, how its rows ended, and why it waits.

    \b
    Example:
      keywise reindex status search --app shop:app
    """

    async def act(admin: PipelineAdmin) -> RunReport | None:
        _, shards = require_origin(admin.pipeline)
        return await report_run(admin.pipeline, shards)

    name, report = perform_on(pipeline, options, act)
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
    name, run = perform_on(pipeline, options, lambda admin: reindex_admin(admin, options).pause())
    print_run(name, run, f"reindex {run.generation} of {name} is paused", json=options.json)


@app.command()
@grouped
def resume(pipeline: PipelineArgument, *, delete_max: DeleteOption = None, options: ActOptions) -> None:
    """Go on with a paused run, or allow a run to delete the keys that are gone from the origin.

    \b
    Example:
      keywise reindex resume search --delete-max 5000 --app shop:app
    """
    name, run = perform_on(pipeline, options, lambda admin: reindex_admin(admin, options).resume(delete_max))
    print_run(name, run, f"reindex {run.generation} of {name} goes on", json=options.json)


@app.command()
@grouped
def cancel(pipeline: PipelineArgument, *, yes: YesOption = False, options: ActOptions) -> None:
    """End a run where it is. Rows that it has written stay, each at its own version.

    A target beside the live one stays; keywise reindex drop deletes it.

    \b
    Example:
      keywise reindex cancel search --yes --app shop:app
    """
    confirm(f"End the reindex of {pipeline}?", yes=yes)
    name, run = perform_on(pipeline, options, lambda admin: reindex_admin(admin, options).cancel())
    left = run.is_beside and not run.is_rollback
    drop = f"; {run.into} is left, delete it with keywise reindex drop {name}" if left else ""
    print_run(name, run, f"reindex {run.generation} of {name} is cancelled{drop}", json=options.json)


def perform_on(pipeline: str, options: ActOptions, act: Any) -> tuple[str, Any]:
    """Run an action on a pipeline; return its name and the result, or exit with status 1."""
    return perform(AdminOptions(**vars(options), pipeline=pipeline), act)


def reindex_admin(admin: PipelineAdmin, options: ActOptions) -> ReindexAdmin:
    return ReindexAdmin(admin, audit_note(options.who, options.why))


def require_text(options: Mapping[str, str | None]) -> None:
    """Exit with status 2 if an option is empty, for example from an unset variable: the run would be another one."""
    for option, value in options.items():
        if value is not None and not value.strip():
            refuse(f"{option} is empty; give it a value, or leave it out")


def print_step(text: str) -> None:
    """Print what the command does now, if a person waits for it at a terminal."""
    if sys.stderr.isatty():
        print(plain(text), file=sys.stderr)


def print_run(name: str, run: ReindexRun, text: str, *, json: bool) -> None:
    if json:
        print_json({"pipeline": name, **msgspec.to_builtins(run)}, moments=MOMENTS)
    else:
        print(plain(text))


def read_definition(path: str | None) -> bytes | None:
    """Return the definition of a target; exit with status 1 if its file cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        fail(f"the mapping in {path!r} cannot be read: {error}")


def _read_keys(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AdminError(f"the keys in {path!r} cannot be read: {error}") from error
    # Not `splitlines`: a key may contain other separators. Some editors begin a file with a byte order mark.
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    keys = [line for line in lines if line]
    for key in keys:
        require_storable(key, "a key")
    return keys


async def _report_missing(admin: PipelineAdmin, plan: RunPlan) -> None:
    """Print on stderr for how many of the keys in --ids there is a row, and name some of the others."""
    if plan.keys is None:
        return
    origin, _ = require_origin(admin.pipeline)
    keys = list(dict.fromkeys(plan.keys[: plan.limit]))
    missing = await keys_without_row(origin, keys)
    named = ", ".join(map(repr, missing[:NAMED_MAX])) + (", …" if len(missing) > NAMED_MAX else "")
    others = f"; the origin has no row of {named}" if missing else ""
    warning = "Warning: " if keys and len(missing) == len(keys) else ""
    print(plain(f"{warning}{len(keys) - len(missing):,} of {count(len(keys), 'key')} found{others}"), file=sys.stderr)


async def _dry_run(admin: PipelineAdmin, plan: RunPlan) -> DryRunReport:
    await _report_missing(admin, plan)
    with progress(*bar_columns()) as bar:
        task = bar.add_task("reading rows", total=None, done="")

        def show(stage: str, done: int, total: int | None) -> None:
            text = f"{done:,}/{'?' if total is None else f'{total:,}'}"
            bar.update(task, description=stage, completed=done, total=total, done=text)

        return await DryRun(admin.pipeline, plan).run(show)


async def _until_built(admin: PipelineAdmin, run: ReindexRun) -> RunReport:
    """Show how far a run has come until it ends, or its target has caught up."""
    _, shards = require_origin(admin.pipeline)
    with showing_run() as show:
        return await RunWatch(admin.pipeline, shards, run, show).until_built()


def _print_report(name: str, report: RunReport, *, json: bool) -> None:
    if json:
        figures = {"rows_per_s": round(report.rows_per_s, 1), "left_s": report.left_s}
        print_json({"pipeline": name, **msgspec.to_builtins(report), **figures}, moments=MOMENTS)
    else:
        print_facts(run_facts(name, report))


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
        ("outcomes", outcomes(report.counts)),
        *(("malformed", f"{key!r}: {cause}" if key else cause) for key, cause in report.malformed),
        ("gone", gone),
    ]
    print_facts(facts)
