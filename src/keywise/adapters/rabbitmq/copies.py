"""Which messages this process has copied lately, so that lost connections do not multiply them.

A connection may be lost after a copy was published and before its original was acked: then the broker has both.
All copies of a message have the same id, and a copy number that rises with each copy. Once a copy is confirmed,
messages with the same id, the same content and a lower number can be acked wherever they arrive: the copy is in a
queue, or it was settled, or a copy with a higher number has replaced it. Otherwise each further lost connection would
add copies of copies.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

REMEMBERED_MAX = 50_000
REMEMBERED_S = 600.0
ORIGINAL_REMEMBERED_S = 60.0
"""How long an original is remembered. It has no header of ours and is recognised by its content alone, so only for as
long as a redelivery may take."""
ORIGINAL = -1
"""The copy number of a message without our header."""


@dataclass(slots=True)
class Copied:
    """What is known about the copies of one message."""

    content: bytes
    begun: int = ORIGINAL
    """The highest copy number that was published."""
    confirmed: int = ORIGINAL
    """The highest copy number that the broker has confirmed."""
    under_way: int = 0
    """How many copies wait for a confirm, after which their original is acked."""
    at: float = 0.0


class CopyLog:
    """The latest copies, by the id that all copies of a message share. Forgetting one is safe: it costs a duplicate."""

    def __init__(self) -> None:
        self._copied: OrderedDict[str, Copied] = OrderedDict()
        self._originals: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Ids that originals got when they were copied, by their content."""

    def __contains__(self, id: str) -> bool:
        return id in self._copied

    @property
    def knows_originals(self) -> bool:
        return bool(self._originals)

    def begin(self, id: str, content: bytes, count: int, *, is_original: bool) -> int:
        """Return the number of the next copy; `count` is how often the message was delivered."""
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
        """Record that the broker has confirmed the copy with this number."""
        if (copied := self._found(id, content)) is not None:
            copied.confirmed = max(copied.confirmed, number)

    def end(self, id: str, content: bytes) -> None:
        """Record that the original of a copy was acked, or that it will not be acked because of this copy."""
        if (copied := self._found(id, content)) is not None:
            copied.under_way -= 1

    def is_outdated(self, id: str, content: bytes, number: int) -> bool:
        """Whether a copy with a higher number was confirmed, so that it is in a queue or was settled."""
        copied = self._found(id, content)
        return copied is not None and number < copied.confirmed and time.monotonic() - copied.at < REMEMBERED_S

    def is_under_way(self, id: str) -> bool:
        """Whether the message is being copied, after which it will be acked."""
        copied = self._copied.get(id)
        return copied is not None and copied.under_way > 0

    def id_of_original(self, content: bytes) -> str | None:
        """Return the id that an original got when it was copied; None if it was not copied lately."""
        id, at = self._originals.get(content, (None, 0.0))
        return id if time.monotonic() - at < ORIGINAL_REMEMBERED_S else None

    def _found(self, id: str, content: bytes) -> Copied | None:
        copied = self._copied.get(id)
        return copied if copied is not None and copied.content == content else None
