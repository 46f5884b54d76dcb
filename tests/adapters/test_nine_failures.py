"""Nine failures that other systems shipped, each played against every ledger; docs/nine-failures.md describes them.

A ledger joins by its factory in the benches. Whether each test can fail is in test_nine_failures_can_fail.py.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from adapters.test_conformance import FACTORIES
from adapters.two_workers import LEASE_S, POLICIES, VISIBILITY_S, Gate, Shop, breathe
from keywise.core import events
from keywise.core.change import Change, ChangeHeader, order_of
from keywise.core.entry import Commit, LeaseTerms, RefusalReason
from keywise.core.errors import PermanentError, TransientError
from keywise.core.limits import Debounce
from keywise.core.sink import Grade
from keywise.testing.conformance.claims import refused
from running import run

IN_PROCESS = {"memory.ledger", "sqlite.ledger.ledger"}
"""Ledgers that need no server; the others need the one that their file is named after."""

on_every_ledger = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if module in IN_PROCESS else pytest.mark.server(module.split(".")[0]))
        for module, makes in FACTORIES["ledgers"].items()
        for name, make in makes.items()
    ],
)

WORKERS, ROUNDS = 8, 15
KEYS = [f"k{number}" for number in range(100)]
BURST = Debounce("10s", max_wait="60s")


def play(make: Any, story: Callable[[Shop], Coroutine[Any, Any, None]], grade: Grade = Grade.CONDITIONAL) -> None:
    """Run a story in a new shop."""

    async def main() -> None:
        async with make(POLICIES[grade]) as bench:
            await story(Shop(bench, grade))

    run(main(), limit_s=60)


# 1. Count, then claim.


@on_every_ledger
def test_1_of_eight_workers_that_claim_at_once_one_owns_each_key(make):
    """Eight workers saw that nobody owns a key, and then each took it: two owners."""

    async def story(shop: Shop) -> None:
        rng, handles = random.Random(1), (shop.bench.ledger, shop.bench.another)
        for version in range(1, ROUNDS + 1):
            headers = [
                rng.sample([ChangeHeader(key, order_of(version)) for key in KEYS], len(KEYS)) for _ in range(WORKERS)
            ]
            claiming = [handles[n % 2].claim(headers[n], LeaseTerms(f"w{n}", LEASE_S)) for n in range(WORKERS)]
            granted = [claim for results in await asyncio.gather(*claiming) for claim in results.granted]
            assert Counter(claim.key for claim in granted) == Counter(KEYS), "each key has one owner"
            assert await shop.bench.ledger.commit([Commit(claim) for claim in granted]) == [], (
                "and it is the owner that the ledger knows"
            )

    play(make, story)


@on_every_ledger
def test_1_two_workers_on_one_queue_never_work_on_a_key_together(make):
    """Both workers found the key free, so both called the store, and the older state came last."""
    sent = [(f"k{key}", version) for key in range(4) for version in range(1, 41)]

    async def story(shop: Shop) -> None:
        await shop.send(*random.Random(2).sample(sent, len(sent)))
        workers = [shop.worker(name, batch_max=5, prefetch=10, evict_delay_s=0.1) for name in ("w1", "w2")]
        for worker in workers:
            worker.sink.behaviour = breathe
        async with workers[0], workers[1]:
            await shop.until(lambda: shop.overlaps or not shop.left(), "all messages are acked")
            assert shop.overlaps == [], "no key was written twice at a time"
        for key in {key for key, _ in sent}:
            versions = [version for one, version in shop.written if one == key]
            assert versions == sorted(set(versions)) and versions[-1] == 40, f"{key} was written as {versions}"

    play(make, story, Grade.PLAIN)


# 2. Two changes of one key in a batch.


@on_every_ledger
def test_2_a_batch_never_takes_two_changes_of_one_key(make):
    """A worker fetched a batch, two of it were about one key, and it worked on both side by side."""
    keys = [f"k{number}" for number in range(5)]

    async def story(shop: Shop) -> None:
        gate = Gate(*keys)
        workers = [shop.worker(name) for name in ("w1", "w2")]
        for worker in workers:
            worker.sink.batch_max, worker.sink.behaviour = 100, gate
        await shop.send(*((key, version) for version in range(1, 21) for key in keys))
        async with workers[0], workers[1]:
            await shop.until(lambda: gate.reached, "the first batch is being written")
            assert shop.overlaps == [], "no key is in it twice"
            await shop.send(*((key, version) for version in range(21, 41) for key in keys), ("last", 1))
            await shop.until(lambda: ("last", 1) in shop.written, "a batch after it is written")
            assert shop.written == [("last", 1)], "what is newer waits for it"
            gate.open()
            await shop.until_empty()
        assert shop.overlaps == []
        assert shop.versions == {**dict.fromkeys(keys, 40), "last": 1}

    play(make, story)


# 3. A lease that lapses while its owner lives.


@on_every_ledger
@pytest.mark.parametrize("grade", [Grade.CONDITIONAL, Grade.PLAIN])
def test_3_an_owner_whose_lease_lapsed_can_not_act_as_the_owner(make, grade):
    """A worker was stopped past its lease, another took over, and then the first woke up and finished its work."""

    async def story(shop: Shop) -> None:
        asleep, awake = Gate(), Gate()
        truth = {"id": "a", "v": 2}
        w1, w2 = (shop.worker(name, queue=name, refetch=lambda key: truth) for name in ("w1", "w2"))
        w1.sink.behaviour, w2.sink.reason = asleep, awake
        async with w1, w2:
            await shop.send(("a", 1), queue="w1")
            await shop.until(lambda: asleep.reached, "the first owner is about to write")
            shop.bench.advance(LEASE_S + 1)
            await shop.send(("a", 2), queue="w2")
            await shop.until(lambda: awake.reached, "the second owner has written, and has not committed")
            second = await shop.entry()
            asleep.open()
            await shop.until(lambda: w1.reported(events.ClaimLost), "the first owner hears that it is none")
            third = await shop.entry()
            assert (third.mark, third.token) == (None, second.token), "the key is still the second owner's"
            awake.open()
            await shop.until_empty("w1", "w2")
            assert (await shop.entry()).mark == order_of(2)
            if grade is Grade.CONDITIONAL:
                assert shop.written == [("a", 2)], "the store refused the old owner's write"
            else:
                assert (shop.versions, bool((await shop.entry()).suspicions)) == ({"a": 1}, True), (
                    "wrong, and known to be"
                )
                shop.advance(200.0)
                await shop.until(lambda: w1.reported(events.Repaired) or w2.reported(events.Repaired), "it is repaired")
                assert (shop.versions, (await shop.entry()).suspicions) == ({"a": 2}, 0)

    play(make, story, grade)


# 4. A release by somebody else.


@on_every_ledger
def test_4_a_worker_that_is_not_the_owner_releases_nothing(make):
    """A worker that lost its key gave it back on its way out, and so let a third one in beside the new owner."""

    async def story(shop: Shop) -> None:
        busy, working = Gate("a"), Gate("b")
        w1, w2 = shop.worker("w1", queue="w1", concurrency=1), shop.worker("w2", queue="w2")
        w1.sink.behaviour, w2.sink.behaviour = busy, working
        async with w2:
            async with w1:
                await shop.send(("a", 1), ("b", 1), queue="w1")
                await shop.until(lambda: busy.reached, "the first owner of both keys works on one of them")
                shop.bench.advance(LEASE_S + 1)
                await shop.send(("b", 2), queue="w2")
                await shop.until(lambda: working.reached, "the other one has a new owner")
                owned = await shop.entry("b")
                w1.drain()
                busy.open()
            assert (await shop.entry("b")).token == owned.token, "the key is still the new owner's"
            refused(await shop.bench.ask(3, "w3", key="b"), RefusalReason.BUSY)
            working.open()
            await shop.until_empty("w2")
        assert (await shop.entry("b")).mark == order_of(2)

    play(make, story)


# 5. A dead owner.


@on_every_ledger
def test_5_a_dead_owner_freezes_no_key(make):
    """A worker was killed at work, nobody gave its key back, and from then on the key was taken for ever."""

    async def story(shop: Shop) -> None:
        gate = Gate()
        w1, w2 = shop.worker("w1"), shop.worker("w2")
        w1.sink.behaviour = gate
        await shop.send(("a", 1), ("b", 1))
        async with w1:
            await shop.until(lambda: len(gate.reached) == 2, "both keys are worked on")
            await w1.kill()
        shop.queue_clock.advance(VISIBILITY_S + 1)
        async with w2:
            await shop.send(("c", 1))
            await shop.until(lambda: w2.reported(events.Refused), "the key is refused while its owner may live")
            await shop.until(lambda: shop.versions == {"c": 1}, "other keys go on")
            shop.advance(LEASE_S + 1)
            await shop.until_empty()
        assert shop.versions == {"a": 1, "b": 1, "c": 1}
        assert await shop.letters() == []

    play(make, story)


# 6. A head that cannot be worked on.


@on_every_ledger
def test_6_keys_that_wait_starve_no_other_key(make):
    """At the head of the queue stood what somebody held, what was due much later and what always failed: all waited."""
    heads = [(key, version) for version in range(1, 26) for key in ("held", "later", "bad")]
    others = [(f"k{number}", 1) for number in range(20)]
    due: list[bool] = []

    def behaviour(change: Change[Any]) -> None:
        if change.key == "bad":
            raise PermanentError("no such product")
        if change.key == "later" and not due:
            raise TransientError("not yet")

    async def story(shop: Shop) -> None:
        held = (
            await shop.bench.another.claim([ChangeHeader("held", order_of(0))], LeaseTerms("somebody", LEASE_S))
        ).granted
        await shop.send(*heads, *others)
        w1 = shop.worker("w1", batch_max=10, prefetch=20, evict_delay_s=0.2, backoff_s=300, backoff_max_s=300)
        w1.sink.behaviour = behaviour
        async with w1:
            await shop.until(lambda: set(others) <= set(shop.written), "all keys behind them are written")
            assert shop.versions == dict(others)
            await shop.bench.another.release(held)
            due.append(True)
            shop.advance(301.0)
            await shop.until_empty()
        assert shop.versions == {**dict(others), "held": 25, "later": 25}
        assert {letter.key for letter in await shop.letters()} == {"bad"}

    play(make, story)


# 7. A retry and the rule that it is unique.


@on_every_ledger
def test_7_a_retry_collides_with_nothing(make):
    """A change that failed could not be queued again, because one of its kind was queued meanwhile; so it was lost."""
    failed: list[str] = []

    def first_try_fails(change: Change[Any]) -> None:
        if change.version == 1 and failed.count(change.key) == 0:
            failed.append(change.key)
            raise TransientError("try again")

    async def story(shop: Shop) -> None:
        w1, w2 = (
            shop.worker(name, queue=name, attempts_max=2, backoff_s=300, backoff_max_s=300) for name in ("w1", "w2")
        )
        w1.sink.behaviour = w2.sink.behaviour = first_try_fails
        async with w1, w2:
            await shop.send(("same", 1), ("newer", 1), queue="w1")
            await shop.until(lambda: sorted(failed) == ["newer", "same"], "both wait for their second try")
            await shop.until(
                lambda: w1.reported(events.Failed, "same") and w1.reported(events.Failed, "newer"), "both fail"
            )
            await shop.send(("same", 1), ("newer", 2), queue="w2")
            await shop.until(lambda: w2.reported(events.Refused, "same") or not shop.left("w2"), "its twin is heard")
            await shop.until(lambda: shop.written == [("newer", 2)], "what is newer does not wait for a retry")
            await shop.send(("same", 1), queue="w1")
            shop.advance(301.0)
            await shop.until_empty("w1", "w2")
        assert sorted(shop.written) == [("newer", 2), ("same", 1)], "each was applied once"
        assert await shop.letters() == [], "refusals cost no try"

    play(make, story)


# 8. Progress before the effect.


@on_every_ledger
@pytest.mark.parametrize("died", ["before the effect", "after the effect"])
def test_8_progress_is_saved_only_after_the_effect(make, died):
    """The message was acked, or marked as done, and then the worker died before it had done it."""

    async def story(shop: Shop) -> None:
        gate = Gate()
        w1, w2 = shop.worker("w1"), shop.worker("w2")
        if died == "before the effect":
            w1.sink.behaviour = gate
        else:
            w1.sink.reason = gate
        await shop.send(("a", 1))
        async with w1:
            await shop.until(lambda: gate.reached, "the first worker is at it")
            await w1.kill()
        assert (shop.left(), (await shop.entry()).mark) == (1, None), "nothing says that it is done"
        shop.advance(VISIBILITY_S + 1)
        async with w2:
            await shop.until_empty()
        assert shop.written == [("a", 1)]
        assert (await shop.entry()).mark == order_of(1)

    play(make, story)


# 9. A debounce.


@on_every_ledger
def test_9_a_debounce_never_downgrades_the_newest(make):
    """An older change arrived last, in the same burst or at another worker, and was written over the newest."""

    async def story(shop: Shop) -> None:
        w1, w2 = (shop.worker(name, queue=name, debounce=BURST) for name in ("w1", "w2"))
        async with w1, w2:
            await shop.send(("a", 7), ("a", 5), queue="w1")
            await shop.send(("a", 6), queue="w2")
            await shop.until(lambda: w1.waiting == 2 and w2.waiting == 1, "both gather")
            w1.advance(11.0)
            await shop.until_empty("w1")
            w2.advance(11.0)
            await shop.until_empty("w2")
        assert shop.written == [("a", 7)], "the newest, and nothing else"

    play(make, story, Grade.PLAIN)


@on_every_ledger
def test_9_a_debounce_never_loses_the_newest(make):
    """The newest change came while an older one was being written, or the worker died that had gathered it."""

    def refuses(change: Change[Any]) -> None:
        if change.key == "b" and change.version == 2:
            raise PermanentError("no such product")

    async def story(shop: Shop) -> None:
        gate = Gate("a")
        w1, w2 = shop.worker("w1", debounce=BURST), shop.worker("w2", debounce=BURST)
        w1.sink.behaviour, w2.sink.behaviour = gate, refuses
        async with w1:
            await shop.send(("a", 1))
            await shop.until(lambda: w1.waiting == 1, "a burst begins")
            w1.advance(11.0)
            await shop.until(lambda: gate.reached, "it is being written")
            await shop.send(("a", 2))
            await shop.until(lambda: w1.waiting == 2, "the newest comes")
            gate.open()
            await shop.until(lambda: shop.left() < 2, "the older one is done")
            w1.advance(11.0)
            await shop.until_empty()
            assert shop.written == [("a", 1), ("a", 2)], "both, in their order"
            await shop.send(("a", 3), ("a", 4), ("b", 1), ("b", 2))
            await shop.until(lambda: w1.waiting == 4, "two bursts are gathered")
            await w1.kill()
        shop.advance(VISIBILITY_S + 1)
        async with w2:
            await shop.until(lambda: w2.waiting == 4, "they come back")
            w2.advance(11.0)
            # Below a change that cannot be applied, the next newest has its turn, and is gathered too.
            await shop.until(lambda: w2.waiting < 2, "the first of each has ended")
            w2.advance(11.0)
            await shop.until_empty()
        assert shop.versions == {"a": 4, "b": 1}
        assert [(letter.key, letter.version) for letter in await shop.letters()] == [("b", 2)]

    play(make, story)
