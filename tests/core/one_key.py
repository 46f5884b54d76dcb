"""One key of a ledger, driven by the pure rules: what tests of the rules act on."""

from keywise.core import rules
from keywise.core.change import ChangeHeader, Order, order_of
from keywise.core.entry import (
    Advance,
    Certainty,
    Claim,
    Commit,
    CommitResult,
    Entry,
    LeaseTerms,
    LedgerPolicy,
    Level,
    Phase,
    Position,
    Refusal,
)
from keywise.core.ledger import Failure

LEASE_S = 10.0
REDELIVERY_S = 100.0
RETENTION_S = 200.0
PLAIN = LedgerPolicy(intents=True, redelivery_s=REDELIVERY_S, retention_s=RETENTION_S)
"""A sink that would show stale state if an older write followed a newer one."""
SAFE = LedgerPolicy(intents=False, redelivery_s=REDELIVERY_S, retention_s=RETENTION_S)
"""A sink that refuses older writes by itself, or shares the ledger's transaction."""


class OneKey:
    """An entry, a clock and a sequence of tokens."""

    def __init__(self, policy: LedgerPolicy = PLAIN, entry: Entry | None = None) -> None:
        self.policy = policy
        self.entry = entry
        self.now = 1000.0
        self._tokens = 0

    def header(self, version: int | None, *, deleted: bool = False, late: bool = False) -> ChangeHeader:
        sent_at = self.now - RETENTION_S - 1 if late else self.now
        return ChangeHeader("a", order_of(version), deleted, sent_at)

    def ask(
        self, version: int | None, owner: str = "w1", *, level: Level = Level.USUAL, **more: bool
    ) -> Claim | Refusal:
        return self.ask_for(self.header(version, **more), owner, level=level)

    def exclude(self, owner: str = "w1", *, level: Level = Level.ALONE) -> Claim | Refusal:
        """Ask for exclusion only, as a repair does."""
        return self.ask_for(ChangeHeader("a", None), owner, level=level)

    def ask_for(self, header: ChangeHeader, owner: str = "w1", *, level: Level = Level.USUAL) -> Claim | Refusal:
        terms = LeaseTerms(owner, LEASE_S, level)
        refusal = rules.decide(self.entry, header, self.now, self.policy, terms)
        if refusal is not None:
            return refusal
        self._tokens += 1
        self.entry, claim = rules.grant(self.entry, header, self._tokens, self.now, terms, self.policy)
        return claim

    def take(self, version: int | None, owner: str = "w1", *, level: Level = Level.USUAL, **more: bool) -> Claim:
        """Ask, and be sure to get it."""
        answer = self.ask(version, owner, level=level, **more)
        assert isinstance(answer, Claim), answer
        return answer

    def transact(self, version: int | None, **more: bool) -> Refusal | None:
        """Decide and mark in a transaction that takes no claim."""
        header = self.header(version, **more)
        refusal = rules.decide(self.entry, header, self.now, self.policy)
        if refusal is None:
            self.entry = rules.mark(self.entry, header, self.now)
        return refusal

    def renew(self, claim: Claim, phase: Phase = Phase.CLAIMED) -> bool:
        entry = rules.renew(self.entry, claim, self.now, LEASE_S, phase)
        if entry is not None:
            self.entry = entry
        return entry is not None

    def advance(
        self,
        claim: Claim,
        place: int,
        note: bytes = b"",
        *,
        extent: int = 0,
        once: bool = False,
        restart: Order | None = None,
    ) -> bool:
        """Keep a position; with `once`, as in a transaction that holds the effect of the part."""
        one = Advance(claim, Position(place, note), extent, restart)
        entry = rules.advance(self.entry, one, self.now, is_repeatable=not once)
        if entry is not None:
            self.entry = entry
        return entry is not None

    def commit(
        self,
        claim: Claim,
        *,
        overdue: bool = False,
        extent: int | None = None,
        note: bytes = b"",
        repairs: bool = False,
    ) -> CommitResult:
        commit = Commit(claim, overdue, extent, note, repairs)
        self.entry, result = rules.commit(self.entry, commit, self.now, self.policy)
        return result

    def fail(
        self,
        claim: Claim,
        certainty: Certainty,
        retry_s: float = 1.0,
        *,
        overdue: bool = False,
        counts_attempt: bool = True,
    ) -> None:
        failure = Failure(claim, certainty, retry_s, overdue, counts_attempt)
        self.entry = rules.fail(self.entry, failure, self.now, self.policy)

    def fail_unclaimed(self, version: int) -> int:
        self.entry = rules.fail_unclaimed(self.entry, self.header(version), self.now)
        return self.entry.attempts

    def mark_suspect(self, version: int) -> None:
        """It was written without a claim."""
        self.entry = rules.mark_suspect(self.entry, self.header(version), self.now, self.policy)

    def release(self, claim: Claim) -> None:
        self.entry = rules.release(self.entry, claim)

    def dead_letter(self, claim: Claim, certainty: Certainty = Certainty.CLEAN) -> None:
        self.entry = rules.dead_letter(self.entry, claim, certainty, self.now, self.policy)

    def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        self.entry = rules.finish_repair(self.entry, claim, written, self.now)

    def prune(self, retention_s: float) -> bool:
        gone = self.entry is not None and rules.is_prunable(self.entry, self.now, retention_s, self.policy)
        if gone:
            self.entry = None
        return gone

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def expire(self) -> None:
        """Let the lease of the holder run out."""
        assert self.entry is not None and self.entry.token, "nobody holds the key"
        self.now = max(self.now, self.entry.lease_until)

    def die(self, claim: Claim, phase: Phase = Phase.BEGUN) -> None:
        """Let the holder begin its work and never be heard of again."""
        assert self.renew(claim, phase)
        self.expire()

    def climb(self, version: int | None, level: Level) -> Claim:
        """Let workers die with a change until it is granted at a level, and return that claim."""
        claim = self.take(version, "first", level=Level.ALONE)
        while claim.level < level:
            self.die(claim)
            claim = self.take(version, f"after {claim.token}", level=Level.ALONE)
        return claim

    @property
    def suspicions(self) -> int:
        return self.entry.suspicions if self.entry else 0


def committed(version: int | None, policy: LedgerPolicy = PLAIN, *, deleted: bool = False) -> OneKey:
    """A key whose mark is at a version."""
    key = OneKey(policy)
    key.commit(key.take(version, deleted=deleted))
    return key
