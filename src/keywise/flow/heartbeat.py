"""The heartbeat: it renews the claims of a consumer in time, and cancels a sink call at once when its claim is lost."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from keywise.core.clock import Clock
from keywise.core.entry import Advance, Claim, Phase
from keywise.core.errors import UnavailableError
from keywise.core.ledger import Ledger

ROUNDING_S = 1e-6
"""A timer that is set for a deadline may fire this much before it, because floats are rounded."""


class HeldClaim:
    """A claim that this process holds, with its deadline by the clock of this process."""

    __slots__ = ("call", "claim", "deadline", "has_begun", "is_ending", "started")

    def __init__(self, claim: Claim, started: float, deadline: float) -> None:
        self.claim = claim
        self.started = started
        """When its sink call began, or came to its last position; before that, when the claim was requested."""
        self.has_begun = False
        self.deadline = deadline
        self.call: SinkCall | None = None
        """The call that runs under this claim, and perhaps under others too."""
        self.is_ending = False
        """A commit has been sent to the ledger; its answer, and not a renewal, decides whether the claim is lost."""


class SinkCall:
    """A call of a sink or handlers, which must end as soon as the first of its claims ends: then it is cancelled.

    It works as `asyncio.timeout` does, but all calls share one timer, which costs a fast handler much less.
    """

    __slots__ = ("_calls", "_cancelling", "_task", "deadline", "held", "is_exclusive", "is_expired")

    def __init__(self, calls: "CallTimer", held: list[HeldClaim], deadline: float, *, is_exclusive: bool) -> None:
        self._calls = calls
        self.held = held
        self.deadline = deadline
        self.is_exclusive = is_exclusive
        self.is_expired = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None, "a call runs in a task"
        self._cancelling = self._task.cancelling()
        self._calls.add(self)
        for one in self.held:
            one.call = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._calls.discard(self)
        for one in self.held:
            one.call = None
        if self.is_expired and self._task is not None:
            # Cancelled by nothing but this limit. The caller's own cancellation, if there is one too, goes on.
            is_alone = self._task.uncancel() <= self._cancelling
            if is_alone and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise TimeoutError("the claim has ended") from error

    def expire(self) -> None:
        """Cancel the call, once."""
        if not self.is_expired and self._task is not None:
            self.is_expired = True
            self._task.cancel()


class CallTimer:
    """One timer for all calls: it wakes at the earliest deadline that it knows of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: dict[SinkCall, None] = {}
        """In the order in which they began, so that those that end together always end in the same order."""
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def add(self, call: SinkCall) -> None:
        self._calls[call] = None
        self.wake_at(call.deadline)

    def discard(self, call: SinkCall) -> None:
        self._calls.pop(call, None)

    def wake_at(self, deadline: float) -> None:
        """Look at the calls at a deadline, or before it."""
        if deadline >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self._wake)

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        limit = self._clock() + ROUNDING_S
        for call in [*self._calls]:
            if call.deadline <= limit:
                # Not at once: after a pause of this process, a renewal is overdue too, and has to begin first. If it
                # gets no answer, the ledger is to blame for the end of the claim, and not the change.
                asyncio.get_running_loop().call_soon(self._expire, call)
            else:
                self.wake_at(call.deadline)

    def _expire(self, call: SinkCall) -> None:
        if call in self._calls:
            call.expire()


class Heartbeat:
    """The claims that a consumer holds, and their renewal after each third of the lease.

    Each deadline is computed here, by the clock of this process, and is never read back from the ledger.
    Work that runs for longer than `runtime_max_s`, and comes to no new position meanwhile, is no longer renewed, so
    that a hung handler loses its key.
    """

    def __init__(
        self, *, lease_s: float, margin_s: float, runtime_max_s: float, clock: Clock, lost: Callable[[Claim], None]
    ) -> None:
        self._lease_s = lease_s
        self.rhythm_s = lease_s / 3
        self._answer_s = self.rhythm_s / 2
        """Half a beat, so that two unanswered renewals in a row still leave time for a third before the deadline."""
        self._margin_s = margin_s
        self._runtime_max_s = runtime_max_s
        self._clock = clock
        self._lost = lost
        self._held: dict[int, HeldClaim] = {}
        self._begun_at = -math.inf
        """When the latest call under any of the claims began."""
        self._calls = CallTimer(clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.has_progress = False
        """Whether any work has come to a position since the start. Most pipelines have none, and need not look."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called after work has come to a new position."""
        self._is_unanswered = False
        """A beat is under way, or the last one got no answer. `begin` and `accompany` may use another connection."""

    def hold(self, claims: Iterable[Claim], asked_at: float) -> None:
        """Start to renew these claims.

        `asked_at` is a reading of the clock from before the claim was sent, so that the deadline computed from it
        never lies after the ledger's own.
        """
        self._loop = asyncio.get_running_loop()
        deadline = self._deadline(asked_at)
        for claim in claims:
            self._held[claim.token] = HeldClaim(claim, asked_at, deadline)

    def end(self, claims: Iterable[Claim]) -> None:
        """Announce that the claims are being committed. A renewal that arrives later finds them gone, but not lost."""
        for claim in claims:
            if (one := self._held.get(claim.token)) is not None:
                one.is_ending = True

    def advanced(self, advances: Iterable[Advance]) -> None:
        """Note positions that the ledger has accepted: the work is not hung, and failures before it count no more."""
        self.has_progress, now = True, self._clock()
        for one in advances:
            if (held := self._held.get(one.claim.token)) is not None:
                held.claim, held.started = one.claim_after, now
        self.on_progress()

    def current(self, claim: Claim) -> Claim:
        """Return a claim as it is since its last position."""
        return held.claim if (held := self._held.get(claim.token)) is not None else claim

    def drop(self, claims: Iterable[Claim]) -> None:
        """Stop renewing these claims. Dropping a claim twice does nothing."""
        drop = self._held.pop
        for claim in claims:
            drop(claim.token, None)

    def holds(self, claim: Claim) -> bool:
        """Whether a claim is neither dropped nor known to be lost."""
        return claim.token in self._held

    def left_s(self, claims: Iterable[Claim]) -> float:
        """Seconds until the first of these claims ends; zero or less if one of them has ended or is lost."""
        now = self._clock()
        return min((self._left_s(claim, now) for claim in claims), default=0.0)

    def has_ended(self, claim: Claim) -> bool:
        """Whether a claim has ended or is lost."""
        return (held := self._held.get(claim.token)) is None or held.deadline <= self._clock()

    def check(self, claims: Iterable[Claim]) -> None:
        """Raise TimeoutError if one of these claims has ended."""
        if self.left_s(claims) <= 0:
            raise TimeoutError("the claim has ended")

    def is_cut_off(self, claims: Sequence[Claim]) -> bool:
        """Whether these claims have ended only because the ledger could not be reached to renew them.

        The change is not to blame then, so the caller does not count an attempt.
        """
        now = self._clock()
        held = [self._held.get(claim.token) for claim in claims]
        young = all(one is not None and self._is_young(one, now) for one in held)
        return self._is_unanswered and young and self.left_s(claims) <= ROUNDING_S

    def limit(self, claims: Sequence[Claim], *, is_exclusive: bool = False) -> SinkCall:
        """Cancel the body with a TimeoutError when the first of these claims ends or is lost.

        Each renewal moves the deadline on. An exclusive body keeps everybody from writing to the ledger: its claims
        cannot be renewed meanwhile, and cannot be taken over, so it may take as long as renewed ones.
        """
        now, held = self._clock(), [one for claim in claims if (one := self._held.get(claim.token)) is not None]
        deadline = min([one.deadline for one in held], default=now)
        if len(held) < len(claims) or deadline <= now:
            raise TimeoutError("the claim has ended")
        self._begun_at = now
        for one in held:
            one.started, one.has_begun, one.is_ending = now, True, False
        return SinkCall(
            self._calls, held, now + self._runtime_max_s if is_exclusive else deadline, is_exclusive=is_exclusive
        )

    async def run(self, ledger: Ledger) -> None:
        """Renew until cancelled. After a renewal without an answer the next one follows soon."""
        while True:
            await asyncio.sleep(self.rhythm_s / 8 if self._is_unanswered else self.rhythm_s)
            await self.beat(ledger)

    async def beat(self, ledger: Ledger) -> None:
        """Renew all claims once. If the ledger cannot be reached, the deadlines stay as they are and draw nearer."""
        # A copy: in a thread of its own, this runs while the consumer adds and drops claims.
        now = self._clock()
        held = {token: one for token, one in self._held.copy().items() if self._is_young(one, now)}
        if held:
            self._is_unanswered = True
            self._is_unanswered = await self._renew(ledger, held) is None

    async def begin(self, ledger: Ledger, claim: Claim) -> bool:
        """Note in the ledger that work under a claim begins; False if the work must not begin.

        Only then can the death of this process be attributed to the change.
        """
        return await self._note(ledger, claim, Phase.BEGUN)

    async def accompany(self, ledger: Ledger, claim: Claim) -> bool:
        """Note in the ledger that other changes are about to run beside one that ran alone; False if they must not."""
        return await self._note(ledger, claim, Phase.ACCOMPANIED)

    async def _note(self, ledger: Ledger, claim: Claim, phase: Phase) -> bool:
        held = self._held.get(claim.token)
        return held is not None and bool(await self._renew(ledger, {claim.token: held}, phase))

    async def _renew(self, ledger: Ledger, held: dict[int, HeldClaim], phase: Phase = Phase.CLAIMED) -> bool | None:
        """Renew these claims; return whether all of them are still held, or None without an answer."""
        asked_at = self._clock()  # Before the call: the ledger extends the leases later than this.
        try:
            # A connection can be silent for ever. The cancelled ledger gives it up, and uses another one next time.
            async with asyncio.timeout(self._answer_s):
                lost = await ledger.renew([one.claim for one in held.values()], self._lease_s, phase)
        except (UnavailableError, TimeoutError):
            return None
        for claim in lost:
            one = held.pop(claim.token)
            # A claim that was dropped or is being committed meanwhile was not taken by another worker.
            if self._held.pop(claim.token, None) is not None and not one.is_ending:
                self._notify(self._lose, one)
        for one in held.values():
            one.deadline = self._deadline(asked_at)
            self._notify(self._move, one)
        return not lost

    def _is_young(self, one: HeldClaim, now: float) -> bool:
        """Whether a claim may still be renewed.

        A claim whose work has not begun waits for a free worker. It may wait for as long as the work that began last
        can take, and for one lease more.
        """
        if one.has_begun:
            return now - one.started < self._runtime_max_s
        return now - max(one.started, self._begun_at) < self._runtime_max_s + self._lease_s

    def _left_s(self, claim: Claim, now: float) -> float:
        held = self._held.get(claim.token)
        return held.deadline - now if held is not None else 0.0

    def _deadline(self, asked_at: float) -> float:
        return asked_at + self._lease_s - self._margin_s

    def _notify(self, act: Callable[[HeldClaim], None], held: HeldClaim) -> None:
        """Run `act` on the consumer's event loop: this code may run in the heartbeat thread."""
        assert self._loop is not None, "nothing is held before a loop runs"
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(act, held)

    def _lose(self, held: HeldClaim) -> None:
        """Report a lost claim, and cancel the call that runs under it."""
        self._lost(held.claim)
        if held.call is not None:
            held.call.expire()

    def _move(self, held: HeldClaim) -> None:
        """Move the deadline of a call to the earliest one of its claims."""
        call = held.call
        if call is not None and not call.is_exclusive:
            call.deadline = min(one.deadline for one in call.held)
            self._calls.wake_at(call.deadline)


CANCEL_AGAIN_S = 1.0


class HeartbeatThread:
    """Runs a heartbeat in its own thread and over its own ledger connection.

    A handler that blocks the event loop then does not keep the claims from being renewed.
    """

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
        """Stop the thread, and wait until it has ended."""
        assert self._task is not None, "start comes before stop"
        while self._thread.is_alive():
            with suppress(RuntimeError):  # The loop has been closed meanwhile.
                self._loop.call_soon_threadsafe(self._task.cancel)
            # Cancelled again if need be: a call that times out at the same moment swallows a cancellation.
            self._thread.join(CANCEL_AGAIN_S)

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
                # Connect again after any error: without renewals, all claims would be lost.
                # The consumer runs into the same error on its own connection, and reports it.
                await asyncio.sleep(self._heartbeat.rhythm_s / 4)
