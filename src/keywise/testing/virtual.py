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
        self.has_ended = False
        self.set_task_factory(_quiet_task)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left to do, and the run has not ended")
        # Never by less than the resolution: who wakes up within it finds that it is too early, and would spin for ever.
        self._now += max(timeout, self._clock_resolution) if timeout > 0 else 0.0
        self.steps += 1
        return []

    def again(self, gate: "_Gate") -> None:
        """Let a callback run that was held back; it may still be cancelled through its first handle."""
        super().call_soon(gate, context=gate.context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        if self.has_ended:
            return asyncio.Handle(callback, args, self, context)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(process, callback, args, context)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        if self.has_ended:
            return asyncio.TimerHandle(when, callback, args, self, context)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(process, callback, args, context)
        handle = super().call_at(when, gate, context=context)
        gate.handle = handle
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def end(self) -> None:
        """Nothing is called any more. Coroutines of killed processes may still be collected without a noise."""
        self.has_ended = True
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        pass

    def __del__(self) -> None:
        pass

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
        self._tasks.append(task)
        return task

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Go on: whatever should have happened meanwhile happens now, in its order."""
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        for gate in backlog:
            self._loop.again(gate)

    def kill(self) -> None:
        """Not one line of it runs any more, not even a `finally`."""
        self.is_dead = True
        self._backlog.clear()

    def let(self, gate: "_Gate") -> None:
        if self.is_dead or (gate.handle is not None and gate.handle.cancelled()):
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
    return loop.create_task(coroutine, context=context)


def _quiet_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, context=context)
    # A killed process leaves its tasks pending for ever; that is what being killed means.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task
