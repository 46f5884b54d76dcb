"""Random histories of one key whose sink moves from target to target while workers and operators go on."""

import random

from msgspec.structs import replace

from core.one_key import LEASE_S
from keywise.core import rules
from keywise.core.change import ChangeHeader, Order, above, order_of
from keywise.core.controls import Controls, Move
from keywise.core.entry import Claim, Commit, CommitResult, Entry, LeaseTerms, LedgerPolicy, Level, Refusal

STEPS = 40


class MoveHistory:
    """One seeded history. It notes what breaks a promise.

    Whoever has written notes it under the name, as a sink does: what is written after the last pass is lost, unless
    the barrier keeps it out.
    """

    def __init__(self, seed: int, policy: LedgerPolicy) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.now = 1000.0
        self.entry: Entry | None = None
        self.controls = Controls()
        self.live: Order | None = None
        """What the target of the name holds."""
        self.other: Order | None = None
        """What the target that is built holds."""
        self.is_copied = False
        """The last pass is over, and nothing may be written until the barrier is lifted."""
        self.held: list[Claim] = []
        """Claims of workers that have not ended; the last one may still hold the key."""
        self.version = 0
        self.tokens = 0
        self.lost_tokens: list[int] = []
        """Those of coordinators that another one has taken over from, or whose barrier was lifted."""
        self.violations: list[str] = []

    def run(self) -> list[str]:
        swap = (self._set, self._last_pass, self._last_pass, self._swap, self._swap)
        acts = (*swap, self._work, self._work, self._end, self._end, self._die, self._transact, self._operate)
        for _ in range(STEPS):
            self.rng.choice((*acts, self._take_over, self._call_off, self._late_coordinator))()
        self._lift()
        if self.live != self._mark():
            self.violations.append(f"the mark is {self._mark()}, and the live target holds {self.live}")
        return self.violations

    # Workers and operators.

    def _work(self) -> None:
        """Claim a newer version; whether and when its write comes, another step says."""
        self.version += 1
        claim = self._ask(ChangeHeader("a", order_of(self.version)), LeaseTerms("w1", LEASE_S, Level.ALONE))
        if claim is not None:
            self.held.append(claim)

    def _end(self) -> None:
        """A worker writes, and commits; a sink in the ledger's database rolls back with a commit that is refused."""
        if not self.held:
            return
        claim = self.held.pop()
        if self.entry is None or self.entry.token != claim.token or self.now >= self.entry.lease_until:
            return  # The worker knows its own deadline, and does not write.
        self.entry, result = rules.commit(self.entry, Commit(claim), self.now, self.policy)
        if result is CommitResult.COMMITTED:
            self._write(claim.order)

    def _die(self) -> None:
        self.now += LEASE_S

    def _transact(self) -> None:
        """Decide and write in one transaction, without a claim."""
        self.version += 1
        header = ChangeHeader("a", order_of(self.version))
        if rules.decide_under(self.controls, self.entry, header, self.now, self.policy) is None:
            self.entry = rules.mark(self.entry, header, self.now)
            self._write(header.order)

    def _operate(self) -> None:
        """Force the key: claim it despite pauses, above its mark."""
        if (mark := self._mark()) is None:
            return
        terms = LeaseTerms("operator", LEASE_S, Level.ALONE, despite_pause=True)
        claim = self._ask(ChangeHeader("a", above(mark)), terms)
        if claim is not None:
            self.entry, _ = rules.commit(self.entry, Commit(claim), self.now, self.policy)
            self._write(claim.order)

    def _write(self, order: Order | None) -> None:
        if self.is_copied:
            self.violations.append(f"{order} was written after the last pass")
        self.live = order

    # Coordinators.

    def _set(self) -> None:
        if self.controls.move is None:
            self.controls = replace(self.controls, move=Move("one", "other", self._token()))

    def _take_over(self) -> None:
        if (move := self.controls.move) is not None:
            self.lost_tokens.append(move.token)
            self.controls = replace(self.controls, move=replace(move, token=self._token()))

    def _last_pass(self) -> None:
        """Make sure that nothing is held, and copy the key; a live claim is waited for."""
        move = self.controls.move
        if move is None:
            return
        if self.entry is not None and self.entry.token != 0 and self.now < self.entry.lease_until:
            return
        terms = LeaseTerms("coordinator", LEASE_S, Level.ALONE, move_token=move.token)
        claim = self._ask(ChangeHeader("a", None), terms)
        if claim is None:
            self.violations.append("the swap cannot exclude a key that no worker holds")
            return
        self.entry = rules.release(self.entry, claim)
        self.other, self.is_copied = self._mark(), True

    def _swap(self) -> None:
        if self.controls.move is None or not self.is_copied:
            return
        self.live, self.other = self.other, self.live
        if self.live != self._mark():
            self.violations.append(f"the mark is {self._mark()}, and the new target holds {self.live}")
        self._lift()

    def _call_off(self) -> None:
        self._lift()

    def _late_coordinator(self) -> None:
        """One that has lost the barrier goes on with its last pass."""
        if self.controls.move is None or not self.lost_tokens:
            return
        terms = LeaseTerms("late", LEASE_S, Level.ALONE, move_token=self.rng.choice(self.lost_tokens))
        if self._ask(ChangeHeader("a", order_of(self.version + 1)), terms) is not None:
            self.violations.append("a coordinator that has lost the barrier passes it")

    def _lift(self) -> None:
        if (move := self.controls.move) is not None:
            self.lost_tokens.append(move.token)
        self.controls, self.is_copied = replace(self.controls, move=None), False

    def _token(self) -> int:
        self.tokens += 1
        return self.tokens

    def _ask(self, header: ChangeHeader, terms: LeaseTerms) -> Claim | None:
        answer: Refusal | None = rules.decide_under(self.controls, self.entry, header, self.now, self.policy, terms)
        if answer is not None:
            return None
        self.entry, claim = rules.grant(self.entry, header, self._token(), self.now, terms, self.policy)
        return claim

    def _mark(self) -> Order | None:
        return self.entry.mark if self.entry is not None else None
