"""Rows as deliveries and changes: each row is written at its own version, and at the generation of the run."""

from collections.abc import Iterable, Sequence
from typing import Any

from keywise.core.change import Change, Delivery, Order, above, is_unversioned
from keywise.core.controls import ReindexRun
from keywise.flow.intake import Intake, Malformed, MessageReader, ReadBatch
from keywise.flow.lanes import Ticket

UNVERSIONED = "the row has no version; only versioned rows can be reindexed"


class GoneKey(Delivery, frozen=True, gc=False):
    """The delivery of a key that the origin does not have any more, in place of its row."""

    key: str = ""
    order: Order = (0, 0, 0)
    """Just above the mark with which the key was found: a live change since then makes the deletion stale."""


def row_deliveries(name: str, rows: Iterable[bytes], sent_at: float) -> list[Delivery]:
    """Make a delivery of each row. `name` is unique among the pages that one worker hands over."""
    return [Delivery(f"{name}/{number}", 0, row, sent_at) for number, row in enumerate(rows)]


def gone_delivery(key: str, mark: Order, sent_at: float) -> GoneKey:
    """Make the delivery that deletes a key whose row is gone."""
    return GoneKey(f"gone/{key}", 0, b"", sent_at, key=key, order=above(mark))


class RowReader:
    """Reads rows as the pipeline reads its messages, and adds the generation of the run."""

    def __init__(self, reader: Intake, run: ReindexRun) -> None:
        self._reader = reader
        self._run = run

    def read(self, deliveries: Sequence[Delivery], source: int, now: float) -> ReadBatch:
        """Make a ticket of each row. A row that upstream has marked as deleted is a deletion."""
        gone = [one for one in deliveries if isinstance(one, GoneKey)]
        rows = [one for one in deliveries if not isinstance(one, GoneKey)] if gone else deliveries
        read_batch = self._reader.read(rows, source, now)
        if isinstance(self._reader, MessageReader):
            key_of = self._reader.key_of
            read_batch.malformed = [one._replace(key=key_of(one.delivery.body)) for one in read_batch.malformed]
        unversioned = [ticket for ticket in read_batch.tickets if is_unversioned(ticket.change.order)]
        if unversioned:
            read_batch.malformed += [Malformed(one.delivery, UNVERSIONED, key=one.change.key) for one in unversioned]
            read_batch.tickets = [one for one in read_batch.tickets if not is_unversioned(one.change.order)]
        if not self._run.is_beside:  # A run beside fills a new target, so its rows need no generation.
            self._set_generation(read_batch.tickets)
        read_batch.tickets += [Ticket(_deletion(one), one, source, now) for one in gone]
        return read_batch

    def read_one(self, body: bytes, delivery: Delivery | None = None) -> Change[Any]:
        """Read one row as the pipeline reads a message, without the generation: a repair does not belong to the run."""
        return self._reader.read_one(body, delivery)

    def _set_generation(self, tickets: Iterable[Ticket]) -> None:
        generation, is_row = self._run.generation, not self._run.also_removed
        for ticket in tickets:
            change = ticket.change
            era, version, _ = change.order
            change.order = (era, version, generation)
            change.is_row = is_row


def _deletion(delivery: GoneKey) -> Change[Any]:
    return Change(delivery.key, delivery.order, deleted=True, sent_at=delivery.sent_at)
