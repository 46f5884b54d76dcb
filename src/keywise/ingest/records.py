"""The records of an object as changes, each with a key of its own, and the dead letters of bad ones."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from keywise.core.change import KEY_MAX_BYTES, Order, is_unversioned
from keywise.core.dead_letter import DeadLetter
from keywise.core.failures import storable
from keywise.core.record import OBJECT_HEADER, Record
from keywise.ingest.keys import shortened
from keywise.ingest.parts import BadRecord, Part
from keywise.ingest.reader import ObjectReader

ORDINAL_BYTES = 20
"""`#` and the largest ordinal."""

Decode = Callable[[bytes], Any]


def record_key(object_key: str, ordinal: int) -> str:
    """Return the key of a record. It has at most 512 bytes, as the ids of documents, and no other record has it."""
    return f"{shortened(object_key, KEY_MAX_BYTES - ORDINAL_BYTES)}#{ordinal}"


class RecordMaker:
    """Makes the records of one object at one order."""

    def __init__(self, uri: str, object_key: str, decode: Decode | None) -> None:
        self.uri = uri
        self._prefix = record_key(object_key, 0)[:-1]
        self._decode = decode

    def of_part(self, part: Part, order: Order, reader: ObjectReader) -> list[Record[Any]]:
        """Return the good records of a part; the reader is the one that the part came from."""
        uri, prefix, decode = self.uri, self._prefix, self._decode or reader.decode
        ordinals = part.ordinals() if part.bad else range(part.first, part.place)
        return [
            Record(f"{prefix}{ordinal}", order, body=body, decode=decode, object=uri, ordinal=ordinal)
            for ordinal, body in zip(ordinals, reader.bodies(part.records), strict=True)
        ]

    def deletions(self, ordinals: Sequence[int], order: Order) -> list[Record[Any]]:
        uri, prefix = self.uri, self._prefix
        return [Record(f"{prefix}{ordinal}", order, True, object=uri, ordinal=ordinal) for ordinal in ordinals]

    def bad_letters(self, bad: Sequence[BadRecord], etag: str, order: Order, sent_at: float) -> Iterator[DeadLetter]:
        for one in bad:
            place = {"offset": str(one.offset), "length": str(one.length), "etag": etag}
            yield self._letter(one.ordinal, one.reason, one.head, order, sent_at, place)

    def refused_letter(
        self, record: Record[Any], cause: str, order: Order, sent_at: float, traceback: str = ""
    ) -> DeadLetter:
        """Return the dead letter of a record that the sink or the handler refuses."""
        letter = self._letter(record.ordinal, cause, record.body, order, sent_at, {})
        return msgspec.structs.replace(letter, traceback=traceback)

    def _letter(
        self, ordinal: int, cause: str, body: bytes, order: Order, sent_at: float, place: dict[str, str]
    ) -> DeadLetter:
        headers = {OBJECT_HEADER: self.uri, "ordinal": str(ordinal), **place}
        key = f"{self._prefix}{ordinal}"
        version = None if is_unversioned(order) else order[1]
        return DeadLetter(storable(cause), body, key=key, version=version, headers=headers, sent_at=sent_at)
