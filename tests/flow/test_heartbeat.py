"""Claims are kept alive in time, by the holder's own deadline, and their work stops at once when one is lost."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

import pytest
from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Advance, Claim, Commit, LeaseTerms, LedgerPolicy, Level, Phase, Position
from keywise.core.errors import UnavailableError
from keywise.flow.heartbeat import Heartbeat, HeartbeatThread
from keywise.testing.virtual_loop import VirtualLoop

LEASE_S, MARGIN_S, RUNTIME_MAX_S = 30.0, 2.0, 100.0


class CountingLedger(MemoryLedger):
    """A ledger that notes when it was asked to renew, and may be out of reach."""

    def __init__(self, database: MemoryDatabase) -> None:
        super().__init__(database, "test", LedgerPolicy(intents=True))
        self.renewals: list[tuple[float, list[str]]] = []
        self.is_away = False

    async def renew(self, claims: list[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        if self.is_away:
            raise UnavailableError("away")
        self.renewals.append((self.database.clock(), sorted(claim.key for claim in claims)))
        return await super().renew(claims, lease_s, phase)


class Holder:
    """One worker with a heartbeat, on virtual time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.now = loop.time
        self.ledger = CountingLedger(MemoryDatabase(clock=loop.time))
        self.lost: list[str] = []
        self.heartbeat = Heartbeat(
            lease_s=LEASE_S,
            margin_s=MARGIN_S,
            runtime_max_s=RUNTIME_MAX_S,
            clock=loop.time,
            lost=lambda claim: self.lost.append(claim.key),
        )

    async def take(self, *keys: str, owner: str = "w1", level: Level = Level.USUAL) -> list[Claim]:
        asked_at = self.now()
        terms = LeaseTerms(owner, LEASE_S, level)
        results = await self.ledger.claim([ChangeHeader(key, order_of(1)) for key in keys], terms)
        if owner == "w1":
            self.heartbeat.hold(results.granted, asked_at)
        return results.granted

    async def is_stopped_at(self, claims: list[Claim], limit_s: float = 1000.0) -> float:
        """When the heartbeat ends work that would go on for ever."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(limit_s):
                with self.heartbeat.limit(claims):
                    await asyncio.Event().wait()
        return self.now()


async def pass_s(seconds: float) -> None:
    """Let virtual time pass."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


def on_virtual_time(story: Callable[[Holder], Coroutine[Any, Any, None]]) -> None:
    loop, surprises = VirtualLoop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: surprises.append(context))

    async def tell() -> None:
        holder = Holder(loop)
        beating = loop.create_task(holder.heartbeat.run(holder.ledger))
        await story(holder)
        beating.cancel()

    loop.run_until_complete(tell())
    assert surprises == []


def test_the_own_deadline_is_counted_from_before_the_claim_was_sent():
    """Rule 7: the answer may have taken long, and the lease began at the ledger before it arrived."""

    async def story(holder: Holder) -> None:
        [claim] = await holder.take("a")
        holder.heartbeat.drop([claim])
        await pass_s(5.0)
        holder.heartbeat.hold([claim], 1.0)
        assert holder.heartbeat.left_s([claim]) == 1.0 + LEASE_S - MARGIN_S - 5.0

    on_virtual_time(story)


def test_a_claim_is_renewed_at_a_third_of_its_lease():
    """Rule 7: two renewals may fail before the lease is over."""

    async def story(holder: Holder) -> None:
        await holder.take("a", "b")
        await pass_s(LEASE_S + 1)
        assert holder.ledger.renewals == [(10.0, ["a", "b"]), (20.0, ["a", "b"]), (30.0, ["a", "b"])]
        assert (await holder.ledger.inspect("a")).lease_until == 30.0 + LEASE_S

    on_virtual_time(story)


def test_work_may_go_on_as_long_as_its_claim_is_renewed():
    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        with holder.heartbeat.limit(claims):
            await pass_s(RUNTIME_MAX_S - 1)
        assert holder.heartbeat.left_s(claims) > 0

    on_virtual_time(story)


def test_a_dropped_claim_is_not_renewed():
    async def story(holder: Holder) -> None:
        first, second = await holder.take("a", "b")
        holder.heartbeat.drop([first])
        holder.heartbeat.drop([first])
        await pass_s(11.0)
        assert holder.ledger.renewals == [(10.0, ["b"])]
        assert holder.heartbeat.left_s([first]) == 0.0
        assert holder.heartbeat.left_s([first, second]) == 0.0

    on_virtual_time(story)


def test_work_stops_at_the_own_deadline_if_the_ledger_is_out_of_reach():
    """Rule 7: an unreachable ledger changes nothing, the deadlines simply come nearer."""

    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        holder.ledger.is_away = True
        assert await holder.is_stopped_at(claims) == LEASE_S - MARGIN_S
        assert (holder.lost, holder.heartbeat.left_s(claims)) == ([], 0.0)

    on_virtual_time(story)


def test_a_ledger_that_comes_back_in_time_saves_the_claim():
    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        holder.ledger.is_away = True
        asyncio.get_running_loop().call_later(14.0, setattr, holder.ledger, "is_away", False)
        with holder.heartbeat.limit(claims):
            await pass_s(45.0)
        assert holder.ledger.renewals[0] == (15.0, ["a"])

    on_virtual_time(story)


def test_a_hung_holder_is_not_renewed_for_ever():
    """Rule 7: up to runtime_max, so that a hung one does not look alive for ever."""

    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        last_renewal = RUNTIME_MAX_S - 10.0
        assert await holder.is_stopped_at(claims) == last_renewal + LEASE_S - MARGIN_S
        assert holder.ledger.renewals[-1] == (last_renewal, ["a"])

    on_virtual_time(story)


def test_work_that_comes_to_new_positions_is_not_hung():
    """Rule 7: each position starts the longest runtime again, and failures before it count no more."""

    async def story(holder: Holder) -> None:
        seen = list[float]()
        holder.heartbeat.on_progress = lambda: seen.append(holder.now())
        [claim] = await holder.take("a")
        failed = replace(claim, attempts=3, crashes=1, level=Level.ALONE)
        holder.heartbeat.drop([claim])
        holder.heartbeat.hold([failed], 0.0)
        with holder.heartbeat.limit([failed]):
            for place in range(1, 5):
                await pass_s(RUNTIME_MAX_S - 1.0)
                one = Advance(holder.heartbeat.current(failed), Position(place))
                assert await holder.ledger.advance([one]) == []
                holder.heartbeat.advanced([one])
        after = holder.heartbeat.current(failed)
        assert (after.position, after.attempts, after.crashes, after.level) == (Position(4), 0, 0, Level.USUAL)
        assert seen == [99.0, 198.0, 297.0, 396.0]
        assert holder.lost == []
        holder.heartbeat.drop([after])
        assert holder.heartbeat.current(failed) is failed

    on_virtual_time(story)


def test_work_that_has_come_to_a_position_and_hangs_then_loses_its_claim():
    """Rule 7: only a new position starts the longest runtime again."""

    async def story(holder: Holder) -> None:
        [claim] = await holder.take("a")
        with pytest.raises(TimeoutError), holder.heartbeat.limit([claim]):
            await pass_s(50.0)
            holder.heartbeat.advanced([Advance(claim, Position(1))])
            await asyncio.Event().wait()
        assert 50.0 + RUNTIME_MAX_S < holder.now() < 50.0 + RUNTIME_MAX_S + LEASE_S

    on_virtual_time(story)


def test_a_call_that_an_outage_ended_early_was_cut_off():
    """Rule 22: the change is not to blame, because its claim would have been renewed."""

    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        asyncio.get_running_loop().call_later(35.0, setattr, holder.ledger, "is_away", True)
        assert await holder.is_stopped_at(claims) == 30.0 + LEASE_S - MARGIN_S
        assert holder.heartbeat.is_cut_off(claims)

    on_virtual_time(story)


def test_the_beginning_of_another_change_does_not_hide_that_renewals_get_no_answer():
    """The thread that renews has a connection of its own; the change is not to blame if only that one is silent."""

    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        holder.ledger.is_away = True
        stopped = asyncio.ensure_future(holder.is_stopped_at(claims))
        await pass_s(LEASE_S - MARGIN_S - 0.1)
        [other] = await holder.take("b")
        assert await holder.heartbeat.begin(CountingLedger(holder.ledger.database), other)
        await stopped
        assert holder.heartbeat.is_cut_off(claims)

    on_virtual_time(story)


def test_a_hung_call_was_not_cut_off_by_an_outage():
    """Rule 22: it ran for longer than runtime_max, so it would have lost its claim anyway: it costs an attempt."""

    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        asyncio.get_running_loop().call_later(RUNTIME_MAX_S - 15.0, setattr, holder.ledger, "is_away", True)
        last_renewal = RUNTIME_MAX_S - 20.0
        assert await holder.is_stopped_at(claims) == last_renewal + LEASE_S - MARGIN_S > RUNTIME_MAX_S
        assert not holder.heartbeat.is_cut_off(claims)

    on_virtual_time(story)


def test_a_lost_claim_cancels_what_runs_under_it_at_once():
    """Refused: the holder stops at once, and is told."""

    async def story(holder: Holder) -> None:
        [claim] = await holder.take("a")
        await holder.ledger.release([claim])
        await holder.take("a", owner="w2")
        assert await holder.is_stopped_at([claim]) == 10.0
        assert holder.lost == ["a"]

    on_virtual_time(story)


def test_a_lost_claim_does_not_stop_the_work_of_others():
    async def story(holder: Holder) -> None:
        lost, kept = await holder.take("a", "b")
        await holder.ledger.release([lost])
        with holder.heartbeat.limit([kept]):
            await pass_s(50.0)
        assert holder.lost == ["a"]

    on_virtual_time(story)


def test_a_claim_that_is_lost_while_nothing_runs_is_told_too():
    async def story(holder: Holder) -> None:
        [claim] = await holder.take("a")
        await holder.ledger.release([claim])
        await pass_s(11.0)
        assert holder.lost == ["a"]
        with pytest.raises(TimeoutError, match="the claim has ended"), holder.heartbeat.limit([claim]):
            raise AssertionError("nothing may begin under a lost claim")

    on_virtual_time(story)


def test_a_claim_that_is_committed_while_it_is_renewed_is_not_told_as_lost():
    async def story(holder: Holder) -> None:
        ending, other = await holder.take("a", "b")
        holder.heartbeat.end([ending])
        await holder.ledger.commit([Commit(ending), Commit(other)])
        await pass_s(11.0)
        assert holder.lost == ["b"], "nobody had said that it was about to end"

    on_virtual_time(story)


def test_nothing_begins_after_the_deadline():
    """Rule 7: before dispatch too."""

    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        holder.ledger.is_away = True
        await pass_s(LEASE_S)
        with pytest.raises(TimeoutError, match="the claim has ended"):
            holder.heartbeat.check(claims)
        with pytest.raises(TimeoutError, match="the claim has ended"):
            holder.heartbeat.check([])

    on_virtual_time(story)


def test_work_that_ends_in_time_is_not_disturbed_afterwards():
    async def story(holder: Holder) -> None:
        claims = await holder.take("a")
        with holder.heartbeat.limit(claims):
            await pass_s(1.0)
        await holder.ledger.release(claims)
        await pass_s(100.0)
        assert holder.lost == ["a"]

    on_virtual_time(story)


def test_work_begins_with_a_renewal_that_the_ledger_remembers():
    """Rule 18: only work that has begun can be blamed for a death."""

    async def story(holder: Holder) -> None:
        [claim] = await holder.take("a", level=Level.ALONE)
        assert (await holder.ledger.inspect("a")).phase is Phase.CLAIMED
        assert await holder.heartbeat.begin(holder.ledger, claim)
        assert (await holder.ledger.inspect("a")).phase is Phase.BEGUN

    on_virtual_time(story)


def test_work_does_not_begin_without_its_renewal():
    """Rule 18: a death that the ledger cannot blame on anybody must not happen."""

    async def story(holder: Holder) -> None:
        away, lost, dropped = await holder.take("a", "b", "c")
        holder.ledger.is_away = True
        assert not await holder.heartbeat.begin(holder.ledger, away)
        holder.ledger.is_away = False
        await holder.ledger.release([lost])
        assert not await holder.heartbeat.begin(holder.ledger, lost)
        holder.heartbeat.drop([dropped])
        assert not await holder.heartbeat.begin(holder.ledger, dropped)

    on_virtual_time(story)


class Bell:
    """A clock of a few milliseconds, for the thread that beats by itself."""

    def __init__(self) -> None:
        self.renewed = threading.Event()
        self.connected = threading.Event()
        self.left = threading.Event()
        self.threads: set[str] = set()
        self.refusals: list[Exception] = []


class RingingLedger:
    """Rings when it is renewed, from whichever thread."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell

    async def __aenter__(self) -> Self:
        if self._bell.refusals:
            raise self._bell.refusals.pop()
        self._bell.connected.set()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._bell.left.set()

    async def renew(self, claims: list[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        self._bell.threads.add(threading.current_thread().name)
        self._bell.renewed.set()
        return claims


async def beat_in_a_thread(bell: Bell, seen: list[str]) -> None:
    loop = asyncio.get_running_loop()
    heartbeat = Heartbeat(
        lease_s=0.03, margin_s=0.001, runtime_max_s=60.0, clock=loop.time, lost=lambda claim: seen.append(claim.key)
    )
    heartbeat.hold([Claim("a", order_of(1), False, token=7)], loop.time())
    thread = HeartbeatThread(heartbeat, lambda: RingingLedger(bell))
    thread.start()
    try:
        # The event loop is busy all the while, and the thread renews all the same.
        assert bell.renewed.wait(20)
        async with asyncio.timeout(20):
            while not seen:
                await loop.run_in_executor(None, bell.renewed.wait, 0.01)
    finally:
        thread.stop()


@pytest.mark.parametrize("refusals", [[], [UnavailableError("not yet")] * 2, [RuntimeError("a bug")]])
def test_a_heartbeat_thread_renews_from_a_thread_of_its_own_while_the_loop_is_busy(refusals: list[Exception]):
    """Rule 7: a busy event loop does not look dead, and a ledger that fails at first is tried again."""
    bell, seen = Bell(), list[str]()
    bell.refusals = list(refusals)
    asyncio.run(beat_in_a_thread(bell, seen))
    assert (bell.threads, seen) == ({"keywise-heartbeat"}, ["a"])
    assert bell.left.is_set(), "the thread closes what it has opened"
    assert "keywise-heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_news_of_a_lost_claim_do_not_reach_a_loop_that_is_closed():
    loop = VirtualLoop()
    holder = Holder(loop)
    [claim] = loop.run_until_complete(holder.take("a"))
    loop.run_until_complete(holder.ledger.release([claim]))
    loop.close()
    asyncio.run(holder.heartbeat.beat(holder.ledger))
    assert (holder.lost, holder.heartbeat.left_s([claim])) == ([], 0.0)
