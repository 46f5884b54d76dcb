"""A virtual event loop: every sleep is free, every run repeatable, and processes can be stopped and killed."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

_process: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time jumps to the next thing to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = 1e-9
        self._selector = self
        self.steps = 0

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left to do, and the run has not ended")
        self._now += timeout
        self.steps += 1
        return []

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(process, callback, args, context)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(process, callback, args, context)
        handle = super().call_at(when, gate, context=context)
        gate.handle = handle
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Process:
    """Everything that runs in one simulated process: it can be paused like SIGSTOP and killed like `kill -9`."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self._loop = loop
        self._backlog: list[_Gate] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine, and all that it starts, inside this process."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        task = self._loop.create_task(coroutine, context=context)
        # A killed process leaves its tasks pending for ever; that is what being killed means.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(task)
        return task

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Go on: whatever should have happened meanwhile happens now, in its order."""
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        for gate in backlog:
            if gate.handle is None or not gate.handle.cancelled():
                self._loop.call_soon(gate.callback, *gate.args, context=gate.context)

    def kill(self) -> None:
        """Not one line of it runs any more, not even a `finally`."""
        self.is_dead = True
        self._backlog.clear()

    def let(self, gate: "_Gate") -> None:
        if self.is_dead:
            return
        if self.is_paused:
            self._backlog.append(gate)
        else:
            gate.callback(*gate.args)


class _Gate:
    """A callback that asks its process before it runs."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(
        self, process: Process, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        self.process.let(self)


def current_process() -> Process | None:
    """The simulated process whose code is running."""
    return _process.get()


def outside(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run a coroutine in no process: a server goes on when its client is killed."""
    context = contextvars.copy_context()
    context.run(_process.set, None)
    task = loop.create_task(coroutine, context=context)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task
