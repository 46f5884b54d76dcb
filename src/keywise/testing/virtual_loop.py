"""A virtual event loop: every sleep is free, every run repeatable, and processes can be stopped and killed."""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

SHORTEST_S = 1e-9

_process: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time jumps to the next thing to do.

    It does by itself what a loop without files and threads needs: most of a run is spent here.
    """

    _ready: "deque[asyncio.Handle]"

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_number = 0
        self.steps = 0
        self.has_ended = False
        self.set_task_factory(_quiet_task)

    def time(self) -> float:
        return self._now

    def again(self, handles: "list[_Gated | _GatedTimer]") -> None:
        """Let callbacks run that were held back."""
        self._ready.extend(handles)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        handle = asyncio.Handle if process is None else _Gated
        made = handle(callback, args, self, context)
        if not self.has_ended:
            self._ready.append(made)
        return made

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        handle = asyncio.TimerHandle if process is None else _GatedTimer
        made = handle(when, callback, args, self, context)
        if not self.has_ended:
            self._timer_number += 1
            heapq.heappush(self._timers, (when, self._timer_number, made))
        return made

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def end(self) -> None:
        """Nothing is called any more. Coroutines of killed processes may still be collected without a noise."""
        self.has_ended = True
        self._ready.clear()
        self._timers.clear()

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise RuntimeError("nothing is left to do, and the run has not ended")
            # Never by less than this: who wakes up too early by a rounding error would spin for ever.
            self._now = max(timers[0][0], self._now + SHORTEST_S)
        self.steps += 1
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

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
        self._backlog: list[_Gated | _GatedTimer] = []
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
        self._loop.again(backlog)

    def kill(self) -> None:
        """Not one line of it runs any more, not even a `finally`."""
        self.is_dead = True
        self._backlog.clear()

    def lets(self, handle: "_Gated | _GatedTimer") -> bool:
        """Whether a callback may run now; while the process is paused it is kept for later."""
        if self.is_dead:
            return False
        if self.is_paused:
            self._backlog.append(handle)
        return not self.is_paused


class _Gated(asyncio.Handle):
    """A callback that asks its process before it runs."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_process)  # type: ignore[attr-defined]
        if process.lets(self):
            super()._run()


class _GatedTimer(asyncio.TimerHandle):
    """The same, at its time."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_process)  # type: ignore[attr-defined]
        if process.lets(self):
            super()._run()


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
