"""Options and steps that the operator's commands share: who and why, one pipeline, visible waiting, confirmation."""

import asyncio
import getpass
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from keywise.app import App
from keywise.cli.app_loader import choose_pipelines, load, warn_if_in_memory
from keywise.cli.commands.run import leave
from keywise.cli.output import ask_yes_no, fail, plain, print_error, progress, refuse
from keywise.core.change import Change
from keywise.core.errors import KeywiseError, SettingsError
from keywise.core.settings import seconds
from keywise.flow.pipeline import Pipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat

T = TypeVar("T")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
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


class AdminOptions(msgspec.Struct, frozen=True):
    """The options that all operator's commands have."""

    app: str | None
    pipeline: str | None
    why: str = ""
    who: str = ""
    wait: str | None = WAIT_DEFAULT
    """How long to wait for a key; None: as long as a claim can last."""


def perform(options: AdminOptions, act: Callable[[PipelineAdmin, Pipeline], Coroutine[Any, Any, T]]) -> T:
    """Open the chosen pipeline and run the action on it; exit with status 1 if it fails."""
    loaded = load(options.app)
    name = require_one_pipeline(loaded, options.pipeline)
    wait_s = None if options.wait is None else parse_duration(options.wait, "--wait")
    warn_if_in_memory(loaded)
    try:
        return asyncio.run(_perform(loaded, name, options, wait_s, act))
    except KeywiseError as error:
        # Do not return: a handler that hangs in a thread would keep the process from ending.
        print_error(error)
        leave(1)


async def _perform(
    app: App,
    name: str,
    options: AdminOptions,
    wait_s: float | None,
    act: Callable[[PipelineAdmin, Pipeline], Coroutine[Any, Any, T]],
) -> T:
    with showing_wait() as show_wait:
        async with app.open(name) as pipeline:
            # The command itself prints what happens and records it as the operator's action. It never writes
            # without the ledger.
            pipeline.observers, pipeline.reporters, pipeline.journal_store = (), (), None
            async with running_heartbeat(pipeline) as heartbeat:
                admin = PipelineAdmin(
                    pipeline,
                    audit_note(options),
                    AdminClaimer(pipeline, _wait_budget(pipeline, wait_s, show_wait), heartbeat),
                )
                return await act(admin, pipeline)


def _wait_budget(pipeline: Pipeline, wait_s: float | None, report: Callable[[str], None]) -> WaitBudget:
    if wait_s is None:
        return WaitBudget(pipeline, pipeline.settings.runtime_max_s + pipeline.settings.lease_s, report)
    return WaitBudget(pipeline, wait_s, report, "wait longer with --wait")


def audit_note(options: AdminOptions) -> AuditNote:
    """Return who acts and why; without --who it is the user of this machine."""
    require_storable(options.who, "a name")
    require_storable(options.why, "a reason")
    return AuditNote(options.who or f"{_user()}@{socket.gethostname()}", options.why)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def require_one_pipeline(app: App, name: str | None) -> str:
    """Return the chosen pipeline; exit with status 2 if the app has several and none is named."""
    names = choose_pipelines(app, [name])
    if len(names) > 1:
        refuse(f"this app has more than one pipeline; say which with --pipeline: {', '.join(names)}")
    return names[0]


def parse_duration(text: str, option: str) -> float:
    try:
        return seconds(text)
    except SettingsError as error:
        refuse(f"{option}: {error}")


def require_valid_key(key: str) -> str:
    """Return the key; exit with status 2 if it is empty or cannot be stored."""
    if not key:
        refuse("the key is empty; name one, as in page-17")
    return require_storable(key, "a key")


def require_storable(text: str, what: str) -> str:
    """Return the text; exit with status 2 if it is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(f"{text!r} is no UTF-8 text, so it cannot be {what}")
    return text


def confirm(question: str, *, yes: bool) -> None:
    """Continue only after the user has answered yes; without a terminal, --yes is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        refuse(f"{question} There is no terminal to ask on, so nothing was done; pass --yes")
    if not ask_yes_no(plain(question)):
        fail("nothing was done")


@contextmanager
def showing_wait() -> Iterator[Callable[[str], None]]:
    """Show on stderr what the command waits for: with a clock in a terminal, else one line for each cause."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    bar, last = progress(*columns), ""

    def show_wait(cause: str) -> None:
        nonlocal last
        if not bar.disable:
            # Started only now: the bar hides the cursor and clears its line, and a question may come before it.
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


def change_json(change: Change[Any]) -> dict[str, Any]:
    """Return the written change as JSON fields."""
    era, _, generation = change.order
    return {
        "key": change.key,
        "era": era,
        "version": change.version,
        "generation": max(0, generation),
        "deleted": change.deleted,
    }
