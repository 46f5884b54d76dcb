"""A queue in memory: its producer hands over deliveries with ids of their own, and learns how they have ended."""

import asyncio
from collections.abc import Sequence

import pytest

from keywise.core.change import Delivery, Outcome
from keywise.flow.handover import HandoverQueue
from keywise.testing.virtual_loop import VirtualLoop
from running import run


def deliveries(*ids: str) -> list[Delivery]:
    return [Delivery(one, 0, b"", 0.0) for one in ids]


def received(queue: HandoverQueue) -> Sequence[Delivery]:
    return run(queue.receive(10, 0.0))


def test_an_id_that_waits_for_its_end_is_not_handed_over_again():
    """Its end would count for both deliveries."""
    queue = HandoverQueue()
    first = queue.put(deliveries("a", "b"))
    with pytest.raises(AssertionError, match="'b' is handed over twice"):
        queue.put(deliveries("b"))
    run(queue.ack(received(queue)))
    assert first.ended.is_set()


def test_an_id_that_has_ended_or_was_given_up_may_be_handed_over_again():
    """A part of an object is repeated with the same records."""
    queue = HandoverQueue()
    first = queue.put(deliveries("a", "b"))
    a, b = received(queue)
    queue.note_outcome([a], Outcome.APPLIED)
    run(queue.ack([a]))
    queue.forget(first)
    second = queue.put(deliveries("a", "b"))
    assert received(queue) == [a, b]
    queue.note_outcome([a, b], Outcome.STALE)
    run(queue.ack([a, b]))
    assert (first.outcomes, second.outcomes) == ({"applied": 1}, {"stale": 2})
    assert (list(first.waiting), list(second.waiting)) == (["b"], [])


def settled_after(ends: dict[str, float], first_s: float, next_s: float) -> float:
    """How long a producer waits for `a`, `b` and `c`, of which some end, each at its time."""

    async def story() -> float:
        queue = HandoverQueue()
        handover = queue.put(deliveries("a", "b", "c"))

        async def end(one: Delivery, after_s: float) -> None:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=after_s)
            queue.note_outcome([one], Outcome.APPLIED)
            await queue.ack([one])

        async with asyncio.TaskGroup() as group:
            for one in await queue.receive(10, 0.0):
                if one.id in ends:
                    group.create_task(end(one, ends[one.id]))
            began = asyncio.get_running_loop().time()
            await handover.settle(first_s, next_s)
            waited_s = asyncio.get_running_loop().time() - began
        return waited_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story())


@pytest.mark.parametrize(
    ("ends", "waited_s"),
    [
        ({"a": 1.0, "b": 2.0, "c": 6.0}, 6.0),
        ({}, 60.0),
        ({"a": 1.0}, 6.0),
        ({"a": 0.0, "b": 0.0}, 5.0),
        ({"a": 50.0, "b": 54.0}, 59.0),
        ({"a": 50.0, "b": 56.0}, 55.0),
    ],
)
def test_a_producer_waits_long_for_the_first_end_and_then_a_little_for_each_other(
    ends: dict[str, float], waited_s: float
):
    assert settled_after(ends, 60.0, 5.0) == pytest.approx(waited_s, abs=0.1)
