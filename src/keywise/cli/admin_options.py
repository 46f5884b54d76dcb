"""What all operator's commands share: who acts and why, the choice of a pipeline, waiting, confirmation."""

import asyncio
import getpass
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from keywise.app import App
from keywise.cli.app_loader import AppOption, JsonOption, choose_pipelines, load, warn_if_in_memory
from keywise.cli.commands.run import leave
from keywise.cli.options import parse_duration, require_storable
from keywise.cli.output import fail, plain, print_error, progress, refuse
from keywise.core.errors import AdminError, KeywiseError
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat

T = TypeVar("T")

OneOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="NAME", help="The pipeline, if the app has more than one.")
]
WhyOption = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the history.")]
WhoOption = Annotated[
    str, typer.Option("--who", metavar="NAME", envvar="KEYWISE_WHO", help="Who acts, for the history; else user@host.")
]
WaitOption = Annotated[
    str, typer.Option("--wait", metavar="DURATION", help="How long to wait for a key that is held or rate-limited.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

WAIT_DEFAULT = "30s"


@dataclass(frozen=True, kw_only=True)
class AdminOptions:
    """The options that all operator's commands have."""

    app: AppOption = None
    pipeline: OneOption = None
    why: WhyOption = ""
    who: WhoOption = ""
    json: JsonOption = False


Act = Callable[[PipelineAdmin], Coroutine[Any, Any, T]]


def perform(options: AdminOptions, act: Act[T], wait: str | None = WAIT_DEFAULT) -> tuple[str, T]:
    """Run an action on the chosen pipeline; return the pipeline's name and the result, or exit with status 1.

    `wait` is how long to wait for a key; None: as long as a claim can last.
    """
    loaded = load(options.app)
    name, *others = choose_pipelines(loaded, [options.pipeline])
    if others:
        known = ", ".join([name, *others])
        refuse(f"this app has more than one pipeline; say which with --pipeline: {known}")
    wait_s = None if wait is None else parse_duration(wait, "--wait")
    warn_if_in_memory(loaded)
    try:
        return name, asyncio.run(_perform(loaded, name, audit_note(options.who, options.why), wait_s, act))
    except KeywiseError as error:
        # Do not return: a handler that hangs in a thread would keep the process from ending.
        print_error(error)
        leave(1)


async def _perform(app: App, name: str, note: AuditNote, wait_s: float | None, act: Act[T]) -> T:
    with showing_wait() as show_wait:
        # A command that needs the origin opens it; pausing a run, for one, works without it.
        async with app.open(name, check_origin=False) as pipeline, running_heartbeat(pipeline) as heartbeat:
            # The command itself prints what happens and records it as the operator's action. It never writes
            # without the ledger.
            pipeline.observers, pipeline.reporters, pipeline.journal_store = (), (), None
            if wait_s is None:
                budget = WaitBudget(pipeline, pipeline.settings.runtime_max_s + pipeline.settings.lease_s, show_wait)
            else:
                budget = WaitBudget(pipeline, wait_s, show_wait, "wait longer with --wait")
            return await act(PipelineAdmin(pipeline, note, AdminClaimer(pipeline, budget, heartbeat)))


def require_stored_queue(pipeline: OpenPipeline) -> bool:
    """Return whether the pipeline reads objects; raise `AdminError` if a message to it would end with this process."""
    if pipeline.objects is None:
        return False
    [url, _], *_ = pipeline.sources
    if url.startswith("memory:"):
        raise AdminError(
            f"{pipeline.name} reads from {url}, a queue in memory that ends with this command, so nothing was announced"
        )
    return True


def audit_note(who: str, why: str = "") -> AuditNote:
    """Return who acts and why; without --who it is the user of this machine."""
    require_storable(who, "a name")
    require_storable(why, "a reason")
    return AuditNote(who or f"{_user()}@{socket.gethostname()}", why)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def confirm(question: str, *, yes: bool) -> None:
    """Continue only after the user has answered yes; without a terminal, --yes is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        refuse(f"{question} There is no terminal to ask on, so nothing was done; pass --yes")
    # On stderr, because stdout is for results; no answer means no.
    print(f"{plain(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        fail("nothing was done")


@contextmanager
def showing_wait() -> Iterator[Callable[[str], None]]:
    """Show on stderr what the command waits for: with a clock in a terminal, else one line for each cause."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    bar, last = progress(*columns), ""

    def show_wait(cause: str) -> None:
        nonlocal last
        if not bar.disable:
            # Start the bar only when there is something to wait for: it hides the cursor and clears its line, which
            # would erase a question that was asked before.
            bar.start()
            for task in bar.task_ids or [bar.add_task("", total=None)]:
                bar.update(task, description=plain(cause))
        elif cause != last:
            print(plain(f"waiting: {cause}"), file=sys.stderr)
        last = cause

    try:
        yield show_wait
    finally:
        bar.stop()
