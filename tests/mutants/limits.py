"""Variants of flow control and of what an operator sets: rates, debounce, room, pauses and eras."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keywise.adapters.memory.ledger import MemoryTransaction
from keywise.core import rules
from keywise.core.change import ChangeHeader, Order, Outcome
from keywise.core.controls import Controls
from keywise.core.entry import Claim, Entry, LedgerPolicy, Refusal
from keywise.core.sink import Grade
from keywise.flow.consumer import Consumer
from keywise.flow.lanes import SettledTicket
from keywise.operate import force
from mutants.mutant import Mutant

_decide_under, _take_in = rules.decide_under, Consumer._take_in


def _never_limited(entry: Entry, now: float, policy: LedgerPolicy) -> Refusal | None:
    return None


async def _charges_nothing(self: MemoryTransaction, headers: Sequence[ChangeHeader]) -> None:
    some = self._working_set
    for header in headers:
        entry = some.entry(header.key)
        some.set(header.key, rules.mark(entry, rules.in_era(header, entry, some.controls), some.now))


async def _gathered_are_acked(self: Consumer, index: int, deliveries: Any) -> None:
    await _take_in(self, index, deliveries)
    early: list[SettledTicket] = []
    for lane in self._lanes._lanes.values():
        newest = max(lane.waiting, key=lambda ticket: ticket.change.order, default=None)
        early += ((ticket, Outcome.SUPERSEDED) for ticket in lane.waiting if ticket is not newest)
    if self._pipeline.debounce is not None:
        await self._settlement.settle(early)


def _room_for_each(self: Consumer, index: int) -> int:
    return min(self._lanes.room, self._pipeline.settings.batch_max)


def _pause_unheard(controls: Controls, *arguments: Any) -> Refusal | None:
    return _decide_under(replace(controls, pauses=()), *arguments)


def _mark_is_dropped(entry: Entry | None, claim: Claim, controls: Controls) -> Entry | None:
    if entry is None or entry.token != claim.token:
        return None
    return Entry(updated_at=entry.updated_at, era=rules.era_of(entry, controls) + 1)


def _old_era(header: ChangeHeader, entry: Entry | None, controls: Controls) -> ChangeHeader:
    return header


def _above_the_next(mark: Order) -> Order:
    era, version, _ = mark
    return (era, version + 1, 0)


LIMITS = (
    Mutant("a forced write hides the next version", 16, force, "above", _above_the_next),
    Mutant("a rate is not heeded", 15, rules, "_against_rate", _never_limited),
    Mutant("a transaction is not charged", 15, MemoryTransaction, "mark", _charges_nothing, Grade.ATOMIC),
    Mutant("a debounce acks what it gathers", 4, Consumer, "_take_in", _gathered_are_acked),
    Mutant("two sources fill the same room", 15, Consumer, "_room_to_ask_for", _room_for_each),
    Mutant("a paused key still runs", 20, rules, "decide_under", _pause_unheard),
    Mutant("a paused key still runs in a transaction", 20, rules, "decide_under", _pause_unheard, Grade.ATOMIC),
    Mutant("a reset forgets the mark", 20, rules, "reset", _mark_is_dropped),
    Mutant("a change is judged in an old era", 20, rules, "in_era", _old_era),
    Mutant("a transaction marks in an old era", 20, rules, "in_era", _old_era, Grade.ATOMIC),
)
