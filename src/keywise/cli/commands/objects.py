"""`keywise objects`: compares an object store with the ledger, and announces again what differs."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from keywise.cli.admin_options import AdminOptions, WhoOption, WhyOption, perform, require_stored_queue
from keywise.cli.app_loader import AppOption, JsonOption
from keywise.cli.group import CommandGroup
from keywise.cli.options import grouped, require_storable
from keywise.cli.output import count, plain, print_result, progress
from keywise.core.errors import AdminError, KeywiseError
from keywise.ingest.backfill import Backfill, BackfillReport
from keywise.operate.admin import PipelineAdmin

app = typer.Typer(cls=CommandGroup, help="Compare an object store with the ledger.", no_args_is_help=True)

LINE_S = 5.0
"""How often a line says how far a backfill is, if there is no terminal for a bar."""


@dataclass(frozen=True, kw_only=True)
class BackfillOptions:
    """Which objects are compared, and what is done with the differences."""

    prefix: Annotated[str, typer.Option(metavar="TEXT", help="Only objects whose names begin with this.")] = ""
    after: Annotated[str, typer.Option(metavar="NAME", help="Go on behind this name.")] = ""
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Announce at most so many objects.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count only, and announce nothing.")] = False
    missing: Annotated[
        bool, typer.Option("--missing/--no-missing", help="Also check objects that the store does not list any more.")
    ] = True
    also_removed: Annotated[
        bool, typer.Option("--also-removed", help="Also announce objects that an operator has removed.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ActOptions:
    """The options of an operator's command on one pipeline, whose name is an argument."""

    app: AppOption = None
    why: WhyOption = ""
    who: WhoOption = ""
    json: JsonOption = False


@app.command()
@grouped
def backfill(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE")], *, chosen: BackfillOptions, options: ActOptions
) -> None:
    """Announce the objects that the ledger does not know, or knows with other content.

    Lists the store and compares each ETag with what was committed. New and changed objects are announced again, to the
    bulk lane if there is one, and workers read them. Objects that are known and not listed any more are announced too:
    the worker asks the store, and deletes the records of those that are gone. Objects that an operator has removed are
    left alone until their content changes.

    \b
    Example:
      keywise objects backfill uploads --dry-run --app shop:app
      keywise objects backfill uploads --prefix 2026/ --limit 1000 --app shop:app
    """
    for text in (chosen.prefix, chosen.after):
        require_storable(text, "a name")
    admin_options = AdminOptions(**vars(options), pipeline=pipeline)
    name, report = perform(admin_options, lambda admin: _run(admin, chosen))
    fields = {"pipeline": name, "dry_run": chosen.dry_run} | msgspec.to_builtins(report)
    print_result(fields, _format_report(report, chosen), json=options.json)


async def _run(admin: PipelineAdmin, chosen: BackfillOptions) -> BackfillReport:
    opened = admin.pipeline
    if not chosen.dry_run:
        require_stored_queue(opened)
    walk = Backfill(
        opened,
        prefix=chosen.prefix,
        after=chosen.after,
        limit=chosen.limit,
        dry_run=chosen.dry_run,
        also_removed=chosen.also_removed,
    )
    try:
        with _showing_progress() as show:
            await walk.run(missing=chosen.missing, on_page=show)
    except (KeywiseError, asyncio.CancelledError) as error:
        # What went wrong is more important than a history that cannot be written.
        with suppress(KeywiseError):
            await _record(admin, walk.report, chosen)
        stop = _format_stop(walk.report, chosen)
        if isinstance(error, KeywiseError):
            raise AdminError(f"{error}; {stop}") from error
        print(plain(f"interrupted; {stop}"), file=sys.stderr)
        raise
    await _record(admin, walk.report, chosen)
    return walk.report


async def _record(admin: PipelineAdmin, report: BackfillReport, chosen: BackfillOptions) -> None:
    sent = report.announced + report.missing
    if sent and not chosen.dry_run:
        await admin.record("backfilled", detail=f"{count(sent, 'object')} announced again")


@contextmanager
def _showing_progress() -> Iterator[Callable[[BackfillReport], None]]:
    """Show on stderr how far the backfill is: as a line that is redrawn in a terminal, else as lines now and then."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    last = time.monotonic()
    with progress(*columns) as bar:
        task = bar.add_task("listing", total=None)

        def show(report: BackfillReport) -> None:
            nonlocal last
            text = f"listed {report.listed:,}, announced {report.announced:,}, missing {report.missing:,}"
            bar.update(task, description=text)
            if bar.disable and time.monotonic() - last >= LINE_S:
                last = time.monotonic()
                print(f"{text}, up to {plain(report.after)}", file=sys.stderr, flush=True)

        yield show


def _format_report(report: BackfillReport, chosen: BackfillOptions) -> str:
    would = "to announce" if chosen.dry_run else "announced"
    facts = [f"{report.announced:,} {would}", f"{report.unchanged:,} unchanged", f"{report.running:,} being read"]
    facts += [f"{report.skipped:,} skipped"]
    if report.removed:
        facts.append(f"{report.removed:,} removed by an operator")
    text = f"listed {count(report.listed, 'object')}: {', '.join(facts)}"
    if report.missing:
        gone = "are known and not listed" if report.missing > 1 else "is known and not listed"
        text += f"; {report.missing:,} {gone}, {would} so that a worker asks the store"
    if not report.is_listed:
        text += f"; the limit is reached, go on with --after {report.after!r}"
    elif chosen.missing and chosen.limit is not None and report.announced + report.missing >= chosen.limit:
        text += "; the limit is reached, so there may be more that are not listed"
    return text


def _format_stop(report: BackfillReport, chosen: BackfillOptions) -> str:
    """Say how far a backfill came that was broken off, and how to go on."""
    sent = report.announced + report.missing
    done = f"{count(sent, 'object')} {'to announce' if chosen.dry_run else 'announced'} so far"
    if report.is_listed:
        return f"{done}; all objects are compared, and to check the missing ones, run it again"
    return f"{done}; go on with --after {report.after!r}" if report.after else f"{done}; run it again"
