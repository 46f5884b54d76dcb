"""Reading the source of truth: what the origin or the user's `refetch` function returns, as a change."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keywise.core.bodies import encoded
from keywise.core.change import Change
from keywise.core.errors import KeywiseError, SettingsError
from keywise.core.origin import Origin
from keywise.flow.pipeline import OpenPipeline

THREADS = 2
"""How many calls of a plain `refetch` run at a time, one that hangs included."""


async def refetched(pipeline: OpenPipeline, key: str) -> Change[Any] | None:
    """Return the current state of a key; None if the key is gone. The caller has to set the era of the order."""
    body = needs_refetch(pipeline)(key)
    while inspect.isawaitable(body):
        body = await body
    if body is None:
        return None
    change = pipeline.reader.read_one(encoded(body))
    if change.key != key:
        raise KeywiseError(
            f"refetch({key!r}) returned the body of {change.key!r}; return the body of the key asked for"
        )
    return change


def needs_refetch(pipeline: OpenPipeline) -> Any:
    """Return the pipeline's refetch function; raises `SettingsError` if it has none."""
    if pipeline.refetch is None and pipeline.objects is not None:
        raise SettingsError(
            f"pipeline {pipeline.name!r} reads objects, and its source of truth is their store; compare it with the "
            f"ledger by keywise objects backfill {pipeline.name} --dry-run"
        )
    if pipeline.refetch is None:
        raise SettingsError(
            f"pipeline {pipeline.name!r} cannot read the source of truth; name its table with .origin(URL), or write a "
            "function that takes a key and returns its current body, or None if the key is gone, and decorate it with "
            ".refetch"
        )
    return pipeline.refetch


def from_origin(origin: Origin) -> Callable[[str], Any]:
    """Return a `refetch` function that reads the row of a key."""

    async def refetch(key: str) -> bytes | None:
        return (await origin.fetch([key])).get(key)

    return refetch


def in_thread(refetch: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that runs a plain `refetch` in a thread; a coroutine function is returned as it is."""
    return refetch if inspect.iscoroutinefunction(refetch) else _ThreadedRefetch(refetch)


class _ThreadedRefetch:
    """Runs a plain function in threads. A thread cannot be cancelled: a call that hangs keeps its thread."""

    def __init__(self, refetch: Callable[[str], Any]) -> None:
        self._refetch = refetch
        self._running: set[asyncio.Future[Any]] = set()

    async def __call__(self, key: str) -> Any:
        while len(self._running) >= THREADS:
            # A call whose caller has gone has outlasted its time limit, and may never end.
            awaited = [answer for answer in self._running if not answer.done()]
            if not awaited:
                raise KeywiseError("every thread runs a refetch that hangs; give the calls in refetch a time limit")
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._running.add(answer)
        arguments = (self._run, key, loop, answer)
        # A daemon: a call that hangs must not keep the process from ending.
        threading.Thread(
            target=contextvars.copy_context().run, args=arguments, name="keywise-refetch", daemon=True
        ).start()
        return await answer

    def _run(self, key: str, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]") -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._refetch(key)
        except StopIteration as raised:
            error = RuntimeError("refetch raised StopIteration")  # A future does not accept it.
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # The loop is closed: no repair waits for the answer any more.
            loop.call_soon_threadsafe(self._ended, answer, result, error)

    def _ended(self, answer: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._running.discard(answer)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
