"""Random histories of one key: whatever happens in whatever order, the invariants of the protocol hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keywise import rules
from keywise.change import Order, Want, is_unversioned, order_of
from keywise.rules import Answer, Certainty, Claim, Refusal, Verdict
from unit.one_key import LEASE_S, PLAIN, REDELIVERY_S, RETENTION_S, SAFE, OneKey

VERSIONS = st.sampled_from([1, 2, 3, 1, 2, 3, 4, 5, None])
OWNERS = st.sampled_from(["w1", "w2", "w3"])
PAUSES_S = st.sampled_from([LEASE_S, LEASE_S / 2, LEASE_S, REDELIVERY_S, REDELIVERY_S * 4])
RARELY = st.sampled_from([False] * 7 + [True])
NOTHING = (0, -(2**63) - 1, 0)
"""Below every order."""


class History(RuleBasedStateMachine):
    """One key, some workers, and a second book that is kept in the simplest way."""

    @initialize(policy=st.sampled_from([PLAIN, SAFE]))
    def begin(self, policy: rules.Policy) -> None:
        self.key = OneKey(policy)
        self.claims: list[Claim] = []
        """All that were ever granted."""
        self.ended: set[int] = set()
        self.until: dict[int, float] = {}
        """By token, the end of its lease."""
        self.mark: Order | None = None
        self.doubts: dict[Order, float] = {}
        """Orders that may be in the sink without being committed, each with the time when it is dropped."""
        self.failures: dict[Order, int] = {}
        self.asked: dict[int, tuple[str, bool]] = {}
        """By token, who asked and whether alone."""
        self.begun: set[int] = set()
        """Tokens that were renewed: the work under them has begun."""
        self.given_up: set[int] = set()
        """Tokens whose holder said that the outcome is unknown."""

    # What happens.

    @rule(version=VERSIONS, owner=OWNERS, alone=st.booleans(), late=RARELY)
    def a_change_is_claimed(self, version: int | None, owner: str, alone: bool, late: bool) -> None:
        want = self.key.want(version, late=late, deleted=version == 3)
        before, holder, doubts = self.key.entry, self._live_holder(), self._unresolved()
        suspect = self.key.suspect
        answer = self.key.ask_for(want, owner, alone=alone)
        if isinstance(answer, Refusal):
            assert before == self.key.entry, "a refusal costs nothing"
            self._check_refusal(want, answer, holder)
            return
        assert holder is None, "no two live holders"
        assert want.order > (self.mark or NOTHING), "a grant is above the mark"
        tried = before.tried if before else None
        assert not (self._is_late(want) and self.mark is None) or want.order == tried, "a forgotten key is not judged"
        assert self.mark is None or is_unversioned(self.mark) == is_unversioned(want.order)
        newer = [order for order, until in doubts.items() if order > want.order and self.key.now < until]
        assert newer == [], "an unknown write defers what is older"
        dropped = [order for order in doubts if order > want.order]
        taken_over = before is not None and before.token != 0
        grown = (bool(dropped) + taken_over) * self.key.policy.intents
        assert self.key.suspect == suspect + grown, "a takeover and a dropped doubt leave a suspect each"
        self._check_crashes(answer, owner, before, alone)
        self._granted(answer, [order for order in doubts if order <= want.order])
        self.asked[answer.token] = (owner, alone)

    @rule(owner=OWNERS)
    def a_repair_claims(self, owner: str) -> None:
        holder, doubts = self._live_holder(), self._unresolved()
        answer = self.key.exclude(owner)
        if isinstance(answer, Refusal):
            assert answer.answer in {Answer.BUSY, Answer.DEFERRED}
            return
        assert holder is None, "no two live holders"
        self._granted(answer, list(doubts))
        self.asked[answer.token] = (owner, True)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def a_claim_is_renewed(self, data: st.DataObject) -> None:
        claim = self._any_claim(data)
        renewed = self.key.renew(claim)
        assert renewed == (self.key.entry is not None and claim.token == self._token() and not self._is_abandoned())
        if renewed:
            self.until[claim.token] = self.key.now + LEASE_S
            self.begun.add(claim.token)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), overdue=RARELY)
    def a_claim_is_committed(self, data: st.DataObject, overdue: bool) -> None:
        claim = self._any_claim(data)
        if claim.order is None:
            return
        claim.overdue = overdue
        suspect, mine = self.key.suspect, claim.token == self._token()
        verdict = self.key.commit(claim)
        if verdict is Verdict.COMMITTED:
            assert mine, "only the latest token commits"
            assert claim.order > (self.mark or NOTHING)
            self.ended.add(claim.token)
            self._marked(claim.order)
            after = self.key.entry
            claim.overdue = False
            assert self.key.commit(claim) is Verdict.ALREADY, "a commit may be repeated"
            assert after == self.key.entry
        elif verdict is Verdict.ALREADY:
            assert self.mark == claim.order
            assert not overdue
        else:
            assert self.mark != claim.order or overdue
            assert self.key.suspect == suspect + self.key.policy.intents

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), certainty=st.sampled_from(Certainty), retry_s=st.sampled_from([0.0, 3.0, 30.0]))
    def a_try_fails(self, data: st.DataObject, certainty: Certainty, retry_s: float) -> None:
        claim = self._any_claim(data)
        if claim.order is None:
            return  # A repair that fails leaves its lease to run out.
        before = self.key.entry
        mine = claim.token == self._token()
        self.key.fail(claim, certainty, retry_s)
        if not mine or claim.token in self.given_up:
            assert before == self.key.entry, "only the holder's own word counts, and only once"
            return
        assert self.key.entry.attempts == before.attempts + 1
        self.failures[claim.order] = self.failures.get(claim.order, 0) + 1
        if certainty is Certainty.UNKNOWN:
            assert self._token() == claim.token, "the lease has to run out by itself"
            self.given_up.add(claim.token)
            assert not self.key.renew(claim)
            return
        self.ended.add(claim.token)
        if certainty is Certainty.ENDED and self.key.policy.intents:
            self.doubts.setdefault(claim.order, self.key.now + REDELIVERY_S)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def a_claim_is_released(self, data: st.DataObject) -> None:
        claim, before = self._any_claim(data), self.key.entry
        mine = claim.token == self._token()
        self.key.release(claim)
        if not mine:
            assert before == self.key.entry
            return
        self.ended.add(claim.token)
        assert (before.attempts, before.suspect) == self._counts()

    @precondition(lambda self: self.claims and self.key.entry is not None and self.key.entry.token)
    @rule(certainty=st.sampled_from(Certainty))
    def the_holder_buries(self, certainty: Certainty) -> None:
        claim = self.claims[-1]
        suspect = self.key.suspect
        self.key.bury(claim, certainty)
        self.ended.add(claim.token)
        if claim.order is None:
            return
        assert all(order <= claim.order for order in self.doubts), "nothing is claimed below a doubt"
        if self.key.policy.intents and (self.doubts or certainty is not Certainty.CLEAN):
            assert self.key.suspect > suspect, "the buried change may be in the sink all the same"
        self._resolve(claim.order)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), version=VERSIONS)
    def a_repair_ends(self, data: st.DataObject, version: int | None) -> None:
        claim, before = self._any_claim(data), self.key.entry
        if claim.order is not None:
            return
        written = None if version is None else Want("a", order_of(version))
        mine = claim.token == self._token()
        self.key.mend(claim, written)
        if not mine:
            assert before == self.key.entry
            return
        self.ended.add(claim.token)
        self.doubts = {order: until for order, until in self.doubts.items() if self.key.now < until}
        grown = before.suspect != claim.suspect
        assert self.key.suspect == (before.suspect if grown else 0), "a suspicion that has grown stays"
        if written is not None and written.order > (self.mark or NOTHING):
            self._marked(written.order)

    @rule(version=VERSIONS)
    def a_transaction_marks(self, version: int | None) -> None:
        if self.key.policy.intents:
            return
        holder, order = self._live_holder(), order_of(version)
        if self.key.transact(version) is None:
            assert holder is None
            assert order > (self.mark or NOTHING)
            self._marked(order)

    @rule(seconds=PAUSES_S)
    def time_passes(self, seconds: float) -> None:
        self.key.wait(seconds)

    @rule(retention_s=st.sampled_from([RETENTION_S, RETENTION_S * 2]))
    def the_ledger_is_pruned(self, retention_s: float) -> None:
        before = self.key.entry
        if self.key.prune(retention_s):
            assert (before.token, before.unknown, before.suspect) == (0, None, 0), "only what is idle is forgotten"
            assert before.updated_at < self.key.now - retention_s - REDELIVERY_S
            self.mark = None

    # What holds at all times.

    @invariant()
    def the_mark_is_what_was_committed_last_and_never_falls(self) -> None:
        entry = self.key.entry
        assert self.mark == (entry.mark if entry else None)

    @invariant()
    def an_entry_that_remembers_nothing_is_not_kept_when_idle(self) -> None:
        entry = self.key.entry
        if entry is not None:
            assert rules.kept(entry) is not None
            assert entry.token or (entry.owner, entry.intent, entry.lease_until) == ("", None, 0.0)

    # The second book.

    def _check_refusal(self, want: Want, refusal: Refusal, holder: Claim | None) -> None:
        match refusal.answer:
            case Answer.STALE:
                assert want.order < self.mark
            case Answer.DUPLICATE:
                assert want.order == self.mark
            case Answer.MIXED:
                assert is_unversioned(want.order) != is_unversioned(self.mark)
            case Answer.FORGOTTEN:
                assert self._is_late(want)
                assert self.mark is None
            case Answer.ALONE:
                assert holder is None
                assert self._token() != 0
            case _:
                assert refusal.wait_s > 0

    def _check_crashes(self, claim: Claim, owner: str, before: rules.Entry | None, alone: bool) -> None:
        """A death counts if its holder was alone with this very change, and is not the one who asks."""
        last = self.claims[-1] if self.claims else None
        if before is None or before.token == 0 or last.token in self.given_up or self.asked[last.token][0] == owner:
            assert claim.crashes in {0, before.crashes if before else 0}
            return
        if before.tried is not None and claim.order < before.tried:
            return  # It waited until the change that somebody died with can no longer arrive.
        assert alone, "after a death nothing runs beside the next try"
        same = last.order == claim.order == before.tried
        blamed = last.token in self.begun and self.asked[last.token][1]
        assert claim.crashes == (before.crashes + blamed if same else self._inherited(claim, before))

    def _inherited(self, claim: Claim, before: rules.Entry) -> int:
        """The death of a repair is not blamed on the change that waited for it."""
        return before.crashes if claim.order == before.tried else 0

    def _granted(self, claim: Claim, kept_doubts: list[Order]) -> None:
        assert all(claim.token > known.token for known in self.claims), "tokens are never reused"
        if claim.order is not None:
            assert claim.attempts <= self.failures.get(claim.order, 0), "only failed tries are counted"
        self.doubts = {order: until for order, until in self._unresolved().items() if order in kept_doubts}
        self.ended.update(known.token for known in self.claims)
        self.claims.append(claim)
        self.until[claim.token] = self.key.now + LEASE_S

    def _unresolved(self) -> dict[Order, float]:
        """Doubts, with the one that an expired lease leaves behind."""
        doubts = dict(self.doubts)
        last = self.claims[-1] if self.claims else None
        if last and last.token not in self.ended and last.order is not None and self.key.policy.intents:
            highest = max(doubts, default=NOTHING)
            if last.order > highest:
                doubts[last.order] = self.until[last.token] + REDELIVERY_S
        return doubts

    def _marked(self, order: Order) -> None:
        assert order > (self.mark or NOTHING), "the mark never falls"
        self.mark = order
        if self.claims:
            self.ended.add(self.claims[-1].token)
        self._resolve(order)

    def _resolve(self, order: Order) -> None:
        self.doubts = {doubt: until for doubt, until in self.doubts.items() if doubt > order}
        self.failures.pop(order, None)

    def _is_late(self, want: Want) -> bool:
        return want.sent_at < self.key.now - RETENTION_S

    def _live_holder(self) -> Claim | None:
        last = self.claims[-1] if self.claims else None
        if last is None or last.token in self.ended or self.until[last.token] <= self.key.now:
            return None
        return last

    def _any_claim(self, data: st.DataObject) -> Claim:
        """Mostly the last one, but the word of an earlier holder may come at any time."""
        newest_first = st.integers(0, min(2, len(self.claims) - 1))
        return self.claims[-1 - data.draw(newest_first)]

    def _token(self) -> int:
        return self.key.entry.token if self.key.entry else 0

    def _is_abandoned(self) -> bool:
        return self.key.entry is not None and self.key.entry.abandoned

    def _counts(self) -> tuple[int, int]:
        entry = self.key.entry
        return (entry.attempts, entry.suspect) if entry else (0, 0)


History.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_every_history_of_a_key_keeps_the_invariants = History.TestCase
