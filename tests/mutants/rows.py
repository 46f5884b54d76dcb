"""Variants that break the rule on rows of a reindex.

The random histories in `core/row_histories.py` find them; `reindex.py` beside this file has those of the simulator.
"""

from msgspec.structs import replace

from keywise.core import rules
from keywise.core.change import ChangeHeader, Order
from keywise.core.entry import Entry, LedgerPolicy, Refusal, RefusalReason
from mutants.mutant import Mutant

_against_mark = rules._against_mark


def _restored(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    return _against_mark(entry, replace(header, is_row=False), now, policy)


def _kept_removed_for_ever(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    refusal = _against_mark(entry, header, now, policy)
    is_removed = refusal is None and header.is_row and entry.deleted
    return Refusal(RefusalReason.REMOVED, mark=entry.mark) if is_removed else refusal


def _forced_write_refused(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    return _against_mark(entry, replace(header, is_row=True), now, policy)


def by_generation(entry: Entry, header: ChangeHeader, now: float, policy: LedgerPolicy) -> Refusal | None:
    mark, order = entry.mark, header.order
    if mark is None or order is None or order[1] == mark[1]:
        return _against_mark(entry, header, now, policy)
    return Refusal(RefusalReason.STALE, mark=mark) if _generation_first(order) < _generation_first(mark) else None


def _generation_first(order: Order) -> Order:
    era, version, generation = order
    return (era, generation, version)


ROWS = (
    Mutant("a row undoes a removal", 16, rules, "_against_mark", _restored),
    Mutant("a newer row does not restore a key", 16, rules, "_against_mark", _kept_removed_for_ever),
    Mutant("a forced write does not restore a key", 16, rules, "_against_mark", _forced_write_refused),
    Mutant("generation before version", 16, rules, "_against_mark", by_generation),
)
