"""`keywise run`: work until told to stop, and say what became of the messages."""

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, NoReturn

import typer

from keywise import events
from keywise.app import App
from keywise.change import Outcome
from keywise.cli.loading import VARIABLE, JsonOption, chosen, load
from keywise.cli.speech import cell, complain, display, plain, table, tell_json
from keywise.errors import KeywiseError, UnavailableError
from keywise.protocols import Source

LOOK_S = 0.1
"""Whether the queues are empty is looked at after so long without a batch."""

PROMISES = {
    "atomic": "each effect exactly once",
    "conditional": "the newest wins at all times",
    "plain": "at least once, ends at the newest",
}


def run(
    app: Annotated[
        str | None,
        typer.Argument(metavar="APP", envvar=VARIABLE, help="As shop:app, path/to/shop.py:app or pipeline.toml."),
    ] = None,
    pipelines: Annotated[
        list[str] | None, typer.Argument(metavar="PIPELINE", help="Run these only; all of them without it.")
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Stop when all queues are empty and all work is done.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Work on messages until SIGTERM or SIGINT.

    The first signal drains: what has begun is finished, the rest is given back.
    A second one leaves at once.

    \b
    Example:
      keywise run shop:app
      keywise run shop:app pages --until-empty --json
      keywise run pipeline.toml
    """
    loaded = load(app, "keywise run shop:app")
    names = chosen(loaded, pipelines or ())
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    watch = Watch(names)
    loaded.observers[:] = [*map(_without_starts, loaded.observers), watch]
    status = _finish(_work(loaded, names, watch, until_empty))
    if watch.sources:
        _tell(watch, json)
    leave(status)


class Pipeline:
    """What was seen of one pipeline."""

    def __init__(self) -> None:
        self.grade = ""
        self.sources: list[dict[str, str]] = []
        self.figures = events.Figures()
        self.ignored = 0

    def told(self) -> dict[str, Any]:
        """For scripts; every outcome that a change can end with is named."""
        ends = (Outcome.APPLIED, Outcome.STALE, Outcome.DUPLICATE, Outcome.SUPERSEDED, Outcome.DEAD)
        outcomes = {end.value: self.figures.outcomes[end.value] for end in ends} | {"ignored": self.ignored}
        retries = self.figures.events[events.Failed.__name__]
        return {"grade": self.grade, "sources": self.sources, "outcomes": outcomes, "failed_tries": retries}


class Watch:
    """An observer that says at the start what can be promised, and counts what happens."""

    def __init__(self, names: Sequence[str]) -> None:
        self.pipelines = {name: Pipeline() for name in names}
        self.sources = 0
        """So many have started."""
        self.stirred = False
        """Something happened since this was last set."""
        self.started_at = time.monotonic()

    def __call__(self, event: events.Event) -> None:
        self.stirred = True
        pipeline = self.pipelines[event.pipeline]
        pipeline.figures(event)
        match event:
            case events.Started():
                self.sources += 1
                pipeline.grade = event.grade
                pipeline.sources.append({"source": event.source, "way": event.way})
                _announce(event)
            case events.Ignored():
                pipeline.ignored += event.changes


def leave(status: int) -> NoReturn:
    """End the process, also while a handler hangs in a thread that nobody can stop."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or 1
    os._exit(status)


async def _work(app: App, names: Sequence[str], watch: Watch, until_empty: bool) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_stop_when_empty(app, names, watch)) if until_empty else None
            await app.run(*names)
            if watching is not None:
                watching.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _stop_when_empty(app: App, names: Sequence[str], watch: Watch) -> None:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(app.open(name, work=False)) for name in names]
        sources = [source for pipeline in opened for _, source in pipeline.sources]
        wait_s = LOOK_S
        while True:
            watch.stirred = False
            await asyncio.sleep(wait_s)
            if watch.stirred or watch.sources < len(sources):
                continue
            looked_at = time.monotonic()
            if await _are_empty(sources):
                app.stop()
                return
            # Counting a long queue takes a while; most of the time has to be left for the work.
            wait_s = max(LOOK_S, 10 * (time.monotonic() - looked_at))


async def _are_empty(sources: Sequence[Source]) -> bool:
    """A message that is worked on, or waits for its next try here or elsewhere, is not acked, so it still counts."""
    try:
        return not any([await source.depth() for source in sources])
    except UnavailableError:
        return False


def _finish(work: Coroutine[Any, Any, None]) -> int:
    """Run to the end; the loop is never closed, because closing it would wait for handlers that hang."""
    try:
        asyncio.new_event_loop().run_until_complete(work)
    except KeywiseError as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _without_starts(observer: events.Observer) -> events.Observer:
    """A log needs no second line about what is announced anyway."""
    if not isinstance(observer, events.Log):
        return observer
    return lambda event: None if isinstance(event, events.Started) else observer(event)


def _announce(event: events.Started) -> None:
    promise = PROMISES.get(event.grade, "")
    line = f"{event.pipeline}: {event.grade} ({promise}), {event.way}, from {event.source}"
    print(plain(line), file=sys.stderr, flush=True)


def _tell(watch: Watch, json: bool) -> None:
    told = {name: pipeline.told() for name, pipeline in watch.pipelines.items()}
    if json:
        tell_json({"pipelines": told, "seconds": round(time.monotonic() - watch.started_at, 3)})
        return
    outcomes = next(iter(told.values()))["outcomes"]
    summary = table("pipeline", *outcomes, "failed tries", numbers=(*outcomes, "failed tries"))
    for name, pipeline in told.items():
        counts = (f"{number:,}" for number in (*pipeline["outcomes"].values(), pipeline["failed_tries"]))
        summary.add_row(cell(name), *counts)
    display(summary)
