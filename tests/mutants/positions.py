"""Variants that break one clause of the rule on positions: what an object in parts resumes at, and when it does not."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keywise.core import rules
from keywise.core.change import ChangeHeader
from keywise.core.entry import Advance, Certainty, Claim, Commit, CommitResult, Entry, LeaseTerms, LedgerPolicy
from keywise.core.sink import Grade
from keywise.flow.heartbeat import Heartbeat
from mutants.mutant import Mutant

_grant, _advance, _commit, _release = rules.grant, rules.advance, rules.commit, rules.release
_dead_letter = rules.dead_letter


def _given_to_any_order(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    if entry is not None and header.order is not None and entry.position is not None:
        entry = replace(entry, advanced=header.order)
    return _grant(entry, header, token, now, terms, policy)


def _kept_beside_another_order(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    is_other = entry is not None and entry.position is not None and header.order not in (None, entry.advanced)
    return (replace(after, position=entry.position, advanced=entry.advanced), claim) if is_other else (after, claim)


def _lost_at_takeover(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    if entry is not None and entry.token != 0:
        entry = rules._without_position(entry)
    return _grant(entry, header, token, now, terms, policy)


def _extent_of_an_order(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    if entry is not None and header.order is not None and header.order != entry.tried:
        entry = replace(entry, extent=0)
    return _grant(entry, header, token, now, terms, policy)


def _by_any_token(entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True) -> Entry | None:
    if entry is not None and entry.token:
        advance = replace(advance, claim=replace(advance.claim, token=entry.token))
    return _advance(entry, advance, now, is_repeatable=is_repeatable)


def _backwards(entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True) -> Entry | None:
    kept = entry.position.place if entry is not None and entry.position is not None else 0
    if entry is None or not is_repeatable or advance.position.place >= kept:
        return _advance(entry, advance, now, is_repeatable=is_repeatable)
    return _advance(rules._without_position(entry), advance, now)


def _nothing_forgiven(entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True) -> Entry | None:
    after = _advance(entry, advance, now, is_repeatable=is_repeatable)
    return after and entry and replace(after, attempts=entry.attempts, crashes=entry.crashes, deaths=entry.deaths)


def _crashes_not_forgiven(
    entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True
) -> Entry | None:
    after = _advance(entry, advance, now, is_repeatable=is_repeatable)
    return after and entry and replace(after, crashes=entry.crashes, deaths=entry.deaths)


def _repetition_forgives(
    entry: Entry | None, advance: Advance, now: float, *, is_repeatable: bool = True
) -> Entry | None:
    after = _advance(entry, advance, now, is_repeatable=is_repeatable)
    return after and replace(after, attempts=0, crashes=0, deaths=rules.Level.USUAL, late_deaths=0)


def _kept_by_commit(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    after, result = _commit(entry, commit, now, policy)
    if entry is None or after is None or entry.position is None:
        return after, result
    return replace(after, position=entry.position, advanced=entry.advanced), result


def _extent_falls_too_far(
    entry: Entry | None, commit: Commit, now: float, policy: LedgerPolicy
) -> tuple[Entry | None, CommitResult]:
    return _commit(entry, replace(commit, extent=0 if commit.extent is not None else None), now, policy)


def _released(entry: Entry | None, claim: Claim) -> Entry | None:
    after = _release(entry, claim)
    is_mine = entry is not None and entry.token == claim.token
    return rules.kept(rules._without_position(after)) if after is not None and is_mine else after


def _dropped_with_letter(
    entry: Entry | None, claim: Claim, certainty: Certainty, now: float, policy: LedgerPolicy
) -> Entry | None:
    after = _dead_letter(entry, claim, certainty, now, policy)
    return rules.kept(rules._without_position(after)) if after is not None else None


def _not_noted(self: Heartbeat, advances: Sequence[Any]) -> None:
    return None


POSITIONS = (
    Mutant("a position is given to another order", 23, rules, "grant", _given_to_any_order),
    Mutant("a position is kept beside another order", 23, rules, "grant", _kept_beside_another_order),
    Mutant("a takeover loses the position", 23, rules, "grant", _lost_at_takeover, Grade.ATOMIC),
    Mutant("an old token advances", 23, rules, "advance", _by_any_token, Grade.CONDITIONAL),
    Mutant("a place goes backwards", 23, rules, "advance", _backwards, Grade.CONDITIONAL),
    Mutant("progress forgives nothing", 23, rules, "advance", _nothing_forgiven, Grade.ATOMIC),
    Mutant("progress does not forgive crashes", 23, rules, "advance", _crashes_not_forgiven),
    Mutant("a repeated place counts as progress", 23, rules, "advance", _repetition_forgives, Grade.CONDITIONAL),
    Mutant("a commit keeps the position", 23, rules, "commit", _kept_by_commit),
    Mutant("a release drops the position", 23, rules, "release", _released),
    Mutant("a dead letter drops the position", 23, rules, "dead_letter", _dropped_with_letter),
    Mutant("an extent belongs to an order", 23, rules, "grant", _extent_of_an_order, Grade.CONDITIONAL),
    Mutant("a commit forgets what it has not deleted", 23, rules, "commit", _extent_falls_too_far, Grade.CONDITIONAL),
    Mutant("a holder does not note its progress", 23, Heartbeat, "advanced", _not_noted),
)
