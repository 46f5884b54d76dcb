"""Storing dead letters once: a call whose answer was lost is repeated only for letters that are not stored yet."""

from collections.abc import Sequence
from typing import TypeAlias

from keywise.core.dead_letter import DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Claim
from keywise.flow.pipeline import OpenPipeline

CLOCKS_S = 60.0
"""How far the clocks of this process and of the store may drift apart between two calls."""
OTHERS_MAX = 100
"""How many letters of other workers may have been stored meanwhile.

If others stored more meanwhile, ours is not found, and the letter is stored twice.
"""

LetterIdentity: TypeAlias = tuple[str, bytes, float, str]
"""The key, the body, when it was sent, and the source of the message of a letter."""


def identity_of(letter: DeadLetter) -> LetterIdentity:
    return letter.key, letter.body, letter.sent_at, letter.source


async def stored_since(pipeline: OpenPipeline, asked_at: float, count: int) -> dict[LetterIdentity, str]:
    """Return which letters were stored since `asked_at`, a reading of the pipeline's clock, with their causes."""
    since = await pipeline.admin.now() - (pipeline.clock() - asked_at) - CLOCKS_S
    found = await pipeline.admin.dead_letters(count + OTHERS_MAX, DeadLetterFilter(since=since))
    return {identity_of(letter): letter.cause for _, _, letter in found}


class DeadLetterStep:
    """The call that stores some dead letters and ends their claims. It may be repeated until it is answered.

    A repetition finds the claims of stored letters gone, as if another worker had taken the keys over. Such a change
    would be claimed and run again, so the letters themselves are looked up.
    """

    def __init__(self, pipeline: OpenPipeline, requests: Sequence[DeadLetterRequest]) -> None:
        self._pipeline = pipeline
        self._requests = requests
        self._asked_at: float | None = None

    async def __call__(self) -> list[Claim]:
        """Store the letters; return the lost claims, whose letters are not stored."""
        ledger, asked_at = self._pipeline.ledger, self._asked_at
        if asked_at is None:
            self._asked_at = self._pipeline.clock()
            return await ledger.dead_letter(self._requests)
        lost = await ledger.dead_letter(await self._not_stored(self._requests, asked_at))
        if not lost:
            return []
        # The first call may have arrived late, after its letters were looked for.
        tokens = {claim.token for claim in lost}
        requests = [one for one in self._requests if one.claim is not None and one.claim.token in tokens]
        return [one.claim for one in await self._not_stored(requests, asked_at) if one.claim is not None]

    async def _not_stored(self, requests: Sequence[DeadLetterRequest], asked_at: float) -> list[DeadLetterRequest]:
        stored = await stored_since(self._pipeline, asked_at, len(requests))
        return [one for one in requests if identity_of(one.letter) not in stored]
