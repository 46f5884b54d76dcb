"""The serial claims that a process holds: their tokens, and what is needed to run each request."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from keywise.core.failures import storable
from keywise.core.serial.contract import Ending, Reply, Turn
from keywise.core.serial.rules import CALLER_GONE, TOO_LATE


class Due:
    """A turn that this process has, with what is needed to run it."""

    __slots__ = ("argument", "is_running", "is_wanted", "turn", "until", "verdict")

    def __init__(self, turn: Turn, argument: Any, until: float, is_wanted: Callable[[], bool]) -> None:
        self.turn = turn
        self.argument = argument
        """What the function is called with; None: it is read from the body."""
        self.until = until
        """When it has to be over, by the loop's clock."""
        self.is_wanted = is_wanted
        """Whether anybody waits for it still."""
        self.is_running = False
        """The function is at it, or was broken off at it."""
        self.verdict: Reply | None = None
        """What stands although its transaction does not: it must not run again."""

    def departure(self) -> Reply | None:
        """What it ends with if it must not begin any more."""
        if self.verdict is not None:
            return self.verdict
        if asyncio.get_running_loop().time() >= self.until:
            return reply_to(self, Ending.EXPIRED, TOO_LATE)
        return None if self.is_wanted() else reply_to(self, Ending.EXPIRED, CALLER_GONE)


class Held:
    """A token of this process, and what runs under it."""

    __slots__ = ("_left_s", "bundle", "is_lost", "left", "timeout", "token", "unanswered")

    def __init__(self, dues: Sequence[Due], left_s: Callable[[], float]) -> None:
        self.left = deque(dues)
        """Those without a reply."""
        self._left_s = left_s
        self.token = dues[0].turn.token
        self.unanswered = len(dues)
        self.is_lost = False
        self.timeout: asyncio.Timeout | None = None
        self.bundle = Bundle([self])

    def may_begin(self) -> bool:
        """Whether the token can still be counted on; who was stopped for long may not know yet that it is lost."""
        self.is_lost = self.is_lost or self._left_s() <= 0
        return not self.is_lost

    def lose(self) -> None:
        """Break off what runs."""
        self.is_lost = True
        self.cut()

    def cut(self) -> None:
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())


class Bundle:
    """Tokens whose turns are run one after another, in one transaction if that can be."""

    __slots__ = ("helds", "is_parted", "over", "unanswered")

    def __init__(self, helds: Sequence[Held]) -> None:
        self.helds = helds
        self.unanswered = sum(held.unanswered for held in helds)
        self.is_parted = False
        self.over = asyncio.Event()
        """Nothing is shared any more."""

    async def part(self) -> None:
        """Break off what runs, to run each alone: a call from within must not wait for those who wait for its end."""
        self.is_parted = True
        for held in self.helds:
            held.cut()
        await self.over.wait()


company: ContextVar[Bundle | None] = ContextVar("company", default=None)
"""Those with whom the running code shares a transaction."""


async def be_alone() -> None:
    """To be awaited by whoever is going to wait for a turn."""
    bundle = company.get()
    if bundle is not None and not bundle.over.is_set():
        await bundle.part()


class Holds:
    """All tokens of this process, each with the replies that it still owes."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._helds: dict[int, Held] = {}
        self._bundles: set[Bundle] = set()
        self._resting: Counter[Bundle] = Counter()
        """Those that wait for other turns, and for how many."""

    def __bool__(self) -> bool:
        return bool(self._helds)

    def tokens(self) -> list[int]:
        return list(self._helds)

    def add(self, bundle: Bundle) -> None:
        self._bundles.add(bundle)
        for held in bundle.helds:
            held.bundle = bundle
            self._helds[held.token] = held

    def free(self, replies: Sequence[Reply] = ()) -> int:
        """How many more bundles can be run side by side, once these replies are stored."""
        resting = sum(bundle in self._bundles for bundle in self._resting)
        ends = Counter(self._helds[reply.token].bundle for reply in replies if reply.token in self._helds)
        ended = sum(bundle.unanswered == ends[bundle] for bundle in ends)
        # Those who have rested go on at once, so that there may be more than there should be.
        return max(0, self._concurrency - len(self._bundles) + resting + ended)

    @contextmanager
    def resting(self, tokens: Sequence[int]) -> Iterator[None]:
        """Who holds them waits for another turn meanwhile, which must not wait for the room that it takes up."""
        bundles = {self._helds[token].bundle for token in tokens if token in self._helds}
        self._resting.update(bundles)
        try:
            yield
        finally:
            self._resting -= Counter(bundles)

    def end(self, token: int) -> None:
        """One of its turns is answered, or refused."""
        held = self._helds.get(token)
        if held is not None:
            held.unanswered -= 1
            held.bundle.unanswered -= 1
            if held.unanswered == 0:
                del self._helds[token]
            if held.bundle.unanswered == 0:
                self._bundles.discard(held.bundle)

    def lose(self, tokens: Sequence[int]) -> None:
        """Break off what runs under them."""
        for token in tokens:
            if token in self._helds:
                self._helds[token].lose()


def known_or(due: Due, outcome: Ending, cause: str) -> Reply:
    """What is known of it already, though it could not be stored then; otherwise this."""
    return due.verdict or reply_to(due, outcome, cause)


def reply_to(due: Due, outcome: Ending, cause: str) -> Reply:
    return Reply(id=due.turn.request.id, outcome=outcome, cause=storable(cause), token=due.turn.token)
