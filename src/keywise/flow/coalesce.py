"""Coalescing of a batch: the newest change of each key survives, and older ones follow it."""

from collections.abc import Container, Iterable, Sequence

import msgspec

from keywise.core.change import Order, Outcome
from keywise.flow.lanes import SettledByOutcome, SettledTicket, Ticket, is_at_or_below


class Coalesced(msgspec.Struct):
    """A batch with one change per key, and the followers of each."""

    survivors: list[Ticket]
    followers: dict[str, list[Ticket]]
    upto: dict[str, Order] = {}
    """The order of the survivor, for each key with followers."""

    def followed(self, apart: Container[str]) -> SettledByOutcome:
        """Return the followers that end with their committed survivors, by outcome; keys in `apart` are left out."""
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
    """Keep the newest change of each key. Unlike `Lanes`, this serves a batch in which no change has to wait."""
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
        # An unversioned change cannot be compared with a versioned survivor, so it is left for the next batch.
        followers[key] = [ticket for ticket in tickets_of_key if is_at_or_below(ticket, upto[key])]
    return Coalesced(list(newest.values()), followers, upto)


def group_by_outcome(settled: Iterable[SettledTicket]) -> SettledByOutcome:
    """Group settled tickets by outcome."""
    settled_by_outcome: SettledByOutcome = {}
    for ticket, outcome in settled:
        settled_by_outcome.setdefault(outcome, []).append(ticket)
    return settled_by_outcome
