"""Serial functions whose store has trouble that a test chooses."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial import MemoryTurns
from keywise.core.clock import boot_time
from keywise.core.serial.contract import TurnPolicy
from keywise.serial.function import SerialFunction, Wiring, define

Trouble = Callable[[str, tuple[Any, ...]], Awaitable[None]]


class TroubledTurns(MemoryTurns):
    """Awaits `before` and `after` each call; what they raise is raised by the store."""

    before: Trouble | None = None
    after: Trouble | None = None
    is_shared = False

    async def answer(self, *arguments: Any) -> Any:
        return await self._call("answer", super().answer, arguments)

    async def renew(self, *arguments: Any) -> Any:
        return await self._call("renew", super().renew, arguments)

    async def replies(self, *arguments: Any) -> Any:
        return await self._call("replies", super().replies, arguments)

    async def withdraw(self, *arguments: Any) -> Any:
        return await self._call("withdraw", super().withdraw, arguments)

    async def wait(self, *arguments: Any) -> Any:
        return await self._call("wait", super().wait, arguments)

    async def _call(self, name: str, act: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
        if self.before is not None:
            await self.before(name, arguments)
        result = await act(*arguments)
        if self.after is not None:
            await self.after(name, arguments)
        return result


def serial(function: Callable[..., Any], database: MemoryDatabase | None = None, **options: Any) -> SerialFunction:
    """The function as one process has it; `serial(...)._turns` is its store once it was called."""
    database = MemoryDatabase() if database is None else database
    observers = options.pop("observers", ())
    is_shared = options.pop("is_shared", False)

    def connect(owner: str, policy: TurnPolicy) -> TroubledTurns:
        turns = TroubledTurns(database, "f", owner, policy)
        turns.is_shared = is_shared
        return turns

    clock = options.pop("clock", boot_time)
    wiring = Wiring(observers=observers, connect=connect, clock=clock)
    return define("f", function, wiring, {"key": lambda request: request["k"], "poll": "20ms", **options})


def gate(name: str) -> tuple[Trouble, asyncio.Event, asyncio.Event]:
    """Trouble that stops the next call of that name: when it is there, and until it is let go."""
    is_there, go_on = asyncio.Event(), asyncio.Event()

    async def stop(called: str, arguments: tuple[Any, ...]) -> None:
        if called == name and not is_there.is_set():
            is_there.set()
            await go_on.wait()

    return stop, is_there, go_on


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await a_while()


async def a_while() -> None:
    """Let whatever can go on go on."""
    await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(threading.Event().wait, 0.002))])
