"""A worker process of the tests that takes part in swaps: it can kill or stop itself at a step, or wait there."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

import keywise
from chaos.fleet import pause
from chaos.reindex_worker import PIPELINE, NotedOrigin, ReindexAssignment
from keywise.adapters.opensearch.sink import OpenSearchSink
from keywise.adapters.postgres.sink import PostgresSink
from keywise.adapters.sqlite.sink import SqliteSink
from keywise.core import events
from keywise.observe.log import described
from keywise.reindex.barrier import Barrier
from keywise.reindex.catch_up import CatchUp
from keywise.reindex.catch_up_stage import CatchUpStage

QUIET = (events.BatchOpened, events.BatchClosed, events.Settled, events.Refused, events.ShardAdvanced)
REACHED = "reached "
"""A note of the step at which the worker does something to itself begins with it."""
GO = "go"
"""A file with this name, beside the notes, lets a worker go on that waits at its step."""
LOOK_S = 0.05
MOVES = ((OpenSearchSink, "move_name"), (PostgresSink, "exchange"), (SqliteSink, "exchange"))
STEPS: dict[str, tuple[tuple[tuple[type, str], ...], bool]] = {
    "catching up": (((CatchUp, "run"),), True),
    "barrier set": (((Barrier, "set_live"),), True),
    "before the call": (MOVES, False),
    "after the call": (MOVES, True),
    "after": (((CatchUpStage, "_swap"),), True),
}
"""The calls that are a step of a swap, and whether the step is their end. A table moves within a transaction, so that
its steps beside the call come before the commit."""


class SwapAssignment(ReindexAssignment):
    """What a worker is told at its start."""

    step: str = ""
    """One of `STEPS`. The life that reaches it first takes it, and no other."""
    act: str = "kill"
    """What the worker does there: it may `kill` or `stop` itself, or `wait`, with its heartbeat, for a file."""


def app_of(assignment: SwapAssignment) -> keywise.App:
    origin = NotedOrigin(assignment.origin, assignment.notes)

    def observe(event: events.Event) -> None:
        if not isinstance(event, QUIET):
            origin.note(described(event))

    app = keywise.App(assignment.ledger, observers=[observe])
    pages = app.pipeline(PIPELINE, key="id", version="version", deleted={"gone": [True]}, **assignment.options)
    pages.source(assignment.ledger).sink(assignment.sink).origin(origin)
    if assignment.step:
        calls, is_end = STEPS[assignment.step]
        for owner, name in calls:
            setattr(owner, name, _with_step(getattr(owner, name), assignment, origin.note, is_end=is_end))
    return app


def _with_step(
    call: Callable[..., Awaitable[Any]], assignment: SwapAssignment, note: Callable[[str], None], *, is_end: bool
) -> Callable[..., Awaitable[Any]]:
    """The call itself, with the step of the assignment before or behind it."""

    @wraps(call)
    async def stepping(*arguments: Any, **options: Any) -> Any:
        if not is_end:
            await _take(assignment, note)
        result = await call(*arguments, **options)
        if is_end:
            await _take(assignment, note)
        return result

    return stepping


async def _take(assignment: SwapAssignment, note: Callable[[str], None]) -> None:
    notes = Path(assignment.notes)
    if _was_reached(notes):
        return
    note(f"{REACHED}{assignment.step}")
    match assignment.act:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "wait":
            while not _may_go(notes):
                await asyncio.to_thread(pause, LOOK_S)


def _was_reached(notes: Path) -> bool:
    return REACHED in notes.read_text()


def _may_go(notes: Path) -> bool:
    return (notes.parent / GO).exists()


def main() -> None:
    assignment = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SwapAssignment)
    asyncio.run(app_of(assignment).run())


if __name__ == "__main__":
    main()
