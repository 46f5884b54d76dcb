"""Which messages of RabbitMQ this process has copied lately, so that lost connections do not multiply them.

A connection may be lost after a copy was published and before its original was acked: then both are in the broker.
All copies of a message have its id, and numbers that grow with each copy. Once a copy is confirmed, lower numbers of
the same id and content can be acked wherever they appear: the copy is in a queue, or was settled after its change had
ended, or has itself given way to a higher number. Without that, each further cut would add copies of copies.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

REMEMBERED_MAX = 50_000
REMEMBERED_S = 600.0
ORIGINAL_REMEMBERED_S = 60.0
"""A message without our header is known by its content alone, so only for as long as it may take to come again."""
ORIGINAL = -1
"""The number of a message without our header."""


@dataclass(slots=True)
class Copied:
    """The copies of one message."""

    content: bytes
    begun: int = ORIGINAL
    """The highest number that was published."""
    confirmed: int = ORIGINAL
    """The highest number that a queue is known to have."""
    under_way: int = 0
    """How many copies wait for a confirmation, after which their original is acked."""
    at: float = 0.0


class CopyLog:
    """What was copied, by the id that all copies of a message share; the oldest are forgotten, which is always safe."""

    def __init__(self) -> None:
        self._copied: OrderedDict[str, Copied] = OrderedDict()
        self._originals: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Ids that messages without our header got, by their content."""

    def __contains__(self, id: str) -> bool:
        return id in self._copied

    @property
    def knows_originals(self) -> bool:
        return bool(self._originals)

    def begin(self, id: str, content: bytes, count: int, *, is_original: bool) -> int:
        """Return the number of the next copy; `count` is how often the message was handed over."""
        now, copied = time.monotonic(), self._copied.get(id)
        if copied is None or copied.content != content:
            copied = self._copied[id] = Copied(content)
        self._copied.move_to_end(id)
        copied.begun = max(copied.begun + 1, count)
        copied.under_way += 1
        copied.at = now
        if is_original:
            self._originals[content] = id, now
            self._originals.move_to_end(content)
        if len(self._copied) > REMEMBERED_MAX:
            self._copied.popitem(last=False)
        if len(self._originals) > REMEMBERED_MAX:
            self._originals.popitem(last=False)
        return copied.begun

    def confirm(self, id: str, content: bytes, number: int) -> None:
        """A queue has the copy with this number."""
        if (copied := self._found(id, content)) is not None:
            copied.confirmed = max(copied.confirmed, number)

    def end(self, id: str, content: bytes) -> None:
        """The original of a copy was acked, or will not be acked because of it."""
        if (copied := self._found(id, content)) is not None:
            copied.under_way -= 1

    def is_outdated(self, id: str, content: bytes, number: int) -> bool:
        """Whether a newer copy of this message is known to be in a queue, or was settled there."""
        copied = self._found(id, content)
        return copied is not None and number < copied.confirmed and time.monotonic() - copied.at < REMEMBERED_S

    def is_under_way(self, id: str) -> bool:
        """Whether the message may be acked soon because of a copy."""
        copied = self._copied.get(id)
        return copied is not None and copied.under_way > 0

    def id_of_original(self, content: bytes) -> str | None:
        """The id that a message without our header got when it was copied."""
        id, at = self._originals.get(content, (None, 0.0))
        return id if time.monotonic() - at < ORIGINAL_REMEMBERED_S else None

    def _found(self, id: str, content: bytes) -> Copied | None:
        copied = self._copied.get(id)
        return copied if copied is not None and copied.content == content else None
