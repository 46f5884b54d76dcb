"""Changes whose worker died run on probation: nothing else waits for them, and a killer is still found."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from flow.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, Rig, Running, Store
from flow.test_consumer import page
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core import events
from keywise.core.change import Change, ChangeHeader, Outcome, order_of
from keywise.core.entry import Claim, LeaseTerms, Level, Phase
from keywise.core.ledger import ClaimResults
from keywise.core.sink import Grade, SinkResult
from keywise.flow.leased.probation import AloneTurns, Company, ProbationWindow

DEAD = 600
"""How many claims a dead worker leaves behind."""
CALL_S = 0.2
PATIENCE_S = 5.0


async def leave_behind(rig: Rig, *keys: str, phase: Phase = Phase.CLAIMED, owner: str = "dead") -> None:
    """Claim keys as a worker that dies then."""
    headers = [ChangeHeader(key, order_of(1)) for key in keys]
    granted = (await rig.ledger.claim(headers, LeaseTerms(owner, 30.0, Level.ALONE))).granted
    await rig.ledger.renew(granted, 30.0, phase)
    await rig.pass_s(31.0)


async def must_be_alone(rig: Rig, *keys: str) -> None:
    """Let so many workers die with keys that these have to run alone."""
    for owner in ("x1", "x2", "x3"):
        await leave_behind(rig, *keys, phase=Phase.BEGUN, owner=owner)
    assert all(rig.entry(key).deaths is Level.SOLE for key in keys)


def slowly(rig: Rig, call_s: float = CALL_S) -> Any:
    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(call_s)

    return behave


@pytest.mark.parametrize("way", [LEASED, LEASED_CONDITIONAL, CLAIMED_TRANSACTION])
def test_a_dead_worker_with_hundreds_of_claims_holds_up_no_other_key(way: str):
    rig = Rig(way, concurrency=8)
    rig.sink.behaviour = slowly(rig)
    keys = [f"dead {number}" for number in range(DEAD)]

    async def story() -> None:
        await leave_behind(rig, *keys)
        await rig.send(*(page(key, 1) for key in keys))
        async with Running(rig):
            for number in range(20):
                await rig.pass_s(1.0)
                await rig.send(page(f"live {number}", 1))
                await rig.until(lambda name=f"live {number}": name in rig.stored, PATIENCE_S)
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert len(rig.stored) == DEAD + 20
    assert rig.letters == []


def test_the_changes_of_a_dead_worker_are_soon_many_at_a_time():
    """One by one they would take two minutes."""
    rig = Rig(concurrency=8)
    rig.sink.behaviour = slowly(rig)
    keys = [f"dead {number}" for number in range(DEAD)]

    async def story() -> float:
        await leave_behind(rig, *keys)
        started = rig.loop.time()
        await rig.work(*(page(key, 1) for key in keys))
        return rig.loop.time() - started

    assert rig.play(story()) < DEAD * CALL_S / 4


def test_a_slow_repair_holds_up_no_key():
    rig = Rig(repair_s=1.0, horizon_s=1.0)

    async def refetch(key: str) -> dict[str, Any]:
        await rig.pass_s(20.0)
        return {"id": key, "v": 1}

    rig.refetch = refetch

    async def story() -> None:
        for number in range(10):
            await rig.ledger.mark_suspect([ChangeHeader(f"suspect {number}", order_of(1))])
        async with Running(rig):
            for number in range(30):
                await rig.pass_s(1.0)
                await rig.send(page(f"live {number}", 1))
                await rig.until(lambda name=f"live {number}": name in rig.stored, PATIENCE_S)
            await rig.until(lambda: len(rig.of(events.Repaired)) == 10)

    rig.play(story())


def test_a_long_call_and_a_change_that_has_to_run_alone_hold_up_no_other_key():
    """The process waits for idleness for a lease, and then lets another change begin first."""
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0)

    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(200.0 if change.key == "long" else CALL_S)

    rig.sink.behaviour = behave

    async def story() -> None:
        await must_be_alone(rig, "alone")
        async with Running(rig):
            await rig.send(page("long", 1))
            await rig.until(lambda: ("long", 1) in [(key, version) for _, key, version in rig.sink.tries])
            await rig.send(page("alone", 1))
            for number in range(10):
                await rig.send(page(f"live {number}", 1))
                await rig.until(lambda name=f"live {number}": name in rig.stored, 10.0 + PATIENCE_S)
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.stored["alone"] == 1


def test_a_process_that_waits_for_idleness_in_vain_works_for_at_least_as_long_in_between():
    """The long call is allowed to take ten minutes; the others must not stand still for most of them."""
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0)
    ticks = list[bool]()

    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(500.0 if change.key == "long" else CALL_S)

    rig.sink.behaviour = behave

    async def story() -> None:
        await must_be_alone(rig, "alone")
        async with Running(rig):
            await rig.send(page("long", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(page("alone", 1))
            for number in range(800):
                await rig.send(page(f"live {number}", 1))
                await rig.pass_s(0.5)
                ticks.append(rig.entry("alone").owner == "w1" and rig.entry("alone").token != 0)
            assert "long" not in rig.stored
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert 0 < sum(ticks) < len(ticks) / 4
    assert rig.stored["alone"] == 1


def test_nothing_begins_beside_a_change_that_runs_alone_until_its_time_alone_is_over():
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0)

    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(25.0 if change.key == "alone" else CALL_S)

    rig.sink.behaviour = behave

    async def story() -> None:
        await must_be_alone(rig, "alone")
        async with Running(rig):
            await rig.send(page("alone", 1))
            await rig.until(lambda: rig.sink.tries)
            begun = rig.sink.tries[0][0]
            await rig.send(page("live", 1))
            await rig.until(lambda: "live" in rig.stored)
            assert 10.0 <= rig.sink.tries[1][0] - begun < 10.0 + PATIENCE_S
            assert rig.entry("alone").phase is Phase.ACCOMPANIED
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.stored == {"alone": 1, "live": 1}


def test_a_window_doubles_with_each_clean_wave_and_is_one_again_after_a_death():
    window, limits = ProbationWindow(most=6, lease_s=30.0), []
    for _ in range(4):
        limits.append(wave := window.free(0.0))
        for number in range(wave):
            window.claimed(number, Level.PROBATION)
        assert window.free(0.0) == 0
        for number in range(wave):
            window.end(number, clean=True)
    assert limits == [1, 2, 4, 6]
    window.took_over(Level.PROBATION)
    assert window.free(0.0) == 6, "the worker died with ordinary changes"
    window.took_over(Level.SOLE)
    assert window.free(0.0) == 1


def test_the_only_change_on_probation_leaves_no_room():
    window = ProbationWindow(most=8, lease_s=30.0)
    window.claimed("one", Level.PROBATION)
    window.end("one", clean=True)
    window.claimed("sole", Level.SOLE)
    assert window.free(0.0) == 0
    window.end("sole", clean=True)
    assert window.free(0.0) > 0


def test_a_repair_begins_in_the_company_of_its_level():
    company = Company(8, 30.0, lambda: 0.0)
    assert [company.may_repair(level) for level in Level] == [True, True, True, False]
    with company.repairing(Level.PROBATION):
        assert [company.may_repair(level) for level in Level] == [True, False, False, False]
    with company.draining():
        assert not any(company.may_repair(level) for level in Level)


def test_a_change_that_could_not_run_alone_lets_another_begin_first_and_alarms_in_the_end():
    turns = AloneTurns(pause_max_s=300.0)
    assert turns.is_due(0.0, others_wait=True)
    assert not turns.failed(0.0, took_s=30.0)
    assert not turns.is_due(30.0, others_wait=True)
    assert turns.is_due(30.0, others_wait=False)
    turns.change_begun()
    assert turns.is_due(30.0, others_wait=True)
    assert not turns.failed(300.0, took_s=30.0)
    assert turns.failed(601.0, took_s=30.0)
    assert not turns.failed(900.0, took_s=30.0), "it is said once"
    turns.succeeded()
    assert not turns.is_due(900.0, others_wait=True), "another change begins after each that ran alone"
    assert turns.is_due(900.0, others_wait=False)
    assert not turns.failed(1000.0, took_s=30.0)


def test_the_pause_after_each_failure_to_run_alone_doubles():
    turns, now, pauses = AloneTurns(pause_max_s=100.0), 0.0, list[float]()
    for _ in range(4):
        now += 30.0
        turns.failed(now, took_s=30.0)
        assert not turns.is_due(turns.not_before - 0.1, others_wait=False)
        pauses.append(turns.not_before - now)
        now = turns.not_before
        assert turns.is_due(now, others_wait=False)
    assert pauses == [30.0, 60.0, 100.0, 100.0]
    turns.succeeded()
    turns.failed(now, took_s=20.0)
    assert turns.not_before == now + 20.0


@pytest.mark.parametrize("phase", [Phase.CLAIMED, Phase.BEGUN])
def test_a_change_on_probation_that_takes_long_holds_up_the_others_for_one_lease(phase: Phase):
    """It may take ten minutes, or for ever if its handler swallows the cancellation."""
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0)

    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(500.0 if change.key == "long" else CALL_S)

    rig.sink.behaviour = behave

    async def story() -> None:
        await leave_behind(rig, "long", "other", owner="x1")
        await leave_behind(rig, "other", phase=phase, owner="x2")
        async with Running(rig):
            await rig.send(page("long", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(page("other", 1))
            await rig.pass_s(5.0)
            assert "other" not in rig.stored
            await rig.until(lambda: "other" in rig.stored, 10.0)
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert rig.stored == {"long": 1, "other": 1}
    assert rig.letters == []


def test_a_change_that_runs_for_a_lease_no_longer_counts_in_the_window():
    window = ProbationWindow(most=8, lease_s=30.0)
    window.claimed("sole", Level.SOLE)
    assert (window.free(1000.0), window.next_free(1000.0)) == (0, math.inf), "it waits for a worker"
    window.begun("sole", 1000.0)
    assert (window.free(1029.0), window.next_free(1029.0)) == (0, 1030.0)
    assert (window.free(1030.0), window.next_free(1030.0)) == (1, math.inf)
    assert window.has_room(Level.SOLE, 1030.0)
    window.claimed("other", Level.PROBATION)
    assert window.free(1030.0) == 0
    window.end("sole", clean=True)
    assert window.free(1030.0) == 1, "each change that ends widens it"


def test_the_only_one_on_probation_does_not_wait_for_all_the_others():
    """Changes on probation end one by one, so there is always one; the process makes room for the sole one."""
    rig = Rig(concurrency=4)
    keys = [f"dead {number}" for number in range(200)]

    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(CALL_S * (1 + int(change.key[5:]) % 7 / 7) if change.key.startswith("dead") else CALL_S)

    rig.sink.behaviour = behave

    async def story() -> None:
        await leave_behind(rig, "sole", phase=Phase.BEGUN, owner="x1")
        await leave_behind(rig, "sole", phase=Phase.BEGUN, owner="x2")
        await leave_behind(rig, *keys)
        async with Running(rig):
            await rig.send(*(page(key, 1) for key in keys))
            await rig.until(lambda: len(rig.stored) > 20)
            await rig.send(page("sole", 1))
            await rig.until(lambda: "sole" in rig.stored, PATIENCE_S)
            assert len(rig.stored) < 100
            await rig.until(lambda: not rig.queue)

    rig.play(story())


def test_changes_on_probation_begin_between_two_that_run_as_the_only_one():
    window = ProbationWindow(most=8, lease_s=30.0)
    assert window.next(0.0, sole_waits=True, others_wait=True) == (Level.SOLE, 1)
    window.claimed("sole", Level.SOLE)
    assert window.next(0.0, sole_waits=True, others_wait=True)[1] == 0
    window.end("sole", clean=True)
    assert window.next(0.0, sole_waits=True, others_wait=True) == (Level.PROBATION, 2)
    window.claimed("one", Level.PROBATION)
    assert window.next(0.0, sole_waits=True, others_wait=True) == (Level.SOLE, 0)
    assert window.next(0.0, sole_waits=False, others_wait=True) == (Level.PROBATION, 1)
    window.end("one", clean=True)
    assert window.next(0.0, sole_waits=True, others_wait=True) == (Level.SOLE, 1)


def test_a_change_that_waits_to_run_alone_does_not_starve_those_on_probation():
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0)
    keys = [f"dead {number}" for number in range(10)]

    async def behave(change: Change[Any]) -> None:
        await rig.pass_s(300.0 if change.key == "long" else CALL_S)

    rig.sink.behaviour = behave

    async def story() -> None:
        await must_be_alone(rig, "alone")
        await leave_behind(rig, *keys)
        async with Running(rig):
            await rig.send(page("long", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(page("alone", 1), *(page(key, 1) for key in keys))
            await rig.until(lambda: all(key in rig.stored for key in keys), 200.0)
            assert "long" not in rig.stored
            await rig.until(lambda: not rig.queue)

    rig.play(story())


def test_other_changes_begin_between_two_that_run_alone():
    rig = Rig(concurrency=4)
    rig.sink.behaviour = slowly(rig, 1.0)
    keys = [f"alone {number}" for number in range(20)]

    async def story() -> None:
        await must_be_alone(rig, *keys)
        async with Running(rig):
            await rig.send(*(page(key, 1) for key in keys))
            await rig.until(lambda: rig.sink.tries)
            for number in range(5):
                await rig.send(page(f"live {number}", 1))
                await rig.until(lambda name=f"live {number}": name in rig.stored, PATIENCE_S)
            assert len(rig.stored) < 25
            await rig.until(lambda: not rig.queue)

    rig.play(story())


class Lowered(MemoryLedger):
    """A ledger in which a key is committed, and dies with two more workers, while a process waits to run it alone."""

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        for header in headers:
            if terms.level is Level.ALONE and (entry := self.working_set.entry(header.key)) is not None:
                self.working_set.set(header.key, replace(entry, deaths=Level.SOLE, phase=Phase.CLAIMED))
        return await super().claim(headers, terms)


def test_a_claim_that_is_granted_at_a_lower_level_than_asked_runs_only_if_that_level_has_room():
    rig = Rig(concurrency=4)
    rig.sink.behaviour = slowly(rig, 5.0)
    rig.more["ledger"] = Lowered(rig.database, "test", rig.policy)

    async def story() -> None:
        await leave_behind(rig, "probation")
        await must_be_alone(rig, "alone")
        async with Running(rig):
            await rig.send(page("probation", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(page("alone", 1))
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    (first, _, _), (second, _, _) = rig.sink.tries
    assert second - first >= 5.0


def test_a_change_that_goes_on_after_its_claim_was_lost_lets_the_others_begin():
    """Its handler ignores the cancellation, and the ledger has nothing to note any more."""
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0)
    gate = asyncio.Event()

    async def behave(change: Change[Any]) -> None:
        while change.key == "alone" and not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    rig.sink.behaviour = behave

    async def story() -> None:
        await must_be_alone(rig, "alone")
        async with Running(rig):
            await rig.send(page("alone", 1))
            await rig.until(lambda: rig.sink.tries)
            entries = rig.database.scope("test").entries
            entries["alone"] = replace(entries["alone"], token=1000, owner="w2")
            await rig.send(page("live", 1))
            await rig.until(lambda: "live" in rig.stored, 30.0)
            gate.set()
            await rig.until(lambda: not rig.queue)

    rig.play(story())


def test_a_stop_does_not_end_the_time_alone():
    """Nothing begins after a stop, so a death is still the change's own fault."""
    rig = Rig(concurrency=4, lease_s=10.0, margin_s=1.0, runtime_max_s=600.0, drain_s=60.0)
    rig.sink.behaviour = slowly(rig, 8.0)

    async def story() -> None:
        await must_be_alone(rig, "alone")
        running = Running(rig)
        async with running:
            await rig.send(page("alone", 1))
            await rig.until(lambda: rig.sink.tries)
            running.consumer.stop()
            await rig.pass_s(4.0)
            assert rig.entry("alone").phase is Phase.BEGUN

    rig.play(story())
    assert rig.stored == {"alone": 1}


def test_a_stop_while_other_changes_end_releases_the_change_that_has_to_run_alone():
    rig = Rig(concurrency=4, drain_s=60.0)
    rig.sink.behaviour = slowly(rig, 8.0)

    async def story() -> None:
        await must_be_alone(rig, "alone")
        running = Running(rig)
        async with running:
            await rig.send(page("long", 1))
            await rig.until(lambda: rig.sink.tries)
            await rig.send(page("alone", 1))
            await rig.until(lambda: rig.entry("alone").owner == "w1")
            running.consumer.stop()
            await rig.until(lambda: not rig.entry("alone").token, 2.0)
        assert rig.entry("alone").deaths is Level.ALONE

    rig.play(story())
    assert rig.stored == {"long": 1}
    assert not rig.of(events.Alarmed)


def test_a_claim_that_was_given_back_unused_does_not_widen_the_window():
    window = ProbationWindow(most=8, lease_s=30.0)
    window.claimed("one", Level.PROBATION)
    window.end("one", clean=False)
    assert window.free(0.0) == 1


def test_no_repair_on_probation_begins_while_a_claim_on_probation_is_asked_for():
    company = Company(8, 30.0, lambda: 0.0)
    with company.window.claiming():
        assert [company.may_repair(level) for level in Level] == [True, False, False, False]


def test_a_refused_repair_does_not_widen_the_window():
    company = Company(8, 30.0, lambda: 0.0)
    with company.repairing(Level.PROBATION):
        pass
    assert company.window.free(0.0) == 1
    with company.repairing(Level.PROBATION) as repair:
        repair.begin()
    assert company.window.free(0.0) == 2


class BusyOnce(Store):
    """A store that answers the first calls with "too busy", so that every worker backs off."""

    calls_left = 4

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        if self.calls_left:
            self.calls_left -= 1
            return [SinkResult(Outcome.BUSY, "too busy")] * len(changes)
        return await super().apply(changes, claims)


def test_the_time_alone_begins_when_a_worker_is_free_to_run_the_change():
    rig = Rig(concurrency=1, lease_s=1.0, margin_s=0.1, backoff_s=20.0, backoff_max_s=20.0)
    rig.sink = BusyOnce(Grade.PLAIN, rig.loop.time)
    rig.sink.calls_left = 1
    rig.sink.behaviour = slowly(rig, 0.5)
    phases = list[Phase]()

    async def story() -> None:
        await must_be_alone(rig, "alone")
        async with Running(rig):
            await rig.send(page("busy", 1))
            await rig.until(lambda: not rig.sink.calls_left)
            await rig.send(page("alone", 1))
            await rig.until(lambda: phases.append(rig.entry("alone").phase) or rig.sink.tries, 100.0)
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert Phase.ACCOMPANIED not in phases
