"""A queue in memory: its producer hands over deliveries with ids of their own, and learns how they have ended."""

from collections.abc import Sequence

import pytest

from keywise.core.change import Delivery, Outcome
from keywise.flow.handover import HandoverQueue
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
