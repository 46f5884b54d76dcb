"""Tickets for tests that need no source: a key, a version, and the delivery that carried them."""

from keywise.core.change import Change, Delivery, order_of
from keywise.flow.lanes import SettledTicket, Ticket


def ticket(
    key: str, version: int | None, number: int | None = None, *, receipt: int = 1, source: int = 0, at: float = 0.0
) -> Ticket:
    """A change of a key at a version; the number of its message is made from both unless it is given."""
    identity = number if number is not None else f"{key}{version}"
    return Ticket(Change(key, order_of(version)), Delivery(identity, receipt, b"{}", 0.0), source, at)


def names(tickets: list[Ticket]) -> list[tuple[str, int | None]]:
    """Keys and versions, to compare with."""
    return [(one.change.key, one.change.version) for one in tickets]


def endings(settled: list[SettledTicket]) -> list[tuple[str, int | None, str]]:
    """Keys, versions and outcomes, to compare with."""
    return [(one.change.key, one.change.version, outcome.value) for one, outcome in settled]
