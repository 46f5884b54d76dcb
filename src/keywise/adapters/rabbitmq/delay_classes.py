"""Where messages wait in RabbitMQ: queues of our own that nobody consumes, and that give back what has expired.

A message waits in the queue of its class for exactly its time, or for longer if one before it has to wait longer;
that cannot be longer than the class allows. A queue is used for one period and vanishes by itself some time after it,
when nothing can be left in it: a broker deletes a queue that nobody uses, whether it is empty or not.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from keywise.adapters.rabbitmq.messages import DELAYS

DAY_S = 86_400
CLASSES_S = (1, 5, 20, 60, 300, 1_200, 3_600, 4 * 3_600, DAY_S, 5 * DAY_S, 20 * DAY_S)
"""The longest wait of each class; who has to wait longer than the last, waits again when it comes back."""
NAME_MAX_BYTES = 200
"""A queue has a name of at most 255 bytes."""
CUTTING = ("expires", "message-ttl", "max-length", "max-length-bytes")
"""What a policy for all queues may say, and must not say for these."""
SPARE_S = DAY_S
"""So much longer a queue is kept, for clocks that differ and for a queue that takes nothing back for a while."""


class DelayStep(msgspec.Struct, frozen=True):
    """The queue that a message waits in, and for how long."""

    queue: str
    """Its name."""
    longest_s: int
    period_s: int
    delay_s: float

    def arguments(self, back_to: str) -> dict[str, Any]:
        """What the queue is declared with; what has expired goes back, and is kept until it has arrived there."""
        return {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": back_to,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
            "x-message-ttl": self.longest_s * 1000,
            "x-expires": (self.period_s + self.longest_s + SPARE_S) * 1000,
        }

    def cut_by(self, limits: Mapping[str, Any]) -> str | None:
        """The limit of a policy that would end a wait early, or leave no room for it; the lower one counts."""
        ours = self.arguments("")
        for name in CUTTING:
            limit = limits.get(name)
            if isinstance(limit, int) and limit < ours.get(f"x-{name}", math.inf):
                return name
        return None


def wait_of(queue: str, delay_s: float, now: float) -> DelayStep:
    """Where a message of a queue waits that is put off now."""
    longest_s = next((one for one in CLASSES_S if delay_s <= one), CLASSES_S[-1])
    return _wait(queue, longest_s, min(delay_s, longest_s), now)


def due_after(delay_s: float, now: float) -> float:
    """When a message is due that has to wait more than once; 0 if it has not."""
    return now + delay_s if delay_s > CLASSES_S[-1] else 0.0


def waits_of(queue: str, now: float) -> Iterator[DelayStep]:
    """All queues that may hold a message of a queue now."""
    for longest_s in CLASSES_S:
        last = _wait(queue, longest_s, longest_s, now)
        yield last
        yield _wait(queue, longest_s, longest_s, now - last.period_s)


def names_of(queue: str) -> str:
    """How the names of all delay queues of a queue begin."""
    name = queue if len(queue.encode()) <= NAME_MAX_BYTES else hashlib.sha256(queue.encode()).hexdigest()
    return f"{DELAYS}{name}."


def _wait(queue: str, longest_s: int, delay_s: float, now: float) -> DelayStep:
    period_s = max(DAY_S, longest_s)
    return DelayStep(f"{names_of(queue)}{longest_s}s.{int(now) // period_s}", longest_s, period_s, delay_s)
