"""Each of the nine failures is seen when it is there: with a broken variant in place, its test fails."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from adapters import test_nine_failures as nine
from adapters import two_workers
from adapters.benches import memory_ledger
from keywise.core import rules
from keywise.core.change import ChangeHeader, Outcome
from keywise.core.entry import Commit, Entry, LeaseTerms, LedgerPolicy, Refusal, RefusalReason
from keywise.core.sink import Grade
from keywise.flow.consumer import Consumer
from keywise.flow.lanes import Lane, Lanes, State, Ticket
from keywise.flow.leased.executors import Job
from keywise.flow.leased.worker import LeasedWorker
from mutants import MUTANTS, Mutant

_decide, _work_on, _take_in = rules.decide, LeasedWorker._work_on, Consumer._take_in


def _held_for_ever(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Any:
    return _decide(replace(entry, lease_until=math.inf) if entry else None, header, now, policy, terms)


def _tried_is_done(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    if entry is not None and entry.tried == header.order and entry.token == 0:
        return Refusal(RefusalReason.DUPLICATE, mark=header.order)
    return _decide(entry, header, now, policy, terms)


def _nothing_before_the_retry(
    entry: Entry | None, header: ChangeHeader, now: float, policy: LedgerPolicy, terms: LeaseTerms | None = None
) -> Refusal | None:
    if entry is not None and now < entry.not_before:
        return Refusal(RefusalReason.BUSY, entry.not_before - now)
    return _decide(entry, header, now, policy, terms)


async def _two_under_one_claim(self: LeasedWorker, jobs: list[Job]) -> None:
    more = [Job(lane.waiting[-1], job.claim) for job in jobs if (lane := self._lanes._lanes[job.claim.key]).waiting]
    await _work_on(self, [*jobs, *more])


async def _marked_first(self: LeasedWorker, jobs: list[Job]) -> None:
    await self._pipeline.ledger.commit([Commit(job.claim) for job in jobs])
    await _work_on(self, jobs)


async def _acked_first(self: LeasedWorker, jobs: list[Job]) -> None:
    await self._settlement.settle([(job.ticket, Outcome.APPLIED) for job in jobs])
    await _work_on(self, jobs)


def _last_to_arrive(self: Lanes, lane: Lane) -> Ticket:
    lane.state, lane.first_at = State.BUSY, math.inf
    return lane.waiting.pop()


async def _acked_when_gathered(self: Consumer, index: int, deliveries: Any) -> None:
    await _take_in(self, index, deliveries)
    _, source = self._pipeline.sources[index]
    await source.ack(deliveries)


OWN = [
    Mutant("a lease never runs out", 8, rules, "decide", _held_for_ever),
    Mutant("what was tried counts as done", 10, rules, "decide", _tried_is_done),
    Mutant("a retry blocks what is newer", 15, rules, "decide", _nothing_before_the_retry),
    Mutant("two changes under one claim", 2, LeasedWorker, "_work_on", _two_under_one_claim),
    Mutant("marked before the work", 3, LeasedWorker, "_work_on", _marked_first),
    Mutant("acked before the work", 5, LeasedWorker, "_work_on", _acked_first),
    Mutant("the last to arrive is taken", 12, Lanes, "_start", _last_to_arrive),
    Mutant("acked when it is gathered", 5, Consumer, "_take_in", _acked_when_gathered),
]
MUTANT = {mutant.name: mutant for mutant in (*MUTANTS, *OWN)}


def lapsed(grade: Grade) -> Callable[[Any], None]:
    return lambda make: nine.test_3_an_owner_whose_lease_lapsed_can_not_act_as_the_owner(make, grade)


def died(moment: str) -> Callable[[Any], None]:
    return lambda make: nine.test_8_progress_is_saved_only_after_the_effect(make, moment)


SEEN = [
    ("looks first and takes later", nine.test_1_of_eight_workers_that_claim_at_once_one_owns_each_key, "one owner"),
    (
        "looks first and takes later",
        nine.test_1_two_workers_on_one_queue_never_work_on_a_key_together,
        "at a time|was written as|all messages are acked",
    ),
    (
        "a batch takes two changes of one key",
        nine.test_2_a_batch_never_takes_two_changes_of_one_key,
        "all messages are acked",
    ),
    ("two changes under one claim", nine.test_2_a_batch_never_takes_two_changes_of_one_key, "no key is in it twice"),
    ("a commit ignores the token", lapsed(Grade.CONDITIONAL), "the first owner hears that it is none"),
    ("a commit ignores the token", lapsed(Grade.PLAIN), "the first owner hears that it is none"),
    ("a takeover keeps the old token", lapsed(Grade.CONDITIONAL), "the first owner hears that it is none"),
    ("suspects are not repaired", lapsed(Grade.PLAIN), "it is repaired"),
    ("anybody can release", nine.test_4_a_worker_that_is_not_the_owner_releases_nothing, "still the new owner's"),
    ("a lease never runs out", nine.test_5_a_dead_owner_freezes_no_key, "all messages are acked"),
    (
        "a blocked key uses up the room",
        nine.test_6_keys_that_wait_starve_no_other_key,
        "all keys behind them are written",
    ),
    ("what was tried counts as done", nine.test_7_a_retry_collides_with_nothing, "each was applied once"),
    (
        "a retry blocks what is newer",
        nine.test_7_a_retry_collides_with_nothing,
        "what is newer does not wait for a retry",
    ),
    ("a claim costs an attempt", nine.test_7_a_retry_collides_with_nothing, "refusals cost no try"),
    ("marked before the work", died("before the effect"), "nothing says that it is done"),
    ("acked before the work", died("before the effect"), "nothing says that it is done"),
    ("acked before the work", died("after the effect"), "nothing says that it is done"),
    ("a claim ignores the mark", nine.test_9_a_debounce_never_downgrades_the_newest, "all messages are acked"),
    ("the last to arrive is taken", nine.test_9_a_debounce_never_downgrades_the_newest, "and nothing else"),
    ("a commit ends newer changes too", nine.test_9_a_debounce_never_loses_the_newest, "both, in their order"),
    ("a debounce acks what it gathers", nine.test_9_a_debounce_never_loses_the_newest, "they come back"),
    ("acked when it is gathered", nine.test_9_a_debounce_never_loses_the_newest, "both, in their order"),
]
"""What is broken, who sees it, and what is said then."""


@pytest.mark.parametrize(("name", "test", "told"), SEEN, ids=[f"{name}-{n}" for n, (name, _, _) in enumerate(SEEN)])
def test_a_failure_is_seen_when_it_is_there(name: str, test: Callable[[Any], None], told: str, monkeypatch):
    monkeypatch.setattr(two_workers, "HOPELESS", told)
    with MUTANT[name].alive(), pytest.raises(AssertionError, match=told):
        test(memory_ledger)
