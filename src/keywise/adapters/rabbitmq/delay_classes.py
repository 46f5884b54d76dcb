"""Delay queues in RabbitMQ: queues without consumers that dead-letter expired messages back to the source's queue.

A queue expires messages only at its head, so a message may have to wait for one before it. Each delay queue is for one
class of delays, and no wait is longer than its class allows.
A queue is used for one period, and deletes itself (`x-expires`) when nothing can be left in it: the broker deletes an
unused queue whether or not it is empty.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from keywise.adapters.rabbitmq.messages import DELAYS

DAY_S = 86_400
CLASSES_S = (1, 5, 20, 60, 300, 1_200, 3_600, 4 * 3_600, DAY_S, 5 * DAY_S, 20 * DAY_S)
"""The longest delay of each class. A message with a longer delay than the last waits several times."""
NAME_MAX_BYTES = 200
"""A longer name is hashed: with prefix and suffix, the name of a delay queue must fit into 255 bytes."""
POLICY_LIMITS = ("expires", "message-ttl", "max-length", "max-length-bytes")
"""Limits that a policy for all queues may set, and that would lose messages of delay queues."""
EXPIRY_MARGIN_S = DAY_S
"""How much longer a queue is kept, for clocks that differ and for a source queue that accepts nothing for a while."""


class DelayStep(msgspec.Struct, frozen=True):
    """A delay queue, and how long a message waits in it."""

    queue: str
    longest_s: int
    period_s: int
    delay_s: float

    def arguments(self, back_to: str) -> dict[str, Any]:
        """The arguments of the queue.

        `at-least-once` keeps an expired message until the source's queue has confirmed it.
        """
        return {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": back_to,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
            "x-message-ttl": self.longest_s * 1000,
            "x-expires": (self.period_s + self.longest_s + EXPIRY_MARGIN_S) * 1000,
        }

    def limited_by(self, limits: Mapping[str, Any]) -> str | None:
        """Return the limit of a policy that would end a wait early or leave no room for it.

        The broker applies the lower one of a policy's limit and a queue's argument.
        """
        ours = self.arguments("")
        for name in POLICY_LIMITS:
            limit = limits.get(name)
            if isinstance(limit, int) and limit < ours.get(f"x-{name}", math.inf):
                return name
        return None


def wait_of(queue: str, delay_s: float, now: float) -> DelayStep:
    """Return the delay queue for a message that is delayed now."""
    longest_s = next((one for one in CLASSES_S if delay_s <= one), CLASSES_S[-1])
    return _wait(queue, longest_s, min(delay_s, longest_s), now)


def due_after(delay_s: float, now: float) -> float:
    """Return when a message is due that has to wait more than once; 0 if one wait is enough."""
    return now + delay_s if delay_s > CLASSES_S[-1] else 0.0


def waits_of(queue: str, now: float) -> Iterator[DelayStep]:
    """All delay queues that may hold a message of a queue now: of each class, those of this and of the last period."""
    for longest_s in CLASSES_S:
        last = _wait(queue, longest_s, longest_s, now)
        yield last
        yield _wait(queue, longest_s, longest_s, now - last.period_s)


def names_of(queue: str) -> str:
    """The prefix of the names of all delay queues of a queue."""
    name = queue if len(queue.encode()) <= NAME_MAX_BYTES else hashlib.sha256(queue.encode()).hexdigest()
    return f"{DELAYS}{name}."


def _wait(queue: str, longest_s: int, delay_s: float, now: float) -> DelayStep:
    period_s = max(DAY_S, longest_s)
    return DelayStep(f"{names_of(queue)}{longest_s}s.{int(now) // period_s}", longest_s, period_s, delay_s)
