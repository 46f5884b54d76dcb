"""Adds up time by layer: how long each plug takes, and how much of that is spent inside SQLite.

Everything is watched from outside, so the product runs as it is.
"""

import inspect
import selectors
import sqlite3
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

REST = "rest"
WAIT = "wait"


class Stopwatch:
    """Seconds of one thread, each counted for exactly one layer: an inner layer is no part of the outer one."""

    def __init__(self, *, cpu: bool) -> None:
        self.clock = time.thread_time if cpu else time.perf_counter
        """The CPU time of this thread, or the time on the wall."""
        self.layers: defaultdict[str, float] = defaultdict(float)
        self.in_sqlite: defaultdict[str, float] = defaultdict(float)
        """Of the seconds of each layer: those inside SQLite."""
        self.elsewhere_s = 0.0
        """Inside SQLite in other threads, meanwhile."""
        self._stack = [REST]
        self._since = self.clock()
        self._thread = threading.get_ident()

    def restart(self) -> None:
        """Forget everything up to now."""
        self.layers.clear()
        self.in_sqlite.clear()
        self.elsewhere_s, self._since = 0.0, self.clock()

    def read(self) -> dict[str, float]:
        """The seconds of all layers up to now."""
        self._charge()
        return dict(self.layers)

    @contextmanager
    def layer(self, name: str) -> Iterator[None]:
        """Count what happens inside for a layer."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    @contextmanager
    def sqlite(self) -> Iterator[None]:
        """Count a call into SQLite for the layer that is running."""
        started, is_elsewhere = self.clock(), threading.get_ident() != self._thread
        try:
            yield
        finally:
            elapsed_s = self.clock() - started
            if is_elsewhere:
                self.elsewhere_s += elapsed_s
            else:
                self.in_sqlite[self._stack[-1]] += elapsed_s

    def _charge(self) -> None:
        now = self.clock()
        self.layers[self._stack[-1]] += now - self._since
        self._since = now


class Steps:
    """A coroutine whose steps are counted for a layer; what other tasks do while it waits is not."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], stopwatch: Stopwatch, layer: str) -> None:
        self._coroutine = coroutine
        self._stopwatch = stopwatch
        self._layer = layer

    def __await__(self) -> Generator[Any, Any, Any]:
        step, value = self._coroutine.send, None
        while True:
            with self._stopwatch.layer(self._layer):
                try:
                    wanted = step(value)
                except StopIteration as stop:
                    return stop.value
            try:
                value, step = (yield wanted), self._coroutine.send
            except BaseException as error:
                value, step = error, self._coroutine.throw


class Watched:
    """Stands before a plug: the named methods are counted for their layers, everything else passes."""

    def __init__(self, plug: Any, stopwatch: Stopwatch, layers: Mapping[str, str]) -> None:
        self._plug = plug
        # As attributes: isinstance sees the members of a protocol only where an object really has them.
        vars(self).update(
            {
                name: watched(getattr(plug, name), stopwatch, layer)
                for name, layer in layers.items()
                if hasattr(plug, name)
            }
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plug, name)


def watched(function: Callable[..., Any], stopwatch: Stopwatch, layer: str) -> Callable[..., Any]:
    """The function, with its calls counted for a layer."""

    async def start(*arguments: Any, **options: Any) -> Any:
        return await Steps(function(*arguments, **options), stopwatch, layer)

    def call(*arguments: Any, **options: Any) -> Any:
        with stopwatch.layer(layer):
            return function(*arguments, **options)

    return start if inspect.iscoroutinefunction(function) else call


@asynccontextmanager
async def watched_transaction(manager: Any, stopwatch: Stopwatch, layers: Mapping[str, str]) -> AsyncIterator[Watched]:
    """A transaction whose begin and commit are layers too."""
    transaction = await Steps(manager.__aenter__(), stopwatch, "begin")
    try:
        yield Watched(transaction, stopwatch, layers)
    except BaseException:
        await manager.__aexit__(*sys.exc_info())
        raise
    await Steps(manager.__aexit__(None, None, None), stopwatch, "commit")


def watched_selector(stopwatch: Stopwatch) -> selectors.BaseSelector:
    """What an event loop waits with: for the thread that commits, for instance."""

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            with stopwatch.layer(WAIT):
                return super().select(timeout)

    return Selector()


def watched_connection(stopwatch: Stopwatch, layers: Mapping[str, str]) -> type[sqlite3.Connection]:
    """A kind of connection whose calls into SQLite are counted; statements may have layers of their own."""

    @contextmanager
    def counted(statement: str) -> Iterator[None]:
        if statement in layers:
            with stopwatch.layer(layers[statement]), stopwatch.sqlite():
                yield
        else:
            with stopwatch.sqlite():
                yield

    class Cursor(sqlite3.Cursor):
        _statement = ""

        def execute(self, statement: str, *arguments: Any) -> "Cursor":
            self._statement = statement
            with counted(statement):
                super().execute(statement, *arguments)
            return self

        def executemany(self, statement: str, *arguments: Any) -> "Cursor":
            with counted(statement):
                super().executemany(statement, *arguments)
            return self

        def fetchone(self) -> Any:
            with counted(self._statement):
                return super().fetchone()

        def fetchall(self) -> list[Any]:
            with counted(self._statement):
                return super().fetchall()

        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            # Row by row the watching would take longer than the reading.
            return iter(self.fetchall())

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

        def execute(self, statement: str, *arguments: Any) -> Any:
            return self.cursor().execute(statement, *arguments)

        def executemany(self, statement: str, *arguments: Any) -> Any:
            return self.cursor().executemany(statement, *arguments)

        def commit(self) -> None:
            with counted("commit"):
                super().commit()

    return Connection
