"""The outbox of one process: sends requests and answers to the serial store together, or one by one after an error."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec.structs import replace

from keywise.core.errors import KeywiseError, UnavailableError
from keywise.core.failures import cause_of_error, storable
from keywise.core.serial.contract import Ending, Reply, Request
from keywise.serial.pending import Call

T = TypeVar("T")
UNSTORABLE = "its answer cannot be stored"


@dataclass(frozen=True, slots=True)
class Sending:
    """ClaimResults, what is asked for, and how many turns are wished for."""

    replies: list[Reply]
    asked: list[Call]
    limit: int
    began: float
    """By the loop's clock."""

    def requests(self) -> list[Request]:
        """As they are sent: from now on, the store may know of them."""
        for call in self.asked:
            call.is_asked = True
        return [replace(call.request, wait_s=call.deadline - self.began) for call in self.asked]


Send: TypeAlias = Callable[[Sending], Awaitable[None]]


class Outbox:
    """What waits for the next call to the store."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.new: dict[str, Call] = {}
        """Those that are to be asked for, by id."""
        self._joins: list[Call] = []
        """Those from within a turn whose id is asked for already: the store says if they would wait for themselves."""
        self.is_apart = False
        """The last call failed, and any of what it carried may be to blame."""

    def __bool__(self) -> bool:
        return bool(self.replies or self.new or self._joins)

    def join(self, call: Call, request: Request, future: "asyncio.Future[Reply]", deadline: float) -> None:
        """Somebody waits for a call; a request of its own, and not the call's, is asked for if it is a nested one."""
        if request.within and call.request is not request:
            joiner = Call(request, call.argument, asyncio.get_running_loop().time())
            joiner.deadline, joiner.futures = deadline, [future]
            self._joins.append(joiner)

    async def flush(self, limit: int, send: Send) -> None:
        """Send all in one call. If it fails, nothing is gone."""
        now = asyncio.get_running_loop().time()
        replies, self.replies = self.replies, []
        new, self.new = self.new, {}
        joins, self._joins = self._joins, []
        asked = [call for call in (*new.values(), *joins) if call.deadline > now]
        try:
            await send(Sending(replies, asked, limit, now))
        except Exception as error:
            self.replies[:0] = replies
            self.new = {id: call for id, call in new.items() if call.is_wanted} | self.new
            self._joins[:0] = [call for call in joins if call.is_wanted]
            self.is_apart = not isinstance(error, UnavailableError)
            raise

    async def flush_apart(self, send: Send) -> list[tuple[Call, Exception]]:
        """Send each alone, and return those that cannot be asked for. If none passes, that is raised."""
        joins, self._joins = self._joins, []

        async def send_one(item: Reply | Call) -> None:
            now = asyncio.get_running_loop().time()
            if isinstance(item, Reply):
                await send(Sending([item], [], 0, now))
                self._replace(item)
            elif item in joins or self._is_due(item):
                await self._ask(item, send, now)

        items: list[Reply | Call] = [*self.replies, *self.new.values(), *joins]
        try:
            apart = await send_apart(items, send_one)
            if (fault := apart.fault_of_the_store()) is not None:
                raise fault
        except Exception:
            self._joins[:0] = [call for call in joins if call.is_wanted]
            raise
        self.is_apart = False
        for item, error in apart.failed:
            if isinstance(item, Reply):
                self._replace(item, unstorable(item, error))
        return [(item, error) for item, error in apart.failed if isinstance(item, Call) and item not in joins]

    def _is_due(self, call: Call) -> bool:
        """Whether it is still to be asked for: its caller may have been told meanwhile that it was not."""
        return self.new.get(call.request.id) is call

    async def _ask(self, call: Call, send: Send, now: float) -> None:
        # Taken out first: the store may answer that it has to be asked for again, in another mode.
        is_new = self._is_due(call)
        if is_new:
            del self.new[call.request.id]
        try:
            if call.deadline > now:
                await send(Sending([], [call], 0, now))
        except Exception:
            if is_new and call.is_wanted:
                self.new.setdefault(call.request.id, call)
            raise

    def _replace(self, reply: Reply, *others: Reply) -> None:
        place = next(place for place, one in enumerate(self.replies) if one is reply)
        self.replies[place : place + 1] = others


class Apart(Generic[T]):
    """What came of things that were sent one by one."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[tuple[T, Exception]] = []

    def fault_of_the_store(self) -> Exception | None:
        """Its error, if nothing that was sent can be blamed for it."""
        error = self.failed[0][1] if self.failed and not self.passed else None
        return error if isinstance(error, KeywiseError) else None


async def send_apart(items: Iterable[T], send: Callable[[T], Awaitable[None]]) -> Apart[T]:
    """If the store cannot be reached, that is raised, and the rest is not sent."""
    apart: Apart[T] = Apart()
    for item in items:
        try:
            await send(item)
        except UnavailableError:
            raise
        except Exception as error:
            apart.failed.append((item, error))
        else:
            apart.passed += 1
    return apart


async def withdraw_all(turns: Any, ids: Sequence[str], alarm: Callable[[Exception], None]) -> set[str]:
    """Take out what nobody waits for any more; returns what has ended by that."""
    ended: set[str] = set()

    async def withdraw(*some: str) -> None:
        ended.update(await turns.withdraw(some, Ending.EXPIRED, "its caller gave up"))

    try:
        await withdraw(*ids)
    except UnavailableError:
        raise
    except Exception as error:
        # What cannot be taken out ends in the store by its deadline, and is not run here.
        alarm(error)
        await send_apart(ids, withdraw)
    return ended


def unstorable(reply: Reply, error: Exception) -> Reply:
    """In place of an answer that the store does not take."""
    cause = storable(f"{UNSTORABLE}: {cause_of_error(error)}")
    outcome = Ending.LOST if reply.outcome is Ending.DONE else reply.outcome
    return Reply(id=reply.id, outcome=outcome, cause=cause, token=reply.token)
