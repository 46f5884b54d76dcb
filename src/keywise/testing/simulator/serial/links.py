"""The simulated network between callers and the store that keeps their requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from keywise.adapters.memory.serial import MemoryTurns, _Transaction
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.serial.contract import Answered, Ending, Reply, Request, Switch, Turn
from keywise.testing.simulator.links import Session
from keywise.testing.virtual_loop import Process, outside

if TYPE_CHECKING:
    from keywise.testing.simulator.serial.world import SerialWorld

T = TypeVar("T")
BROKEN = "not allowed for a moment"


class LinkedTurns:
    """The turns of one process behind a network: calls are slow, get lost, or take effect without an answer."""

    def __init__(self, world: "SerialWorld", process: Process, turns: MemoryTurns) -> None:
        self._world = world
        self._process = process
        self._turns = turns
        self.database = turns.database
        self.operator = self

    async def __aenter__(self) -> Self:
        await self._turns.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._turns.__aexit__(*error)

    async def ask(self, requests: Sequence[Request]) -> list[Reply | Turn | None]:
        return await self._call(lambda: self._turns.ask(requests))

    async def take(self, limit: int, run_max: int = 1) -> list[Turn]:
        return await self._call(lambda: self._turns.take(limit, run_max))

    async def answer(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        return await self._call(lambda: self._turns.answer(replies, limit, run_max, requests), may_break=True)

    async def give_back(self, turns: Sequence[Turn]) -> None:
        await self._call(lambda: self._turns.give_back(turns))

    async def renew(self, tokens: Sequence[int], before: float | None = None) -> list[int]:
        return await self._call(lambda: self._turns.renew(tokens, before), may_break=True)

    async def withdraw(self, ids: Sequence[str], outcome: Ending = Ending.EXPIRED, cause: str = "") -> list[str]:
        return await self._call(lambda: self._turns.withdraw(ids, outcome, cause), may_break=True)

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        return await self._call(lambda: self._turns.replies(ids), may_break=True)

    async def wait(self, wait_s: float) -> None:
        await self._turns.wait(wait_s)

    async def now(self) -> float:
        return await self._call(self._turns.now)

    async def prune(self, retention_s: float) -> int:
        return await self._call(lambda: self._turns.prune(retention_s))

    async def switches(self) -> list[Switch]:
        return await self._call(self._turns.switches)

    def transaction(self, *tokens: int) -> AbstractAsyncContextManager[Any]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        session, database = Session(self.database), self.database

        async def begin() -> None:
            await database.begin()
            session.is_open = True
            if self._process.is_dead:
                session.end()

        async def commit() -> None:
            if not session.is_open:
                raise UnavailableError("the connection was lost")
            session.commit()

        self._world.sessions.setdefault(self._process, []).append(session)
        try:
            await self._call(begin)
            yield _Transaction(self._turns)
            await self._call(commit)
        finally:
            session.give_up()

    async def _call(self, act: Callable[[], Awaitable[T]], may_break: bool = False) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        faults = self._world.faults
        if may_break and faults.happens("broken store", faults.rates.broken):
            act = _break
        outside(asyncio.get_running_loop(), self._serve(act, answer))
        self._world.meanwhile(self._process)
        return await answer

    async def _serve(self, act: Callable[[], Awaitable[T]], answer: "asyncio.Future[T]") -> None:
        faults = self._world.faults
        await asyncio.sleep(faults.latency_s())
        if self._world.is_down or faults.happens("lost before", faults.rates.lost / 2):
            return await self._stay_silent(answer)
        try:
            result = await act()
        except Exception as error:
            _fail(answer, error)
            return
        if faults.happens("lost after", faults.rates.lost / 2):
            return await self._stay_silent(answer)
        await asyncio.sleep(faults.latency_s())
        if not answer.done():
            answer.set_result(result)

    async def _stay_silent(self, answer: "asyncio.Future[Any]") -> None:
        await asyncio.sleep(self._world.rng.uniform(0.05, 2.0))
        _fail(answer, UnavailableError("no answer"))


async def _break() -> Any:
    raise DatabaseError(BROKEN)


def _fail(answer: "asyncio.Future[Any]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # Whoever was killed meanwhile does not look at it.
