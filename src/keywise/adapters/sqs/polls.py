"""Receives of SQS: one long poll while the queue is quiet, and more and more short ones while it is not.

A request brings at most ten messages. A long poll goes on while no caller waits for it, so that a quiet queue costs
three requests a minute however short a caller waits; what it brings belongs to the next `receive`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

from keywise.adapters.sqs.batches import BATCH_MAX
from keywise.adapters.sqs.messages import SqsDelivery
from keywise.adapters.sqs.service import LONG_POLL_S
from keywise.core.errors import KeywiseError

IDLE_S = 1.0
"""If no receive follows for so long, the messages that arrived meanwhile go back to the queue."""

STRAGGLER_S = 1.0
"""How long a receive with messages waits for its other requests, which may hang."""

Ask: TypeAlias = Callable[[int, int], Awaitable[list[SqsDelivery]]]
"""One request: for so many messages, and so many seconds to wait for the first."""
ReturnMessages: TypeAlias = Callable[[Sequence[SqsDelivery]], Awaitable[None]]


class Polls:
    """The receive requests of one source."""

    def __init__(self, ask: Ask, give_back: ReturnMessages, requests: int, visibility_s: int) -> None:
        self._ask = ask
        self._give_back = give_back
        self._requests = requests
        self._width = 0
        """How many short polls to begin with; 0 while the queue is quiet."""
        self._ahead: deque[SqsDelivery] = deque()
        """What arrived and was not taken yet."""
        self._stragglers: set[asyncio.Future[list[SqsDelivery]]] = set()
        """Short polls whose receive did not wait for them."""
        self._long_poll_s = 0
        self.follow_visibility(visibility_s)
        self._long_poll: asyncio.Task[list[SqsDelivery]] | None = None
        self._long_poll_limit = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_idle = False
        self._background: set[asyncio.Task[None]] = set()

    async def receive(self, limit: int, wait_s: float) -> list[SqsDelivery]:
        """Return up to `limit` messages; wait up to `wait_s` for the first one."""
        if limit <= 0:
            return []
        self._stop_idling()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        try:
            self._take_in()
            found = [self._ahead.popleft() for _ in range(min(limit, len(self._ahead)))]
            if len(found) < limit and (self._width > 0 or (wait_s <= 0 and not found)):
                await self._burst(found, limit)
            while not found and (left_s := deadline - loop.time()) > 0:
                if await self._waited(found, limit, left_s) and len(found) < limit:
                    await self._burst(found, limit)
            return found
        finally:
            self._idle_timer = loop.call_later(IDLE_S, self._idle)

    def follow_visibility(self, visibility_s: int) -> None:
        """Poll for at most this long: a connection may be silent, and messages wait behind such a poll."""
        self._long_poll_s = min(LONG_POLL_S, max(1, visibility_s))

    def put_back(self, deliveries: Sequence[SqsDelivery]) -> None:
        """Keep deliveries for the next receive."""
        self._ahead.extend(deliveries)

    async def close(self) -> None:
        """Give back what no caller has taken. A long poll is broken off."""
        self._stop_idling()
        for task in self._stragglers:
            task.cancel()
        if (poll := self._long_poll) is not None:
            poll.cancel()
            await asyncio.wait([poll])
            with suppress(KeywiseError):
                self._take_in()
        await asyncio.gather(*self._background)
        await self._return(self._taken_ahead())

    async def _burst(self, found: list[SqsDelivery], limit: int) -> None:
        """Ask by short polls side by side: twice as many each time, as long as all of them come back full."""
        width = max(1, self._width)
        while (room := limit - len(found)) > 0:
            width = min(width, self._requests)
            asked = [min(BATCH_MAX, room - start) for start in range(0, room, BATCH_MAX)][:width]
            came = await self._side_by_side(asked, found)
            if came == sum(asked):
                width *= 2
            elif 2 * came < sum(asked):
                width //= 2
                break
        self._width = width

    async def _side_by_side(self, asked: Sequence[int], found: list[SqsDelivery]) -> int:
        tasks = [asyncio.ensure_future(self._ask(one, 0)) for one in asked]
        try:
            done, late = await asyncio.wait(tasks, timeout=STRAGGLER_S)
            if not done:
                done, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # No caller gets what they bring: it is kept for the next receive, or goes back.
            self.put_back(found)
            self._keep_later(tasks)
            raise
        self._keep_later(late)
        before, errors = len(found), list[BaseException]()
        for task in done:
            if (error := task.exception()) is not None:
                errors.append(error)
            else:
                found += task.result()
        if errors and len(found) == 0:
            raise errors[0]
        return len(found) - before

    async def _waited(self, found: list[SqsDelivery], limit: int, wait_s: float) -> bool:
        """Wait for the long poll; True if it came back full, so that there is probably more."""
        if self._long_poll is None:
            self._long_poll_limit = min(BATCH_MAX, limit)
            self._long_poll = asyncio.ensure_future(self._ask(self._long_poll_limit, self._long_poll_s))
            self._long_poll.add_done_callback(self._poll_ended)
        await asyncio.wait([self._long_poll], timeout=wait_s)
        came = self._take_in()
        found += [self._ahead.popleft() for _ in range(min(limit, len(self._ahead)))]
        return came >= self._long_poll_limit

    def _take_in(self) -> int:
        """Move what the long poll brought to what is ahead; raises its error."""
        poll = self._long_poll
        if poll is None or not poll.done():
            return 0
        self._long_poll = None
        if poll.cancelled():
            return 0
        came = poll.result()
        self._ahead.extend(came)
        return len(came)

    def _poll_ended(self, poll: "asyncio.Future[list[SqsDelivery]]") -> None:
        if self._is_idle:
            self._return_later()

    def _keep_later(self, tasks: Iterable["asyncio.Future[list[SqsDelivery]]"]) -> None:
        """Keep what these polls bring for the next receive."""
        for task in tasks:
            self._stragglers.add(task)
            task.add_done_callback(self._keep)

    def _keep(self, task: "asyncio.Future[list[SqsDelivery]]") -> None:
        self._stragglers.discard(task)
        if not task.cancelled() and task.exception() is None:
            self._ahead.extend(task.result())
            if self._is_idle:
                self._return_later()

    def _stop_idling(self) -> None:
        self._is_idle = False
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _idle(self) -> None:
        self._is_idle = True
        self._width = 0
        self._return_later()

    def _return_later(self) -> None:
        # An error of the long poll is raised by the next receive, which asks again.
        if self._long_poll is not None and self._long_poll.done() and self._long_poll.exception() is None:
            self._take_in()
        if self._ahead:
            task = asyncio.create_task(self._return(self._taken_ahead()))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _taken_ahead(self) -> list[SqsDelivery]:
        taken = [*self._ahead]
        self._ahead.clear()
        return taken

    async def _return(self, deliveries: Sequence[SqsDelivery]) -> None:
        # If this fails, they come back after their visibility timeout.
        with suppress(KeywiseError):
            await self._give_back(deliveries)
