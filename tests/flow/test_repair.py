"""Suspect keys are put right from the source of truth: when, how, and what happens if that goes wrong."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pydantic
import pytest
from msgspec.structs import replace

from causes import said
from flow.rig import LEASED, Rig, Running
from flow.test_consumer import page
from flow.unreachable_adapters import Unreachable
from keywise.adapters.memory.origin import MemoryOrigin
from keywise.core import events
from keywise.core.change import Change, ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.entry import Claim, Commit, LeaseTerms, Level, Phase
from keywise.core.errors import TransientError
from keywise.flow.refetch import from_origin
from keywise.flow.repair import Repairer
from keywise.operate.waiting import running_heartbeat

HORIZON_S, REPAIR_S = 40.0, 10.0
NEXT_LOOK_S = HORIZON_S + 2 * REPAIR_S


class Ward(Rig):
    """A plain store with one suspect key, `a`, whose truth a test decides."""

    def __init__(self, refetch: Callable[[str], Any] | None, *, version: int | None = 5, **settings: Any) -> None:
        super().__init__(LEASED, horizon_s=HORIZON_S, repair_s=REPAIR_S, **settings)
        self.refetch = refetch
        self.asked: list[tuple[float, str]] = []
        if refetch is not None:
            self.refetch = lambda key: self.asked.append((self.loop.time(), key)) or refetch(key)
        self._version = version

    async def fall_ill(self) -> None:
        """Commit a version, then write something else under a claim that is lost."""
        if self._version is not None:
            await self.work(page("a", self._version))
        stranger = Claim("a", order_of(1), False, token=99)
        self.sink.write(Change("a", order_of(1)), token=99)
        assert await self.ledger.commit([Commit(stranger)]) == [stranger]
        assert self.entry("a").suspicions == 1

    def nurse(self, seconds: float) -> None:
        """Fall ill, and let a consumer run for a while."""

        async def story() -> None:
            await self.fall_ill()
            async with Running(self):
                await self.pass_s(seconds)

        self.play(story())

    @property
    def causes(self) -> list[str]:
        return [said(event.cause) for event in self.of(events.Failed)]


def test_a_key_that_became_suspect_again_since_it_was_looked_for_waits_for_the_horizon():
    """What made it suspect may still land, after the truth and unnoticed."""
    ward = Ward(lambda key: {"id": key, "v": 5, "text": "true"})

    async def story() -> None:
        await ward.fall_ill()
        await ward.pass_s(HORIZON_S)
        await ward.ledger.mark_suspect([ChangeHeader("a", order_of(4))])
        pipeline = ward.pipeline()
        async with running_heartbeat(pipeline) as heartbeat:
            causes = await Repairer(pipeline, heartbeat).run(["a"])
        assert causes == {"a": "the key became suspect again; its repair waits for the horizon again"}
        assert ward.entry("a").suspicions == 2

    ward.play(story())


def test_a_repair_begins_only_when_it_reads_the_truth():
    """On probation, a key that is only given back must not count as one more that did no harm."""
    ward = Ward(lambda key: {"id": key, "v": 5, "text": "true"})
    begun: list[str] = []

    async def story() -> None:
        await ward.fall_ill()
        pipeline = ward.pipeline()
        async with running_heartbeat(pipeline) as heartbeat:
            for moment in ("too early", "after the horizon"):
                claim = await Repairer(pipeline, heartbeat).claim("a", Level.USUAL)
                assert isinstance(claim, Claim)
                await Repairer(pipeline, heartbeat).run_under(claim, partial(begun.append, moment))
                await ward.pass_s(HORIZON_S)

    ward.play(story())
    assert begun == ["after the horizon"]


def test_a_suspect_key_is_written_again_from_the_truth_after_the_horizon():
    """A call of the earlier holder may land until then; repair waits so long."""
    ward = Ward(lambda key: {"id": key, "v": 5, "text": "true"})
    ward.nurse(NEXT_LOOK_S)
    assert [key for _, key in ward.asked] == ["a"]
    assert ward.asked[0][0] >= HORIZON_S
    assert ward.written == [("a", 5), ("a", 1), ("a", 5)]
    assert b"true" in ward.sink.stored["a"].body
    assert [event.key for event in ward.of(events.Repaired)] == ["a"]
    assert (ward.entry("a").suspicions, ward.entry("a").mark, ward.entry("a").token) == (0, order_of(5), 0)


def test_nothing_is_repaired_before_the_horizon():
    ward = Ward(lambda key: {"id": key, "v": 5})
    ward.nurse(HORIZON_S - 5.0)
    assert (ward.asked, ward.entry("a").suspicions) == ([], 1)


def test_without_a_source_of_truth_a_suspect_stays_one():
    ward = Ward(None)
    ward.nurse(5 * NEXT_LOOK_S)
    assert (ward.entry("a").suspicions, ward.of(events.Repaired)) == (1, [])


TRUTH = {"id": "a", "v": 5}
TRUTHS = {"bytes": b'{"id": "a", "v": 5}', "value": TRUTH, "model": pydantic.RootModel[dict[str, Any]](TRUTH)}


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS.keys())
def test_the_truth_may_be_read_by_waiting_and_as_bytes_a_value_or_a_model(truth: Any):
    async def refetch(key: str) -> Any:
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=20.0)
        return truth

    ward = Ward(refetch)
    ward.nurse(NEXT_LOOK_S + 25.0)
    assert (ward.stored, ward.entry("a").suspicions) == ({"a": 5}, 0)


def test_a_key_that_is_gone_is_deleted():
    ward = Ward(lambda key: None)
    ward.nurse(NEXT_LOOK_S)
    assert (ward.stored, ward.sink.stored["a"].deleted) == ({}, True)
    assert (ward.entry("a").suspicions, ward.entry("a").mark) == (0, order_of(5))


class OriginWard(Ward):
    """A ward whose truth is an origin, which has no row of `a` at first."""

    def __init__(self, *, is_consistent: bool = True) -> None:
        super().__init__(None)
        self.rows: dict[str, bytes] = {}
        origin = MemoryOrigin(self.rows)
        origin.is_consistent = is_consistent
        self.more |= {"origin": origin, "refetch": from_origin(origin)}


TWICE_S = NEXT_LOOK_S + HORIZON_S + 2 * REPAIR_S


def test_an_origin_has_to_say_twice_that_a_key_is_gone():
    once, twice = OriginWard(), OriginWard()
    once.nurse(NEXT_LOOK_S)
    twice.nurse(TWICE_S)
    assert (once.sink.stored["a"].deleted, once.entry("a").suspicions) == (False, 1)
    assert (twice.sink.stored["a"].deleted, twice.entry("a").suspicions) == (True, 0)


def test_a_row_that_comes_late_is_no_deletion():
    """Its change was announced before its row could be read."""
    ward = OriginWard()

    async def story() -> None:
        await ward.fall_ill()
        async with Running(ward):
            await ward.pass_s(NEXT_LOOK_S)
            ward.rows["a"] = b'{"id": "a", "v": 5, "text": "true"}'
            await ward.pass_s(HORIZON_S + 2 * REPAIR_S)

    ward.play(story())
    assert b"true" in ward.sink.stored["a"].body
    assert (ward.entry("a").suspicions, ward.entry("a").mark) == (0, order_of(5))


def test_the_second_answer_counts_only_if_the_mark_has_not_moved():
    ward = OriginWard()

    async def story() -> None:
        await ward.fall_ill()
        async with Running(ward):
            await ward.pass_s(NEXT_LOOK_S)
            await ward.send(page("a", 6))
            await ward.pass_s(HORIZON_S + 2 * REPAIR_S)
            assert not ward.sink.stored["a"].deleted
            await ward.pass_s(HORIZON_S + 2 * REPAIR_S)

    ward.play(story())
    assert (ward.sink.stored["a"].deleted, ward.entry("a").mark) == (True, order_of(6))


def test_an_inconsistent_origin_never_says_that_a_key_is_gone():
    ward = OriginWard(is_consistent=False)
    ward.nurse(2 * TWICE_S)
    assert (ward.sink.stored["a"].deleted, ward.entry("a").suspicions) == (False, 1)


def test_a_key_that_is_gone_and_was_never_committed_is_forgotten():
    ward = Ward(lambda key: None, version=None)
    ward.nurse(NEXT_LOOK_S)
    assert (ward.sink.stored["a"].deleted, ward.entry("a")) == (True, None)


def test_truth_that_is_newer_raises_the_mark():
    """Rule 3: the message that brings it finds a duplicate."""
    ward = Ward(lambda key: {"id": key, "v": 8})
    ward.nurse(NEXT_LOOK_S)
    ward.run(page("a", 7), page("a", 8))
    assert (ward.stored, ward.entry("a").mark) == ({"a": 8}, order_of(8))
    assert ward.outcomes == {"applied": 1, "duplicate": 1, "stale": 1}


def test_truth_that_is_older_than_what_is_committed_is_not_written():
    """A replica that lags behind must not bring an old state back."""
    ward = Ward(lambda key: {"id": key, "v": 4})
    ward.nurse(NEXT_LOOK_S)
    assert ward.written == [("a", 5), ("a", 1)]
    assert (ward.entry("a").suspicions, ward.entry("a").token, ward.causes) == (1, 0, [])


def test_the_body_of_another_key_is_refused():
    ward = Ward(lambda key: {"id": "b", "v": 5})
    ward.nurse(NEXT_LOOK_S)
    assert "return the body of the key asked for" in ward.causes[0]
    assert ward.written == [("a", 5), ("a", 1)]
    assert ward.entry("a").suspicions == 1


def test_truth_that_cannot_be_read_is_told():
    ward = Ward(lambda key: b"broken")
    ward.nurse(NEXT_LOOK_S)
    assert "malformed" in ward.causes[0]


def test_a_failed_look_at_the_truth_is_repeated_later():
    answers = iter([ConnectionError("origin away")])

    def refetch(key: str) -> dict[str, Any]:
        for error in answers:
            raise error
        return {"id": key, "v": 5}

    ward = Ward(refetch)
    ward.nurse(3 * NEXT_LOOK_S)
    assert ward.causes == ["ConnectionError: origin away"]
    assert (ward.stored, ward.entry("a").suspicions) == ({"a": 5}, 0)


def test_a_store_that_refuses_the_truth_is_tried_again_later():
    ward = Ward(lambda key: {"id": key, "v": 5})
    failures = [TransientError("store busy")]

    def refuse_once(change: Change) -> None:
        if failures and ward.asked:
            raise failures.pop()

    ward.sink.behaviour = refuse_once
    ward.nurse(3 * NEXT_LOOK_S)
    assert ward.causes == ["TransientError: store busy"]
    assert (ward.stored, ward.entry("a").suspicions) == ({"a": 5}, 0)


def test_a_look_at_the_truth_that_hangs_is_ended():
    """Rule 7: the repair's own claim ends it."""

    async def refetch(key: str) -> None:
        await asyncio.Event().wait()

    ward = Ward(refetch, runtime_max_s=30.0)
    ward.nurse(NEXT_LOOK_S + 60.0)
    assert ward.causes == ["TimeoutError: "]
    assert ward.entry("a").suspicions >= 1


def test_a_cancelled_consumer_leaves_its_repair_to_the_lease():
    """Rule 6: a write may be on its way, so the key is neither released nor mended."""
    reached = asyncio.Event()

    async def refetch(key: str) -> None:
        reached.set()
        await asyncio.Event().wait()

    ward = Ward(refetch)

    async def story() -> None:
        await ward.fall_ill()
        async with Running(ward) as running:
            await reached.wait()
            running.task.cancel()
            await asyncio.wait([running.task])
            assert running.task.cancelled()

    ward.play(story())
    assert ward.causes == []
    assert ward.entry("a").token != 0
    assert ward.entry("a").suspicions == 1


def test_nothing_is_written_if_reading_the_truth_took_longer_than_the_claim():
    """Rule 7: a plain function cannot be cancelled, so the own deadline is looked at again after it."""

    def refetch(key: str) -> dict[str, Any]:
        ward.loop._now += ward.settings.lease_s  # It blocks for so long.
        return {"id": key, "v": 5}

    ward = Ward(refetch)
    ward.nurse(NEXT_LOOK_S)
    assert ward.causes[0].startswith("TimeoutError")
    assert ward.written == [("a", 5), ("a", 1)]


def test_truth_that_is_older_than_what_may_have_been_written_is_not_written():
    """Rule 6: a newer write may be visible though its answer was lost."""
    ward = Ward(lambda key: {"id": key, "v": 6})

    async def story() -> None:
        await ward.fall_ill()
        entries = ward.database.scope("test").entries
        entries["a"] = replace(entries["a"], unknown=order_of(7), unknown_until=10_000.0)
        async with Running(ward):
            await ward.pass_s(NEXT_LOOK_S)

    ward.play(story())
    assert ward.asked
    assert ward.written == [("a", 5), ("a", 1)]


def test_a_repair_does_not_begin_unless_the_ledger_knows_of_it():
    """Rule 18: if it kills its worker, that must be counted."""
    ward = Ward(lambda key: {"id": key, "v": 5})

    async def story() -> None:
        await ward.fall_ill()
        ward.more["ledger"] = Unreachable(ward.ledger, renew=1)
        async with Running(ward):
            await ward.until(lambda: ward.of(events.Repaired))

    ward.play(story())
    assert len(ward.asked) == 1
    assert ward.asked[0][0] > HORIZON_S + ward.settings.lease_s, "not at the first look"


def test_a_repair_takes_the_key_like_any_other_worker():
    """One at a time per key: it waits for a holder, and a holder waits for it."""
    ward = Ward(lambda key: {"id": key, "v": 6})

    async def story() -> None:
        await ward.fall_ill()
        await ward.pass_s(HORIZON_S)
        results = await ward.ledger.claim([ChangeHeader("a", order_of(6))], LeaseTerms("other", 30.0))
        async with Running(ward):
            await ward.pass_s(25.0)
            assert ward.asked == []
            await ward.ledger.commit([Commit(claim) for claim in results.granted])
            await ward.until(lambda: ward.of(events.Repaired), 3 * NEXT_LOOK_S)

    ward.play(story())


def test_a_repair_that_took_over_from_a_dead_one_waits_for_the_horizon_again():
    """The dead one's write may still land."""
    ward = Ward(lambda key: {"id": key, "v": 5})

    async def story() -> None:
        await ward.fall_ill()
        await ward.pass_s(HORIZON_S)
        await ward.ledger.claim([ChangeHeader("a", None)], LeaseTerms("dead", 30.0, level=Level.ALONE))
        died_at = ward.loop.time()
        await ward.pass_s(31.0)
        async with Running(ward):
            await ward.until(lambda: ward.of(events.Repaired))
        assert ward.asked[0][0] >= died_at + 30.0 + HORIZON_S

    ward.play(story())


def test_a_repair_that_kills_one_worker_after_another_is_given_up():
    """Rule 18: the key stays suspect, and is shown as such."""
    ward = Ward(lambda key: {"id": key, "v": 5}, crashes_max=2)

    async def story() -> None:
        await ward.fall_ill()
        for owner in ("x1", "x2", "x3", "x4", "x5", "x6"):
            [claim] = (
                await ward.ledger.claim([ChangeHeader("a", None)], LeaseTerms(owner, 30.0, level=Level.ALONE))
            ).granted
            await ward.ledger.renew([claim], 30.0, Phase.BEGUN)
            await ward.pass_s(31.0)
        async with Running(ward):
            await ward.pass_s(3 * NEXT_LOOK_S)

    ward.play(story())
    assert ward.causes[0] == "3 workers died while they repaired this key"
    assert (ward.asked, ward.of(events.Repaired)) == ([], [])
    assert ward.entry("a").suspicions > 0


def test_suspect_keys_that_are_refused_do_not_starve_the_others():
    """Thirty keys are paused for days; one that became suspect after them is repaired all the same."""
    rig = Ward(lambda key: {"id": key, "v": 1})

    async def story() -> None:
        await rig.ledger.pause(Pause("paused*", is_pattern=True))
        for number in range(30):
            await rig.ledger.mark_suspect([ChangeHeader(f"paused {number}", order_of(1))])
        await rig.pass_s(1.0)
        await rig.ledger.mark_suspect([ChangeHeader("other", order_of(1))])
        async with Running(rig):
            await rig.until(lambda: rig.of(events.Repaired), HORIZON_S + 10 * REPAIR_S)

    rig.play(story())
    assert [event.key for event in rig.of(events.Repaired)] == ["other"]


def test_a_key_that_somebody_else_repaired_meanwhile_is_left_alone():
    ward = Ward(lambda key: {"id": key, "v": 5})

    class Hasty(Unreachable):
        """Names a key that is well."""

        async def suspects(self, limit: int, quiet_s: float) -> list[str]:
            return ["well"]

    ward.more["admin"] = Hasty(ward.ledger)

    async def story() -> None:
        await ward.work(page("well", 5))
        async with Running(ward):
            await ward.pass_s(NEXT_LOOK_S)

    ward.play(story())
    assert (ward.asked, ward.entry("well").token, ward.entry("well").mark) == ([], 0, order_of(5))


@pytest.mark.parametrize(
    "call", ["suspects", "claim", "inspect", "renew", "now", "finish_repair", "after_finish_repair", "release"]
)
def test_a_ledger_that_is_away_during_a_repair_only_delays_it(call: str):
    lagging = [4] if call == "release" else []

    def refetch(key: str) -> dict[str, Any]:
        return {"id": key, "v": lagging.pop() if lagging else 5}

    ward = Ward(refetch)

    async def story() -> None:
        await ward.fall_ill()
        away = Unreachable(ward.ledger, **{call: 1})
        ward.more = {"ledger": away, "admin": away}
        async with Running(ward):
            await ward.until(lambda: ward.of(events.Repaired), 6 * NEXT_LOOK_S)

    ward.play(story())
    assert (ward.stored, ward.entry("a").suspicions) == ({"a": 5}, 0)
