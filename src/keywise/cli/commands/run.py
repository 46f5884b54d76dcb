"""`keywise run`: processes messages until it is stopped, and prints the totals."""

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence, Set
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from typing import Annotated, Any, NoReturn

import typer
from msgspec.structs import asdict

from keywise.app import App
from keywise.cli.app_loader import APP_VARIABLE, JsonOption, choose_pipelines, load
from keywise.cli.live.show import live_view
from keywise.cli.output import count, duration, plain, print_error, print_json, print_table, refuse, screen
from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.controls import RunState
from keywise.core.errors import KeywiseError, UnavailableError
from keywise.core.source import Backlog, backlog_of
from keywise.flow.pipeline import OpenPipeline
from keywise.observe.history import format_counts
from keywise.observe.log import (
    Log,
    format_empty,
    format_held_sweep,
    format_refused_swap,
    format_swapped,
    some_keys,
    still_running,
)
from keywise.observe.run_view import View
from keywise.reindex.notice import is_notice_due
from keywise.reindex.report import RunReport, report_active_run

_log = logging.getLogger("keywise")

LOOK_S = 0.1
"""--until-empty checks whether the queues are empty after this long without an event."""

QUIET_S = 3.0
"""--until-empty says which other workers it waits for when no change has ended for this long."""

HELD_MAX = 5
"""How many keys of other workers the message lists."""

RETRY_S = 1.0
"""How long --until-empty waits before it tries again to open a pipeline."""

LOG_LEVELS = ("debug", "info", "warning", "error")

TOTALS = ("grade", "sources", "outcomes", "failed_attempts")
"""The figures of a pipeline that are printed at the end."""

WIDE = 80
"""The width that the summary needs in a terminal."""

PROMISES = {
    "atomic": "each effect exactly once",
    "conditional": "the newest wins at all times",
    "plain": "at least once, ends at the newest",
}


def run(  # noqa: PLR0913, PLR0917 - one parameter per option
    app: Annotated[
        str | None,
        typer.Argument(metavar="APP", envvar=APP_VARIABLE, help="As shop:app, path/to/shop.py:app or pipeline.toml."),
    ] = None,
    pipelines: Annotated[
        list[str] | None, typer.Argument(metavar="PIPELINE", help="Run these only; all of them without it.")
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Stop when all queues are empty and no reindex goes on.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Exit if a source, ledger or sink cannot be reached at the start.")
    ] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help=f"{', '.join(LOG_LEVELS)}; info without it.")
    ] = None,
    is_plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of the view in a terminal.")] = False,
    json: JsonOption = False,
) -> None:
    """Process messages until SIGTERM or SIGINT.

    After the first signal, keywise finishes the changes that have begun and releases the others to their queues.
    A second signal ends it at once.

    A pipeline whose source, ledger or sink cannot be reached at the start waits for it, and the others run.
    A wrong password or a missing right ends keywise at once.

    In a terminal, it draws a view of the figures; elsewhere it logs them as lines.

    \b
    Example:
      keywise run shop:app
      keywise run shop:app pages --until-empty --json
      keywise run pipeline.toml
    """
    loaded = load(app, "keywise run shop:app")
    names, began_at = choose_pipelines(loaded, pipelines or ()), time.monotonic()
    _configure_log(log_level)
    view = View(names)
    loaded.observers[:] = [*map(_without_announced, loaded.observers), view, _announce]
    showing = live_view(view, screen(stderr=True), logging.getLogger("keywise").info, plain=is_plain)
    empty = asyncio.Event()
    status = _finish(_work(loaded, names, view, empty if until_empty else None, wait=not no_wait), showing)
    if view.sources or status == 0:
        _print_totals(view, json, time.monotonic() - began_at)
    if until_empty and status == 0 and not empty.is_set():
        print_error(f"stopped before all queues of {', '.join(names)} were empty")
        status = 1
    leave(status)


def _configure_log(level: str | None) -> None:
    """Log to stderr, unless the app has configured logging itself. `level` applies to keywise's logger only."""
    if level is not None and level.lower() not in LOG_LEVELS:
        refuse(f"--log-level: {level!r} is not known; write one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if level is not None:
        logging.getLogger("keywise").setLevel(level.upper())


def leave(status: int) -> NoReturn:
    """End the process at once: a normal exit would wait for a handler that hangs in a thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or 1
    os._exit(status)


async def _work(app: App, names: Sequence[str], view: View, empty: asyncio.Event | None, *, wait: bool) -> None:
    """Run until a signal stops it. With `empty`, also stop when the queues are empty, and then set `empty`."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_stop_when_empty(app, names, view, empty)) if empty is not None else None
            await app.run(*names, wait=wait)
            if watching is not None:
                watching.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _stop_when_empty(app: App, names: Sequence[str], view: View, empty: asyncio.Event) -> None:
    async with AsyncExitStack() as stack:
        opened = [await _open_when_reachable(app, name, stack) for name in names]
        sources = [source for pipeline in opened for _, source in pipeline.sources]
        wait_s, warned = LOOK_S, set[str]()
        ended, quiet_since = 0, time.monotonic()
        while True:
            view.stirred = False
            await asyncio.sleep(wait_s)
            if view.stirred or view.sources < len(sources):
                continue
            looked_at = time.monotonic()
            if ended != (now_ended := sum(one.changes for one in view.look())):
                ended, quiet_since = now_ended, looked_at
            with suppress(UnavailableError):
                # A message that is being processed or retried is not acked, so it counts.
                backlogs = [await backlog_of(source) for source in sources]
                if not any(one.seen for one in backlogs) and not await _has_reindex_work(opened):
                    _warn_of_unknown_depth(backlogs, warned)
                    if not any(one.unsure_s for one in backlogs):
                        empty.set()
                        app.stop()
                        return
                elif "held" not in warned and looked_at - quiet_since >= QUIET_S:
                    for pipeline in opened:
                        await _warn_of_other_holders(pipeline, app.owners, warned)
            # Counting a long queue takes a while; spend at most a tenth of the time on it.
            wait_s = max(LOOK_S, 10 * (time.monotonic() - looked_at))


async def _has_reindex_work(pipelines: Sequence[OpenPipeline]) -> bool:
    """Whether a reindex goes on that needs no operator, or its notice is still to be sent."""
    for pipeline in pipelines:
        run = (await pipeline.control_store.controls()).run
        if run is not None and pipeline.shard_ledger is not None and is_notice_due(run):
            return True
    reports = [await report_active_run(pipeline) for pipeline in pipelines]
    if any(one is not None and _goes_on(one) for one in reports):
        return True
    # A swap whose run was cancelled has to be called off by a worker.
    return any([(await pipeline.control_store.controls()).move is not None for pipeline in pipelines])


def _goes_on(report: RunReport) -> bool:
    """Whether workers bring a reindex further without the operator. A target that has caught up waits for a swap."""
    run = report.run
    if run.is_paused or report.gone or run.state is RunState.STARTING:
        return False
    return run.swaps or run.state is not RunState.CATCHING_UP or not report.catch_up.passes


async def _open_when_reachable(app: App, name: str, stack: AsyncExitStack) -> OpenPipeline:
    while True:
        try:
            return await stack.enter_async_context(app.open(name, work=False))
        except UnavailableError:
            # No message here: the worker in this process waits for the same server, and reports it.
            await asyncio.sleep(RETRY_S)


def _warn_of_unknown_depth(backlogs: Sequence[Backlog], warned: set[str]) -> None:
    """Warn once that messages may exist which cannot be counted, and say how long the command waits for them."""
    unsure_s = max(one.unsure_s for one in backlogs)
    advice = "; ".join({one.advice: None for one in backlogs if one.advice})
    if unsure_s and "wait" not in warned:
        warned.add("wait")
        hint = f"; {advice}" if advice else ""
        _log.warning(
            "--until-empty waits up to %d s more, because the broker may still be moving messages%s", unsure_s + 1, hint
        )
    if advice and not unsure_s and "unknown" not in warned:
        warned.add("unknown")
        _log.warning("--until-empty ends, though the depth is unknown: other consumers may hold messages; %s", advice)


async def _warn_of_other_holders(pipeline: OpenPipeline, here: Set[str], warned: set[str]) -> None:
    """Warn once that the pipeline waits for changes that other workers hold; those workers may be dead."""
    admin = pipeline.admin
    found = {key: await admin.inspect(key) for key in await pipeline.control_store.held("", HELD_MAX + 1)}
    others = {key: one.lease_until for key, one in found.items() if one and one.owner not in here}
    if not others:
        return
    warned.add("held")
    keys, left_s = list(others), max(others.values()) - await admin.now()
    number = f"more than {count(HELD_MAX, 'change')}" if len(keys) > HELD_MAX else count(len(keys), "change")
    begun = f"{number} that another worker has begun ({plain(some_keys(keys[:HELD_MAX], len(keys)))})"
    what, ends = ("the change", "lease expires") if len(keys) == 1 else ("the changes", "leases expire")
    _log.warning(
        "%s: --until-empty waits for %s; if that worker is dead, this one takes %s over when the %s, in %s at most",
        *(pipeline.name, begun, what, ends, duration(max(0.0, left_s))),
    )


def _finish(work: Coroutine[Any, Any, None], showing: AbstractContextManager[None]) -> int:
    """Run to the end, and return the exit status. The loop is not closed: that would wait for handlers that hang."""
    try:
        with showing:
            asyncio.new_event_loop().run_until_complete(work)
    except KeywiseError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _without_announced(observer: events.Observer) -> events.Observer:
    """Hide from the log the events that `_announce` prints, and `Stopped`, whose figures the view shows."""
    if not isinstance(observer, Log):
        return observer
    return lambda event: None if _announcement(event) or isinstance(event, events.Stopped) else observer(event)


def _announce(event: events.Event) -> None:
    line = _announcement(event)
    if line and isinstance(event, events.Stopped | events.SinkEmpty | events.SweepHeld | events.SwapRefused):
        _log.warning("%s", plain(line))
    elif line and isinstance(event, events.ReindexMoved | events.ReindexEnded | events.TargetSwapped):
        _log.info("%s", plain(line))
    elif line:
        print(plain(line), file=sys.stderr, flush=True)


def _announcement(event: events.Event) -> str:
    """Return the line about a start, a wait, a stage of a reindex or an end; empty for other events."""
    match event:
        case events.Started():
            promise = PROMISES.get(event.grade, "")
            return f"{event.pipeline}: {event.grade} ({promise}), {event.strategy}, from {event.source}"
        case events.Unavailable(what=events.START, calls=0):
            return f"{event.pipeline} waits to start: {event.cause}"
        case events.Unavailable(what=events.START, calls=1):
            advice = "keywise tries again until it can be reached (--no-wait exits instead)"
            return f"{event.pipeline} waits to start: {event.cause}; {advice}"
        case events.Draining(changes=changes) if changes:
            has, its = ("has", "its lease expires") if changes == 1 else ("have", "their leases expire")
            begun = f"{count(changes, 'change')} that {has} begun ({some_keys(event.keys, changes)})"
            waits = f"it waits for {begun}, at most {duration(event.left_s)}"
            return f"{event.pipeline} is draining: {waits}; a second Ctrl-C or signal leaves at once, and {its}"
        case events.SinkEmpty():
            return f"{event.pipeline}: {format_empty(event)}; {event.advice}"
        case events.SweepHeld():
            return f"{event.pipeline}: {format_held_sweep(event)}"
        case events.ReindexMoved():
            shards = f", {count(event.shards, 'shard')}" if event.stage == "scanning" else ""
            return f"{event.pipeline}: reindex {event.generation} is {event.stage}{shards}"
        case events.ReindexEnded():
            ended = f"reindex {event.generation} is complete after {duration(event.seconds)}"
            return f"{event.pipeline}: {ended}: {format_counts(event)}"
        case events.TargetSwapped():
            return f"{event.pipeline}: {format_swapped(event)}"
        case events.SwapRefused():
            return f"{event.pipeline}: {format_refused_swap(event)}"
        case events.Stopped(changes=changes) if changes:
            running, again = still_running(event)
            return f"{event.pipeline} stopped while {running}, because the time of `drain` was over; {again}"
        case _:
            return ""


def _print_totals(view: View, json: bool, seconds: float) -> None:
    figures = {one.pipeline: asdict(one) for one in view.look()}
    by_pipeline = {name: {field: one[field] for field in TOTALS} for name, one in figures.items()}
    if json:
        print_json({"pipelines": by_pipeline, "seconds": round(seconds, 3)})
        return
    counts = {name: one["outcomes"] | {"failed attempts": one["failed_attempts"]} for name, one in by_pipeline.items()}
    if not any(numbers[Outcome.REMOVED] for numbers in counts.values()):
        for numbers in counts.values():
            del numbers[Outcome.REMOVED]  # Only a reindex has such changes.
    columns = tuple(next(iter(counts.values())))
    if screen().width >= WIDE:
        rows = [(name, *numbers.values()) for name, numbers in counts.items()]
        print_table(("pipeline", *columns), rows, numbers=columns)
    else:
        numbers_of = [(name, *pair) for name, numbers in counts.items() for pair in numbers.items()]
        print_table(("pipeline", "changes", "number"), numbers_of, numbers=("number",))
