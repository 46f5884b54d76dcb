"""A lossy link from a simulated process to its servers: calls are slow, get lost, or take effect without an answer."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.errors import UnavailableError
from keywise.core.resource import AsyncResource
from keywise.testing.virtual_loop import Process, outside

if TYPE_CHECKING:
    from keywise.testing.simulated_world import SimulatedWorld

T = TypeVar("T")
ServerT = TypeVar("ServerT", bound=AsyncResource)


class LossyLink:
    """The connections of one process."""

    def __init__(self, world: "SimulatedWorld", process: Process, is_cut: Callable[[], bool] = lambda: False) -> None:
        self.world = world
        self.process = process
        self.is_cut = is_cut
        """Whether an outage keeps the process from its server now."""

    async def call(self, act: Callable[[], Awaitable[T]], lost: str = "") -> T:
        """Run `act` on a server. It may not run, or run without an answer, or long after the caller was killed.

        `lost` is counted as the fault if the call or its answer gets lost.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outside(asyncio.get_running_loop(), self._serve(act, answer, lost))
        self.world.meanwhile(self.process)
        return await answer

    @asynccontextmanager
    async def transaction(self, session: "Session") -> AsyncIterator[None]:
        """Run a transaction on the server; it is rolled back if the connection ends before it is committed."""
        self.world.sessions.setdefault(self.process, []).append(session)
        try:
            await self.call(session.begin)
            yield
            await self.call(session.commit)
        except asyncio.CancelledError:
            session.on_cancel()
            raise
        finally:
            session.end()

    async def _serve(self, act: Callable[[], Awaitable[T]], answer: "asyncio.Future[T]", lost: str) -> None:
        faults = self.world.faults
        await asyncio.sleep(faults.latency_s())
        if self.is_cut() or faults.loses(lost or "lost before"):
            return await self._stay_silent(answer)
        try:
            result = await act()
        except Exception as error:
            return _fail(answer, error)
        finally:
            self.world.served()
        if faults.loses(lost or "lost after"):
            return await self._stay_silent(answer)
        await asyncio.sleep(faults.latency_s())
        if self.is_cut():
            return await self._stay_silent(answer)
        if not answer.done():
            answer.set_result(result)

    async def _stay_silent(self, answer: "asyncio.Future[Any]") -> None:
        await asyncio.sleep(self.world.faults.silence_s())
        _fail(answer, UnavailableError("no answer"))


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """The server's side of a transaction: it ends with the connection."""

    database: MemoryDatabase
    wait_s: Callable[[], float] | None = None
    """How long the transaction waits for others before it begins."""
    on_commit: Callable[[], None] = lambda: None
    on_cancel: Callable[[], None] = lambda: None
    """Called before the transaction of a cancelled caller is rolled back."""
    is_open: bool = False
    has_ended: bool = False

    async def begin(self) -> None:
        if self.wait_s is not None:
            await asyncio.sleep(self.wait_s())
        await self.database.begin()
        self.is_open = True
        if self.has_ended:
            self.end()  # The connection ended before the transaction began, which must not stay open.

    async def commit(self) -> None:
        if not self.is_open:
            raise UnavailableError("the connection was lost")
        self.is_open = False
        self.database.commit()
        self.on_commit()

    def end(self) -> None:
        """The connection has ended, on either side."""
        self.has_ended = True
        if self.is_open:
            self.is_open = False
            self.database.rollback()


class Linked(Generic[ServerT]):
    """A server as one process sees it: every coroutine method of the class `over` is a call over the link.

    A subclass writes only the methods that do more than that.
    """

    def __init_subclass__(cls, over: type[ServerT]) -> None:
        for name, method in vars(over).items():
            if inspect.iscoroutinefunction(method) and not name.startswith("_") and not hasattr(cls, name):
                setattr(cls, name, _forwarding(name))

    def __init__(self, link: LossyLink, server: ServerT) -> None:
        self._link = link
        self._server = server

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.__aexit__(*error)

    async def forward(self, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        """Call the method `name`, which `act` runs; a subclass may do more before and after it."""
        return await self._link.call(act)


def _forwarding(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: Linked[Any], *arguments: Any, **options: Any) -> Any:
        method = getattr(self._server, name)
        return await self.forward(name, lambda: method(*arguments, **options))

    return call


def _fail(answer: "asyncio.Future[Any]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # A caller that was killed meanwhile does not look at it, and that is no surprise.
