"""Dead letters: deliveries that were set aside, with the cause."""

import math
from collections.abc import Mapping

import msgspec

from keywise.core.entry import Certainty, Claim


class DeadLetter(msgspec.Struct, frozen=True):
    """A delivery that was set aside, with the cause."""

    cause: str
    body: bytes
    key: str = ""
    """Empty if the key of the delivery could not be read."""
    version: int | None = None
    headers: Mapping[str, str] | None = None
    sent_at: float = 0.0
    source: str = ""
    traceback: str = ""
    """Of the exception of a handler or sink, if one was the cause."""
    routing_key: str = ""


class DeadLetterRequest(msgspec.Struct, frozen=True):
    """A dead letter to store, with the claim that it ends, if one is held, and what is known about the last attempt."""

    letter: DeadLetter
    claim: Claim | None = None
    certainty: Certainty = Certainty.CLEAN


class DeadLetterFilter(msgspec.Struct, frozen=True):
    """Selects dead letters; without conditions, all of them."""

    since: float = -math.inf
    """Stored at this time of the store's clock, or later."""
    until: float = math.inf
    """Stored before this time."""
    cause: str = ""
    """A part of the cause."""

    def covers(self, buried_at: float, letter: DeadLetter) -> bool:
        return self.since <= buried_at < self.until and self.cause in letter.cause


EVERY_DEAD_LETTER = DeadLetterFilter()
