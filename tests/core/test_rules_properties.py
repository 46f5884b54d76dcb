"""Random histories of one key: whatever happens in whatever order, the invariants of the protocol hold."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.one_key import LEASE_S, PLAIN, REDELIVERY_S, RETENTION_S, SAFE
from core.reference_model import SecondBook
from keywise.core.entry import Certainty, LedgerPolicy, Level

VERSIONS = st.sampled_from([3, 2, 1, 4, 3, 2, 1, None])
OWNERS = st.sampled_from(["w1", "w2", "w3"])
RARELY = st.sampled_from([False] * 7 + [True])
ENDINGS = st.sampled_from(
    [
        "vanish",
        "die",
        "unknown",
        "ended",
        "clean",
        "keep",
        "commit",
        "release",
        "dead_letter",
        "dead-letter after a write",
    ]
)
REPAIR_ENDINGS = st.sampled_from(["finish_repair", "die", "vanish", "keep", "release"])
PARTS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=2)
"""The places that a holder comes to, each in a transaction with its effect or not."""
WORK = st.tuples(st.just("work"), VERSIONS, OWNERS, st.sampled_from(Level), RARELY, ENDINGS, PARTS)
STEPS = st.one_of(
    WORK,
    WORK,
    WORK,
    st.tuples(st.just("repair"), OWNERS, REPAIR_ENDINGS, VERSIONS),
    st.tuples(st.just("echo"), st.integers(0, 2), ENDINGS, RARELY),
    st.tuples(st.just("part"), st.integers(0, 2), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([1.0, LEASE_S, REDELIVERY_S, RETENTION_S + 1])),
    st.tuples(st.just("prune")),
    st.tuples(st.just("transact"), st.integers(1, 4), st.booleans()),
)


class History:
    """Plays the steps of one history into the second book."""

    def __init__(self, policy: LedgerPolicy) -> None:
        self.book = SecondBook(policy)

    def play(self, step: tuple[Any, ...]) -> None:
        name, *details = step
        getattr(self, name)(*details)
        self.book.check()

    def work(
        self, version: int | None, owner: str, level: Level, late: bool, ending: str, parts: list[tuple[int, bool]]
    ) -> None:
        """A worker asks, and goes this way if it gets the key."""
        claim = self.book.claim(version, owner, level=level, late=late)
        if claim is not None:
            for place, once in parts:
                self.book.advance(claim, place, once=once)
            self._end(claim, ending, len(parts))

    def part(self, back: int, place: int, once: bool) -> None:
        """A holder has written one more part, or says so late, or twice."""
        if back < len(self.book.claims) and self.book.claims[-1 - back].order is not None:
            self.book.advance(self.book.claims[-1 - back], place, once=once)

    def repair(self, owner: str, ending: str, version: int | None) -> None:
        claim = self.book.exclude(owner)
        if claim is not None:
            self._end_repair(claim, ending, version)

    def echo(self, back: int, ending: str, overdue: bool) -> None:
        """The word of a holder comes late, or twice."""
        if back >= len(self.book.claims):
            return
        claim = self.book.claims[-1 - back]
        if claim.order is None:
            self._end_repair(claim, "finish_repair" if ending == "commit" else "release", None)
        elif ending == "commit":
            self.book.commit(claim, overdue=overdue)
        elif ending not in {"vanish", "die", "keep"}:
            self._end(claim, ending)
        else:
            self.book.renew(claim)

    def wait(self, seconds: float) -> None:
        self.book.key.wait(seconds)

    def prune(self) -> None:
        self.book.key.wait(REDELIVERY_S)
        self.book.prune()

    def transact(self, version: int, bad: bool) -> None:
        if self.book.key.policy.intents:
            return
        if bad:
            self.book.fail_unclaimed(version)
        else:
            self.book.transact(version)

    def _end(self, claim: Any, ending: str, extent: int | None = None) -> None:
        match ending:
            case "commit":
                self.book.commit(claim, extent=extent)
            case "release":
                self.book.release(claim)
            case "dead_letter":
                self.book.dead_letter(claim, Certainty.CLEAN)
            case "dead-letter after a write":
                self.book.dead_letter(claim, Certainty.ENDED)
            case "clean" | "ended" | "unknown":
                self.book.fail(claim, Certainty(ending), retry_s=2.0)
            case _:
                self._leave(claim, ending)

    def _end_repair(self, claim: Any, ending: str, version: int | None) -> None:
        match ending:
            case "finish_repair":
                self.book.finish_repair(claim, version)
            case "release":
                self.book.release(claim)
            case _:
                self._leave(claim, ending)

    def _leave(self, claim: Any, ending: str) -> None:
        if ending == "die":
            self.book.renew(claim)
        if ending in {"die", "vanish"}:
            self.book.key.wait(LEASE_S)


@pytest.mark.parametrize("policy", [PLAIN, SAFE], ids=["plain", "safe"])
@settings(max_examples=300)
@example(
    steps=[
        ("work", 3, "w1", Level.USUAL, False, "vanish", []),
        ("work", 3, "w1", Level.USUAL, False, "vanish", []),
        ("work", 4, "w1", Level.USUAL, False, "ended", []),
        ("prune",),
        ("echo", 0, "commit", False),
        ("work", 3, "w1", Level.USUAL, False, "vanish", []),
    ]
)
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_every_history_of_a_key_keeps_the_invariants(policy: LedgerPolicy, steps: list[tuple[Any, ...]]):
    """The mark never falls, a grant is above it, nobody holds a key twice, and a doubt defers what is older."""
    history = History(policy)
    for step in steps:
        history.play(step)
