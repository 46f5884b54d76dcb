"""Intake of announced objects: it reads the deliveries of an `AnnouncementSource` as changes of objects."""

from collections.abc import Sequence
from typing import Any

from keywise.core.change import Change, Delivery
from keywise.core.errors import MalformedError
from keywise.flow.intake import Malformed, ReadBatch
from keywise.flow.lanes import Ticket
from keywise.ingest.announcement import decode_announcement
from keywise.ingest.announcement_source import AnnouncedDelivery
from keywise.ingest.notification import Skipped, SkipReason, Unreadable

MISDIRECTED_ADVICE = (
    "announcements of other stores are acked and counted as ignored; check store= of the pipeline and the URL of its "
    "queue; if both are right, announce each store to the pipeline that reads it"
)


class AnnouncementReader:
    """Reads announced objects. The key of a change is the object, and its body is the announcement."""

    decode = staticmethod(decode_announcement)

    def __init__(self) -> None:
        self._has_warned = False

    def read(self, deliveries: Sequence[Delivery], source: int, now: float) -> ReadBatch:
        """Make a ticket of each announced object; what announces none is ignored, or becomes a dead letter."""
        read_batch = ReadBatch()
        for delivery in deliveries:
            unused = delivery.unused if isinstance(delivery, AnnouncedDelivery) else None
            match unused:
                case Skipped(reason, detail):
                    read_batch.ignored.append((delivery, reason.value))
                    if reason is SkipReason.OTHER_BUCKET and not self._has_warned:
                        # A wrong `store` would ack the whole queue without a sign.
                        self._has_warned = True
                        read_batch.misdirected = (detail, MISDIRECTED_ADVICE)
                case Unreadable(cause):
                    read_batch.malformed.append(Malformed(delivery, cause))
                case None:
                    try:
                        change = self.read_one(delivery.body, delivery)
                    except MalformedError as error:
                        read_batch.malformed.append(Malformed(delivery, str(error)))
                    else:
                        read_batch.tickets.append(Ticket(change, delivery, source, now))
        return read_batch

    def read_one(self, body: bytes, delivery: Delivery | None = None) -> Change[Any]:
        """Read one announcement; raises `MalformedError` if it is none."""
        found = decode_announcement(body)
        change = found.change(delivery.sent_at if delivery is not None else float("inf"))
        change.body = body
        return change
