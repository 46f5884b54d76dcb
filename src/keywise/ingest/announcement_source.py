"""A queue of notifications as a source of announced objects: one message may announce several of them."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Self

import msgspec

from keywise.core.change import Delivery
from keywise.core.errors import MalformedError, UnavailableError
from keywise.core.source import Backlog, HeaderSource, RedrivingSource, Source, backlog_of
from keywise.ingest.announcement import AnnouncedObject, announced, decode_announcement, is_announcement
from keywise.ingest.dialects import Dialect, read_notification
from keywise.ingest.notification import Announcement, ObjectEvent, ObjectSelection, Skipped, Unreadable
from keywise.ingest.versions import VersionScale, scale_conflict

FixScale = Callable[[str], Awaitable[str]]
"""`ControlStore.fix_scale`: it returns the scale that the first event of the pipeline has fixed."""


class AnnouncedDelivery(Delivery, frozen=True):
    """One part of a message: an announced object, or why the part announces none."""

    message: str | int = ""
    """The id of the message."""
    number: int = 0
    """The place of the part in the message."""
    unused: Skipped | Unreadable | None = None


class _Message(msgspec.Struct):
    """A message that was handed over, and its parts that have not ended."""

    delivery: Delivery
    waiting: set[int]
    delay_s: float | None = None
    """Set once a part was released: the whole message goes back when its last part has ended."""


class AnnouncementSource:
    """Hands over one delivery per announced object, and acks a message when all of them have ended.

    If one of them is released, the message comes back, and those that were acked end as duplicates.
    """

    database = None

    def __init__(self, source: Source, dialect: Dialect, selection: ObjectSelection, fix_scale: FixScale) -> None:
        self._source = source
        self._redriving = source if isinstance(source, RedrivingSource) else None
        self._dialect = dialect
        self._selection = selection
        self._fix_scale = fix_scale
        self._scale: VersionScale | None = None
        self._messages: dict[str | int, _Message] = {}

    @property
    def visibility_s(self) -> float | None:
        return self._source.visibility_s

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._source.__aexit__(*error)

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = await self._source.receive(limit, wait_s)
        try:
            return [part for delivery in deliveries for part in await self._parts(delivery)]
        except UnavailableError:
            # The ledger cannot say which scale is fixed. Nothing of these messages was handed over.
            for delivery in deliveries:
                self._messages.pop(delivery.id, None)
            await self._source.release(deliveries, 0.0)
            raise

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        refused = await self._source.extend(self._of_newest_receipt(deliveries), visibility_s)
        lost = {(one.id, one.receipt) for one in refused}
        parts = (one for one in deliveries if isinstance(one, AnnouncedDelivery)) if lost else ()
        return [one for one in parts if (one.message, one.receipt) in lost]

    def last_delivery(self, delivery: Delivery) -> str:
        return self._redriving.last_delivery(delivery) if self._redriving is not None else ""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        await self._end(deliveries, None)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        await self._end(deliveries, delay_s)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        await self._source.send(bodies, delay_s=delay_s)

    async def send_again(self, body: bytes, headers: Mapping[str, str], routing_key: str) -> None:
        """Send a message again, with its headers if the queue has any."""
        if isinstance(self._source, HeaderSource):
            await self._source.send_again(body, headers, routing_key)
        else:
            await self._source.send([body])

    async def depth(self) -> int | None:
        return await self._source.depth()

    async def backlog(self) -> Backlog:
        return await backlog_of(self._source)

    # Parts of messages.

    async def _parts(self, delivery: Delivery) -> list[Delivery]:
        found = [await self._judged(one) for one in self._announcements(delivery)]
        self._messages[delivery.id] = _Message(delivery, set(range(len(found))))
        return [_part(delivery, number, one) for number, one in enumerate(found)]

    def _announcements(self, delivery: Delivery) -> Sequence[Announcement | AnnouncedObject]:
        try:
            if is_announcement(delivery.body):
                return [self._own(decode_announcement(delivery.body))]
            return read_notification(delivery, self._dialect, self._selection)
        except MalformedError as error:
            return [Unreadable(str(error))]

    def _own(self, found: AnnouncedObject) -> AnnouncedObject | Unreadable:
        if found.uri.startswith(f"{self._selection.root}/"):
            return found
        return Unreadable(f"{found.uri[:200]!r} is not in {self._selection.root}; announce it to its own pipeline")

    async def _judged(self, found: Announcement | AnnouncedObject) -> AnnouncedObject | Skipped | Unreadable:
        """Return what becomes of an announcement; one on another scale than the first event's cannot be ordered."""
        if not isinstance(found, ObjectEvent | AnnouncedObject):
            return found
        if found.scale:
            scale = VersionScale(found.scale)
            if self._scale is not scale:
                self._scale = VersionScale(await self._fix_scale(scale.value))
            if conflict := scale_conflict(self._scale, scale):
                return Unreadable(conflict)
        return announced(found) if isinstance(found, ObjectEvent) else found

    def _of_newest_receipt(self, parts: Iterable[Delivery]) -> list[Delivery]:
        """Return the messages of some parts, each once. An older hand-over of a message is left out."""
        messages = (self._messages.get(part.message) for part in parts if isinstance(part, AnnouncedDelivery))
        return list({one.delivery.id: one.delivery for one in messages if one is not None}.values())

    async def _end(self, parts: Sequence[Delivery], delay_s: float | None) -> None:
        acked: list[Delivery] = []
        released: dict[float, list[Delivery]] = {}
        for part in parts:
            assert isinstance(part, AnnouncedDelivery), "this source hands over no other deliveries"
            message = self._messages.get(part.message)
            if message is None or message.delivery.receipt != part.receipt or part.number not in message.waiting:
                continue
            message.waiting.discard(part.number)
            if delay_s is not None:
                message.delay_s = max(delay_s, message.delay_s or 0.0)
            if message.waiting:
                continue
            del self._messages[part.message]
            if message.delay_s is None:
                acked.append(message.delivery)
            else:
                released.setdefault(message.delay_s, []).append(message.delivery)
        if acked:
            await self._source.ack(acked)
        for for_s, some in released.items():
            await self._source.release(some, for_s)


def _part(delivery: Delivery, number: int, found: AnnouncedObject | Skipped | Unreadable) -> AnnouncedDelivery:
    body, unused = (found.encode(), None) if isinstance(found, AnnouncedObject) else (delivery.body, found)
    return AnnouncedDelivery(
        f"{delivery.id}#{number}",
        delivery.receipt,
        body,
        delivery.sent_at,
        delivery.count,
        delivery.headers,
        delivery.routing_key,
        message=delivery.id,
        number=number,
        unused=unused,
    )
