"""Keeps claims alive: renews them in time, and stops their work at once when one is lost."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from keywise.core.clock import Clock
from keywise.core.entry import Claim
from keywise.core.errors import UnavailableError
from keywise.core.ledger import Ledger

ROUNDING_S = 1e-6
"""A timer that was set for a deadline may go off this much before it, by the rounding of floats."""


class HeldClaim:
    """A claim that this process holds, with the deadline by its own clock."""

    __slots__ = ("call", "claim", "deadline", "has_begun", "is_ending", "started")

    def __init__(self, claim: Claim, started: float, deadline: float) -> None:
        self.claim = claim
        self.started = started
        """When its work began; before that, when it was asked for."""
        self.has_begun = False
        self.deadline = deadline
        self.call: SinkCall | None = None
        """What runs under this claim, and perhaps under others."""
        self.is_ending = False
        """The ledger is being told what became of it, and answers whether it was lost."""


class SinkCall:
    """A call that ends with the first of its claims."""

    __slots__ = ("held", "is_lost", "timeout")

    def __init__(self, timeout: asyncio.Timeout, held: list[HeldClaim]) -> None:
        self.timeout = timeout
        self.held = held
        self.is_lost = False


class Heartbeat:
    """All claims that a consumer holds. Renews at a third of the lease; a hung holder is not renewed for ever."""

    def __init__(
        self, *, lease_s: float, margin_s: float, runtime_max_s: float, clock: Clock, lost: Callable[[Claim], None]
    ) -> None:
        self._lease_s = lease_s
        self.rhythm_s = lease_s / 3
        self._margin_s = margin_s
        self._runtime_max_s = runtime_max_s
        self._clock = clock
        self._lost = lost
        self._held: dict[int, HeldClaim] = {}
        self._begun_at = -math.inf
        """When work under any of them began last."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_unanswered = False
        """A renewal is on its way, or the last one had no answer."""

    def hold(self, claims: Iterable[Claim], asked_at: float) -> None:
        """Begin to renew. `asked_at` was read before the claim was sent, so the own deadline is never too late."""
        self._loop = asyncio.get_running_loop()
        for claim in claims:
            self._held[claim.token] = HeldClaim(claim, asked_at, self._deadline(asked_at))

    def end(self, claims: Iterable[Claim]) -> None:
        """The ledger is being told what became of them: a renewal that comes after it finds them gone, not lost."""
        for claim in claims:
            if (one := self._held.get(claim.token)) is not None:
                one.is_ending = True

    def drop(self, claims: Iterable[Claim]) -> None:
        """Renew no more; dropping a claim twice does nothing."""
        for claim in claims:
            self._held.pop(claim.token, None)

    def left_s(self, claims: Iterable[Claim]) -> float:
        """How long all of these may still be worked under; not above zero once one of them is lost."""
        now = self._clock()
        return min((self._left_s(claim, now) for claim in claims), default=0.0)

    def check(self, claims: Iterable[Claim]) -> None:
        """Raise TimeoutError if nothing may be done under these claims any more."""
        if self.left_s(claims) <= 0:
            raise TimeoutError("the claim has ended")

    def is_cut_off(self, claims: Sequence[Claim]) -> bool:
        """Whether these claims have ended only because the ledger could not be reached to renew them."""
        now = self._clock()
        held = [self._held.get(claim.token) for claim in claims]
        young = all(one is not None and self._is_young(one, now) for one in held)
        return self._is_unanswered and young and self.left_s(claims) <= ROUNDING_S

    @asynccontextmanager
    async def limit(self, claims: Sequence[Claim]) -> AsyncIterator[None]:
        """Cancel what runs inside, with a TimeoutError, when these claims end or one of them is lost."""
        if (left_s := self.left_s(claims)) <= 0:
            raise TimeoutError("the claim has ended")
        async with asyncio.timeout(left_s) as timeout:
            held = [one for claim in claims if (one := self._held.get(claim.token)) is not None]
            call = SinkCall(timeout, held)
            self._begun_at = self._clock()
            for one in held:
                one.call, one.started, one.has_begun = call, self._begun_at, True
            try:
                yield
            finally:
                for one in held:
                    one.call = None

    async def run(self, ledger: Ledger) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self.rhythm_s)
            await self.beat(ledger)

    async def beat(self, ledger: Ledger) -> None:
        """Renew once. An unreachable ledger changes nothing: the deadlines simply come nearer."""
        now = self._clock()
        held = {token: one for token, one in self._held.copy().items() if self._is_young(one, now)}
        if held:
            await self._renew(ledger, held)

    async def begin(self, ledger: Ledger, claim: Claim) -> bool:
        """Renew one claim before its work begins, so that the ledger knows that it has; False if it must not."""
        held = self._held.get(claim.token)
        return held is not None and await self._renew(ledger, {claim.token: held})

    async def _renew(self, ledger: Ledger, held: dict[int, HeldClaim]) -> bool:
        """Whether all of them are still held."""
        asked_at = self._clock()
        self._is_unanswered = True
        try:
            lost = await ledger.renew([one.claim for one in held.values()], self._lease_s)
        except UnavailableError:
            return False
        self._is_unanswered = False
        for claim in lost:
            one = held.pop(claim.token)
            if self._held.pop(claim.token, None) is not None and not one.is_ending:
                self._notify(self._lose, one)
        for one in held.values():
            one.deadline = self._deadline(asked_at)
            self._notify(self._move, one)
        return not lost

    def _is_young(self, one: HeldClaim, now: float) -> bool:
        """Whether it may be renewed. What waits for a worker may wait until the work that began last has had to end."""
        if one.has_begun:
            return now - one.started < self._runtime_max_s
        return now - max(one.started, self._begun_at) < self._runtime_max_s + self._lease_s

    def _left_s(self, claim: Claim, now: float) -> float:
        held = self._held.get(claim.token)
        return held.deadline - now if held is not None else 0.0

    def _deadline(self, asked_at: float) -> float:
        return asked_at + self._lease_s - self._margin_s

    def _notify(self, act: Callable[[HeldClaim], None], held: HeldClaim) -> None:
        """Act on the consumer's loop: this may be another thread."""
        assert self._loop is not None, "nothing is held before a loop runs"
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(act, held)

    def _lose(self, held: HeldClaim) -> None:
        self._lost(held.claim)
        if held.call is not None and not held.call.timeout.expired():
            held.call.is_lost = True
            held.call.timeout.reschedule(asyncio.get_running_loop().time())

    def _move(self, held: HeldClaim) -> None:
        call = held.call
        if call is None or call.is_lost or call.timeout.expired():
            return
        left_s = min(one.deadline for one in call.held) - self._clock()
        call.timeout.reschedule(asyncio.get_running_loop().time() + max(0.0, left_s))


class HeartbeatThread:
    """A thread of its own for a heartbeat, so that a busy event loop does not look dead."""

    def __init__(self, heartbeat: Heartbeat, connect: Callable[[], Ledger]) -> None:
        self._heartbeat = heartbeat
        self._connect = connect
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name="keywise-heartbeat", daemon=True)

    def start(self) -> None:
        self._task = self._loop.create_task(self._beat())
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it."""
        assert self._task is not None, "start comes before stop"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._task or self._beat())
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _beat(self) -> None:
        while True:
            try:
                async with self._connect() as ledger:
                    await self._heartbeat.run(ledger)
            except Exception:
                # Without renewals the claims would be lost; whatever is wrong, the consumer meets it too and says so.
                await asyncio.sleep(self._heartbeat.rhythm_s / 4)
