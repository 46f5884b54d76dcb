"""Dead letters: deliveries that were set aside with their cause."""

import math
from collections.abc import Mapping

import msgspec

from keywise.core.entry import Certainty, Claim


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter: a delivery set aside with its cause."""

    cause: str
    body: bytes
    key: str = ""
    """Empty if the delivery could not be read so far."""
    version: int | None = None
    headers: Mapping[str, str] | None = None
    sent_at: float = 0.0
    source: str = ""


class DeadLetterRequest(msgspec.Struct, frozen=True):
    """A dead letter on its way: with the claim it ends, if one is held, and what is known of the last try."""

    letter: DeadLetter
    claim: Claim | None = None
    certainty: Certainty = Certainty.CLEAN


class DeadLetterFilter(msgspec.Struct, frozen=True):
    """Which dead letters are looked for; without anything, all of them."""

    since: float = -math.inf
    """Buried at this moment of the store's clock, or later."""
    until: float = math.inf
    """Buried before."""
    cause: str = ""
    """Part of their cause."""

    def covers(self, buried_at: float, letter: DeadLetter) -> bool:
        return self.since <= buried_at < self.until and self.cause in letter.cause


EVERY_DEAD_LETTER = DeadLetterFilter()
