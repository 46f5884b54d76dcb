"""A second book about one key, kept in the simplest way: every act of the rules is checked against it."""

from core.one_key import LEASE_S, REDELIVERY_S, RETENTION_S, OneKey
from keywise.core import rules
from keywise.core.change import ChangeHeader, Order, is_unversioned, order_of
from keywise.core.controls import PLAIN
from keywise.core.entry import Certainty, Claim, CommitResult, Entry, LedgerPolicy, Level, Phase, Refusal, RefusalReason

NOTHING = (0, -(2**63) - 1, 0)
"""Below every order."""


class SecondBook:
    """One key, some workers, and what must be true of them."""

    def __init__(self, policy: LedgerPolicy) -> None:
        self.key = OneKey(policy)
        self.claims: list[Claim] = []
        """All that were ever granted."""
        self.ended: set[int] = set()
        self.begun: set[int] = set()
        """Tokens under which work has begun."""
        self.given_up: set[int] = set()
        """Tokens whose holder said that the outcome is unknown."""
        self.owners: dict[int, str] = {}
        """By token, who asked."""
        self.until: dict[int, float] = {}
        """By token, the end of its lease."""
        self.mark: Order | None = None
        self.doubts: dict[Order, float] = {}
        """Orders that may be in the sink without being committed, each with the time when it is dropped."""
        self.failures: dict[Order, int] = {}
        self.position: tuple[Order, int] | None = None
        """The place that is kept, and its order."""
        self.extent = 0
        self.levels: dict[int, Level] = {}
        """By token, the level since its last progress."""

    # PipelineAdmin.

    def claim(self, version: int | None, owner: str, *, level: Level, late: bool) -> Claim | None:
        header = rules.current(self.key.header(version, late=late, deleted=version == 3), self.key.entry, PLAIN)
        before, holder, doubts, suspect = self.key.entry, self._live_holder(), self._unresolved(), self.key.suspicions
        answer = self.key.ask_for(header, owner, level=level)
        if isinstance(answer, Refusal):
            assert before == self.key.entry, "a refusal costs nothing"
            self._check_refusal(header, answer, holder, level)
            return None
        assert holder is None, "no two live holders"
        assert header.order > (self.mark or NOTHING), "a grant is above the mark"
        assert self.mark is None or is_unversioned(self.mark) == is_unversioned(header.order), "kinds do not mix"
        tried = before.tried if before else None
        under_way = self.position[0] if self.position else None
        known = (tried, before.advanced) if before else ()
        assert not (self._is_late(header) and self.mark is None) or header.order in known, (
            "a forgotten key is not judged"
        )
        assert under_way is None or header.order >= under_way or is_unversioned(header.order), (
            "an older change drops no position of a newer one"
        )
        assert not before or header.order > (tried or NOTHING) or self.key.now >= before.not_before, (
            "a retry is not due"
        )
        if before and tried and before.attempts and header.order < tried:
            assert self.key.now >= before.tried_at + REDELIVERY_S, "changes that fail do not take turns"
        self._check_doubts(header.order, doubts, suspect, took_over=before is not None and before.token != 0)
        self._check_crashes(answer, owner, before, level)
        # With the newest of them the others are dropped too: the key is suspect, and that covers them all.
        self.doubts = {} if max(doubts, default=NOTHING) > header.order else doubts
        self._granted(answer, owner)
        return answer

    def exclude(self, owner: str) -> Claim | None:
        before, holder, doubts, suspect = self.key.entry, self._live_holder(), self._unresolved(), self.key.suspicions
        answer = self.key.exclude(owner)
        if isinstance(answer, Refusal):
            assert before == self.key.entry, "a refusal costs nothing"
            assert answer.reason in {RefusalReason.BUSY, RefusalReason.DEFERRED}
            assert answer.wait_s > 0
            return None
        assert holder is None, "no two live holders"
        if before and before.token and before.tried is not None and self._died(owner):
            assert self.key.now >= before.lease_until + REDELIVERY_S, "a repair takes no turns with a killer"
        passed = bool(doubts) and self.key.now >= doubts[max(doubts)]
        grown = (passed + (before is not None and before.token != 0)) * self.key.policy.intents
        assert self.key.suspicions == suspect + grown, "a takeover and a dropped doubt leave a suspect each"
        self.doubts = {} if passed else doubts
        self._granted(answer, owner)
        return answer

    def renew(self, claim: Claim) -> None:
        renewed = self.key.renew(claim, Phase.BEGUN)
        assert renewed == (self._is_mine(claim) and claim.token not in self.given_up)
        if renewed:
            assert self.key.entry.lease_until == self.key.now + LEASE_S
            self.until[claim.token] = self.key.now + LEASE_S
            self.begun.add(claim.token)

    def advance(self, claim: Claim, place: int, *, once: bool) -> None:
        before, kept = self.key.entry, self.position[1] if self.position else -1
        holds = self._is_mine(claim) and claim.token not in self.given_up
        accepted = self.key.advance(claim, place, extent=place * 10, once=once)
        assert accepted == (holds and (place > kept if once else place >= kept)), (
            "only its holder moves it, and onwards"
        )
        if not accepted:
            assert before == self.key.entry
            return
        assert self.key.entry.updated_at == self.key.now
        assert (self.position or (claim.order,))[0] == claim.order, "a position of another order was dropped before"
        self.position, self.extent = (claim.order, place), max(self.extent, place * 10)
        counters = (self.key.entry.attempts, self.key.entry.crashes, self.key.entry.deaths, self.key.entry.late_deaths)
        if place > max(kept, 0):
            assert counters == (0, 0, Level.USUAL, 0), "progress forgives failures"
            self.failures.pop(claim.order, None)
            self.levels[claim.token] = Level.USUAL
        else:
            assert counters == (before.attempts, before.crashes, before.deaths, before.late_deaths)

    def commit(self, claim: Claim, *, overdue: bool = False, extent: int | None = None) -> None:
        before, mine = self.key.suspicions, self._is_mine(claim)
        result = self.key.commit(claim, overdue=overdue, extent=extent)
        if result is CommitResult.COMMITTED:
            assert mine, "only the latest token commits"
            self._marked(claim.order)
            self.extent = self.extent if extent is None else extent
            after = self.key.entry
            assert self.key.commit(claim) is CommitResult.ALREADY, "a commit may be repeated"
            assert after == self.key.entry
        elif result is CommitResult.ALREADY:
            assert self.mark == claim.order
            assert not overdue
            if mine:
                self.ended.add(claim.token)
                self.position = None
        else:
            assert self.mark != claim.order or overdue
            assert self.key.suspicions == before + self.key.policy.intents, "what was written may lie over newer state"

    def fail(self, claim: Claim, certainty: Certainty, retry_s: float) -> None:
        before, counts = self.key.entry, self._is_mine(claim) and claim.token not in self.given_up
        self.key.fail(claim, certainty, retry_s)
        if not counts:
            assert before == self.key.entry, "only the holder's own word counts, and only once"
            return
        assert self.key.entry.attempts == before.attempts + 1
        self.failures[claim.order] = self.failures.get(claim.order, 0) + 1
        if certainty is Certainty.UNKNOWN:
            assert self._is_mine(claim), "the lease has to run out by itself"
            self.given_up.add(claim.token)
            return
        self.ended.add(claim.token)
        if certainty is Certainty.ENDED and self.key.policy.intents:
            self.doubts.setdefault(claim.order, self.key.now + REDELIVERY_S)

    def release(self, claim: Claim) -> None:
        before, mine = self.key.entry, self._is_mine(claim)
        self.key.release(claim)
        if not mine:
            assert before == self.key.entry
            return
        self.ended.add(claim.token)
        entry = self.key.entry or rules.EMPTY
        assert (before.attempts, before.suspicions, before.unknown) == (entry.attempts, entry.suspicions, entry.unknown)

    def dead_letter(self, claim: Claim, certainty: Certainty) -> None:
        if not self._is_mine(claim):
            return
        suspect = self.key.suspicions
        self.key.dead_letter(claim, certainty)
        self.ended.add(claim.token)
        assert all(order <= claim.order for order in self.doubts), "nothing is claimed below a doubt"
        doubtful = self.key.policy.intents and (self.doubts or certainty is not Certainty.CLEAN)
        assert self.key.suspicions == suspect + bool(doubtful), "the buried change may be in the sink all the same"
        self._resolve(claim.order)
        assert (self.key.entry or rules.EMPTY).tried is None

    def finish_repair(self, claim: Claim, version: int | None) -> None:
        before, written = self.key.entry, None if version is None else ChangeHeader("a", order_of(version))
        mine = self._is_mine(claim)
        self.key.finish_repair(claim, written)
        if not mine:
            assert before == self.key.entry
            return
        self.ended.add(claim.token)
        self.doubts = {order: until for order, until in self.doubts.items() if self.key.now < until}
        grown = before.suspicions != claim.suspicions
        assert self.key.suspicions == (before.suspicions if grown else 0), "a suspicion that has grown stays"
        if written is not None:
            self.position = None
        if written is not None and written.order > (self.mark or NOTHING):
            self._marked(written.order)

    def transact(self, version: int) -> None:
        """Only where no intent is on: an atomic sink."""
        holder, order = self._live_holder(), order_of(version)
        if self.key.transact(version) is None:
            assert holder is None
            self._marked(order)

    def fail_unclaimed(self, version: int) -> None:
        if rules.decide(self.key.entry, self.key.header(version), self.key.now, self.key.policy) is not None:
            return
        before = self.key.entry or rules.EMPTY
        attempts = self.key.fail_unclaimed(version)
        assert attempts == (before.attempts if before.tried == order_of(version) else 0) + 1
        self.failures[order_of(version)] = self.failures.get(order_of(version), 0) + 1
        self.ended.update(known.token for known in self.claims)

    def prune(self) -> None:
        before = self.key.entry
        if self.key.prune(RETENTION_S):
            assert (before.token, before.unknown, before.suspicions) == (0, None, 0), "only what is idle is forgotten"
            assert before.updated_at < self.key.now - RETENTION_S - REDELIVERY_S
            assert not self.doubts, "a doubt is not forgotten"
            assert self.extent == 0, "what has to be deleted later is not forgotten"
            self.mark = self.position = None

    def check(self) -> None:
        """What holds at all times."""
        entry = self.key.entry
        assert self.mark == (entry.mark if entry else None), "the mark is what was committed last"
        place = entry.position.place if entry and entry.position else None
        assert self.position == (None if place is None else (entry.advanced, place)), "the position is what was kept"
        assert self.extent == (entry.extent if entry else 0)
        if entry is not None:
            assert rules.kept(entry) is not None, "an entry that remembers nothing is not kept"
            assert entry.token or (entry.owner, entry.intent, entry.lease_until) == ("", None, 0.0)
            assert self.key.policy.intents or (entry.suspicions, entry.intent, entry.unknown) == (0, None, None)

    # What is known.

    def _check_refusal(self, header: ChangeHeader, refusal: Refusal, holder: Claim | None, level: Level) -> None:
        match refusal.reason:
            case RefusalReason.STALE:
                assert header.order < self.mark
            case RefusalReason.DUPLICATE:
                assert header.order == self.mark
            case RefusalReason.MIXED:
                assert is_unversioned(header.order) != is_unversioned(self.mark)
            case RefusalReason.FORGOTTEN:
                assert self._is_late(header)
                assert self.mark is None
            case RefusalReason.PROBATION:
                assert holder is None
                assert refusal.level > level
            case _:
                assert refusal.wait_s > 0
                entry = self.key.entry
                blocked = entry.token or self.doubts or (entry.tried and header.order <= entry.tried)
                assert blocked, "nobody waits for nothing"

    def _check_doubts(self, order: Order, doubts: dict[Order, float], suspect: int, *, took_over: bool) -> None:
        newer = {doubt: until for doubt, until in doubts.items() if doubt > order}
        assert all(self.key.now >= until for until in newer.values()), "an unknown write defers what is older"
        grown = (bool(newer) + took_over) * self.key.policy.intents
        assert self.key.suspicions == suspect + grown, "a takeover and a dropped doubt leave a suspect each"

    def _check_crashes(self, claim: Claim, owner: str, before: Entry | None, level: Level) -> None:
        """A death counts if its holder was at work, alone with this very change, and is not the one who asks."""
        known = before.crashes if before and before.tried == claim.order else 0
        if before is None or before.token == 0 or not self._died(owner):
            assert claim.crashes == known
            return
        if before.tried is not None and claim.order < before.tried:
            assert self.key.now >= before.lease_until + REDELIVERY_S, "killers do not take turns"
            return
        last, last_level = self.claims[-1], self.levels[self.claims[-1].token]
        raised = last_level is Level.USUAL or last.token in self.begun
        assert claim.level == min(last_level + raised, Level.ALONE) <= level, "each death leaves less company"
        blamed = last.order == claim.order and last.token in self.begun and last_level is Level.ALONE
        assert claim.crashes == known + blamed

    def _died(self, owner: str) -> bool:
        last = self.claims[-1]
        return last.token not in self.given_up and self.owners[last.token] != owner

    def _granted(self, claim: Claim, owner: str) -> None:
        assert claim.order is None or claim.attempts <= self.failures.get(claim.order, 0), "only failures are counted"
        resumes = self.position is not None and self.position[0] == claim.order
        assert (claim.position and claim.position.place) == (self.position[1] if resumes else None)
        assert claim.extent == self.extent, "an extent belongs to no order"
        if claim.order is not None and not resumes:
            self.position = None
        self.levels[claim.token] = claim.level
        self.ended.update(known.token for known in self.claims)
        self.claims.append(claim)
        self.owners[claim.token] = owner
        self.until[claim.token] = self.key.now + LEASE_S

    def _unresolved(self) -> dict[Order, float]:
        """Doubts, with the one that a lease leaves behind when it runs out."""
        doubts = dict(self.doubts)
        last = self.claims[-1] if self.claims else None
        if last and last.token not in self.ended and last.order is not None and self.key.policy.intents:
            doubts.setdefault(last.order, self.until[last.token] + REDELIVERY_S)
        return doubts

    def _marked(self, order: Order) -> None:
        assert order > (self.mark or NOTHING), "the mark never falls"
        self.mark, self.position = order, None
        self.ended.update(known.token for known in self.claims)
        self._resolve(order)

    def _resolve(self, order: Order) -> None:
        self.doubts = {doubt: until for doubt, until in self.doubts.items() if doubt > order}
        self.failures.pop(order, None)

    def _is_mine(self, claim: Claim) -> bool:
        return bool(self.claims) and claim is self.claims[-1] and claim.token not in self.ended

    def _is_late(self, header: ChangeHeader) -> bool:
        return header.sent_at < self.key.now - RETENTION_S

    def _live_holder(self) -> Claim | None:
        last = self.claims[-1] if self.claims else None
        if last is None or last.token in self.ended or self.until[last.token] <= self.key.now:
            return None
        return last
