"""Pulls of Pub/Sub: one while the subscription is quiet, and more side by side while messages come.

A pull waits in the service for its first message. It goes on while no caller waits for it, and what it brings belongs
to the next `receive`: a pull that is cancelled may have messages already, which would be hidden until their deadline.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from keywise.core.change import Delivery
from keywise.core.errors import KeywiseError

PULL_MAX = 1_000
"""The most messages of one pull."""
LONG_POLL_S = 100.0
"""How long a pull may wait; the service ends it earlier, by itself."""
IDLE_S = 1.0
"""If no receive follows for so long, the messages that arrived meanwhile go back."""
PAUSE_S = 0.1
"""A pull without messages takes at least so long, however fast the service answers."""

Pull: TypeAlias = Callable[[int, float], Awaitable[list[Delivery]]]
"""One request: for so many messages, and for so many seconds to wait for the first."""
ReturnMessages: TypeAlias = Callable[[Sequence[Delivery]], Awaitable[None]]


class Polls:
    """The pulls of one source. It never asks for more than a receive can take."""

    def __init__(self, pull: Pull, give_back: ReturnMessages, requests: int) -> None:
        self._pull = pull
        self._give_back = give_back
        self._requests = requests
        self._width = 1
        """How many pulls may wait side by side."""
        self._polls: dict[asyncio.Task[list[Delivery]], int] = {}
        """Those that are under way, with what they ask for."""
        self._ahead: deque[Delivery] = deque()
        """What arrived and was not taken yet."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_idle = False
        self._background: set[asyncio.Task[None]] = set()

    async def receive(self, limit: int, wait_s: float) -> list[Delivery]:
        """Return up to `limit` messages; wait up to `wait_s` for the first one."""
        if limit <= 0:
            return []
        self._stop_idling()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        try:
            # An error from before may be over; if it is not, the next pull fails too.
            self._take_in()
            if not self._ahead and wait_s <= 0:
                await asyncio.wait([self._start(min(limit, PULL_MAX), 0.0)])
                self._take_in_or_raise()
            while not self._ahead and (left_s := deadline - loop.time()) > 0:
                self._ask_for(limit)
                await asyncio.wait(self._polls, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                self._take_in_or_raise()
            return [self._ahead.popleft() for _ in range(min(limit, len(self._ahead)))]
        finally:
            self._idle_timer = loop.call_later(IDLE_S, self._idle)

    async def close(self) -> None:
        """Give back what no caller has taken. Pulls that wait are broken off."""
        self._stop_idling()
        if self._polls:
            for poll in self._polls:
                poll.cancel()
            await asyncio.wait(self._polls)
            self._take_in()
        await asyncio.gather(*self._background)
        await self._return(self._taken_ahead())

    def _ask_for(self, limit: int) -> None:
        room = limit - sum(self._polls.values())
        share = min(PULL_MAX, math.ceil(limit / self._width))
        while len(self._polls) < self._width and room > 0:
            self._start(min(share, room), LONG_POLL_S)
            room -= share

    def _start(self, limit: int, wait_s: float) -> asyncio.Task[list[Delivery]]:
        poll = asyncio.ensure_future(self._pulled(limit, wait_s))
        self._polls[poll] = limit
        poll.add_done_callback(self._poll_ended)
        return poll

    async def _pulled(self, limit: int, wait_s: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        found = await self._pull(limit, wait_s)
        if wait_s and not found and (left_s := began_at + PAUSE_S - loop.time()) > 0:
            await asyncio.sleep(left_s)
        return found

    def _take_in_or_raise(self) -> None:
        """Take in what pulls have brought; raise an error of one of them if there is nothing."""
        errors = self._take_in()
        if errors and not self._ahead:
            raise errors[0]

    def _take_in(self) -> list[BaseException]:
        """Move what pulls have brought to what is ahead; return the errors of those that failed."""
        errors = list[BaseException]()
        for poll in [poll for poll in self._polls if poll.done()]:
            del self._polls[poll]
            if poll.cancelled():
                continue
            if (error := poll.exception()) is not None:
                errors.append(error)
                self._width = 1
                continue
            came = poll.result()
            self._ahead.extend(came)
            self._width = min(2 * self._width, self._requests) if came else 1
        return errors

    def _poll_ended(self, poll: "asyncio.Future[list[Delivery]]") -> None:
        if self._is_idle:
            self._return_later()

    def _stop_idling(self) -> None:
        self._is_idle = False
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _idle(self) -> None:
        self._is_idle = True
        self._width = 1
        self._return_later()

    def _return_later(self) -> None:
        self._take_in()
        if self._ahead:
            task = asyncio.create_task(self._return(self._taken_ahead()))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _taken_ahead(self) -> list[Delivery]:
        taken = [*self._ahead]
        self._ahead.clear()
        return taken

    async def _return(self, deliveries: Sequence[Delivery]) -> None:
        # If this fails, they come back after their deadline.
        with suppress(KeywiseError):
            await self._give_back(deliveries)
