"""Variants that break the rule on the barrier of a swap; the random histories in `core/move_histories.py` find them."""

from collections.abc import Callable

from msgspec.structs import replace

from keywise.core import rules
from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls
from keywise.core.entry import Entry, LeaseTerms, LedgerPolicy, Refusal, RefusalReason
from mutants.mutant import Mutant

_decide_under = rules.decide_under


def passed_by(passes: Callable[[LeaseTerms | None], bool]) -> Callable[..., Refusal | None]:
    """A rule that does not see the barrier if these terms pass it."""

    def decide_under(
        controls: Controls,
        entry: Entry | None,
        header: ChangeHeader,
        now: float,
        policy: LedgerPolicy,
        terms: LeaseTerms | None = None,
    ) -> Refusal | None:
        controls = replace(controls, move=None) if passes(terms) else controls
        return _decide_under(controls, entry, header, now, policy, terms)

    return decide_under


def _held_up(
    controls: Controls,
    entry: Entry | None,
    header: ChangeHeader,
    now: float,
    policy: LedgerPolicy,
    terms: LeaseTerms | None = None,
) -> Refusal | None:
    if controls.move is not None and terms is not None and terms.move_token:
        return Refusal(RefusalReason.PAUSED, rules.MOVE_LOOK_S)
    return _decide_under(controls, entry, header, now, policy, terms)


def _broken(name: str, broken: Callable[..., Refusal | None]) -> Mutant:
    return Mutant(name, 25, rules, "decide_under", broken)


MOVES = (
    _broken("a claim passes the barrier", passed_by(lambda terms: terms is not None and not terms.move_token)),
    _broken("a transaction passes the barrier", passed_by(lambda terms: terms is None)),
    _broken("an operator passes the barrier", passed_by(lambda terms: terms is not None and terms.despite_pause)),
    _broken("an old token passes the barrier", passed_by(lambda terms: terms is not None and terms.move_token > 0)),
    _broken("the barrier holds up its own swap", _held_up),
)
