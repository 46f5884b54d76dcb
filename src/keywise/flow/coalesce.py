"""A batch that waits for nothing: the newest change of each key, and who follows it."""

from collections.abc import Container, Iterable, Sequence

import msgspec

from keywise.core.change import Order, Outcome
from keywise.flow.lanes import SettledByOutcome, SettledTicket, Ticket, is_at_or_below


class Coalesced(msgspec.Struct):
    """A batch with one change per key, and who follows whom."""

    survivors: list[Ticket]
    followers: dict[str, list[Ticket]]
    upto: dict[str, Order] = {}
    """The order of the survivor, for each key with followers."""

    def followed(self, apart: Container[str]) -> SettledByOutcome:
        """What ends together with the survivors that were committed: all but those of some keys."""
        superseded: list[Ticket] = []
        duplicates: list[Ticket] = []
        for key, others in self.followers.items():
            if key not in apart:
                upto = self.upto[key]
                for other in others:
                    (duplicates if other.change.order == upto else superseded).append(other)
        settled: SettledByOutcome = {Outcome.SUPERSEDED: superseded, Outcome.DUPLICATE: duplicates}
        return {outcome: tickets for outcome, tickets in settled.items() if tickets}


def coalesce(tickets: Sequence[Ticket]) -> Coalesced:
    """The newest change of each key, for a batch that waits for nothing."""
    newest: dict[str, Ticket] = {}
    followers: dict[str, list[Ticket]] = {}
    for ticket in tickets:
        change = ticket.change
        known = newest.setdefault(change.key, ticket)
        if known is ticket:
            continue
        older = ticket
        if change.order > known.change.order:
            newest[change.key], older = ticket, known
        followers.setdefault(change.key, []).append(older)
    upto = {key: newest[key].change.order for key in followers}
    for key, tickets_of_key in followers.items():
        # A change that cannot be compared with the survivor follows nobody; it stays for the next batch.
        followers[key] = [ticket for ticket in tickets_of_key if is_at_or_below(ticket, upto[key])]
    return Coalesced(list(newest.values()), followers, upto)


def group_by_outcome(settled: Iterable[SettledTicket]) -> SettledByOutcome:
    """What settled, by outcome."""
    settled_by_outcome: SettledByOutcome = {}
    for ticket, outcome in settled:
        settled_by_outcome.setdefault(outcome, []).append(ticket)
    return settled_by_outcome
