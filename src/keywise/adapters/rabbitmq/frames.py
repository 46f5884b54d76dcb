"""Frames of AMQP 0-9-1 that come and go with every message, read and written in one go.

Reading them is most of the work that a message makes, so no object is made for each of their parts.
Whatever is unusual is left to the client library, which also says what is wrong with it.
"""

import enum
from collections.abc import Mapping, Sequence
from struct import Struct
from struct import error as PackingError
from typing import TypeAlias, TypeVar

from keywise.adapters.rabbitmq.messages import HEADER

T = TypeVar("T")

ACK, NACK = 0x003C0050, 0x003C0078
"""What can be said of deliveries; those of a NACK go back to their queue."""

Handover: TypeAlias = tuple[T, int, bool, bytes, bytes, bytes, int]
"""Whose it is, its number, whether it came before, its routing key, its properties as they came, its body; and where
the next begins."""

_METHOD, _HEADER, _BODY = 1, 2, 3
_HEAD = 7
_END = 0xCE
_DELIVER = 0x003C003C
_BASIC = 60
_MULTIPLE, _REQUEUE = 1, 2

_FRAME = Struct(">BHL")
"""Kind, channel, size."""
_BEGINNING = Struct(">BHLLB")
"""A frame's head, its method, and the size of the consumer's tag."""
_NUMBER = Struct(">QBB")
"""The number of a delivery, whether it came before, and the size of the exchange's name."""
_CONTENT = Struct(">BHLHHQ")
"""A frame's head, the class of its content, a weight that nobody uses, and the size of the body."""
_CONTENT_MIN = 14
_SETTLEMENT = Struct(">BHLLQBB")
_SETTLEMENT_SIZE = 13

_FLAGS, _LONG, _LONG_LONG = Struct(">H"), Struct(">L"), Struct(">Q")
_MORE = 1
_HEADERS, _MODE, _PRIORITY, _TIMESTAMP = 1 << 13, 1 << 12, 1 << 11, 1 << 6
_TEXTS_FIRST, _TEXTS_BETWEEN, _TEXTS_LAST = 0b11 << 14, 0b1111 << 7, 0b1111 << 2
"""Properties that are short texts: before the headers, between them and the time, and behind it."""
_OURS = bytes([len(HEADER)]) + HEADER.encode() + b"S"


class Unread(enum.Enum):
    """Why there is no message to be read here."""

    OTHER = "something else"
    PARTIAL = "more has to come"


def handover_at(buffer: bytes, at: int, consumers: Mapping[tuple[int, bytes], T]) -> Handover[T] | Unread:
    """The message for one of these consumers that begins here: a delivery, its properties, its body in one frame."""
    try:
        kind, channel, size, method, tag_size = _BEGINNING.unpack_from(buffer, at)
        end = at + _HEAD + size
        if method != _DELIVER or kind != _METHOD or buffer[end] != _END:
            return Unread.OTHER
        tag_end = at + _BEGINNING.size + tag_size
        consumer = consumers.get((channel, buffer[tag_end - tag_size : tag_end]))
        if consumer is None or tag_end + _NUMBER.size >= end:
            return Unread.OTHER
        number, redelivered, name_size = _NUMBER.unpack_from(buffer, tag_end)
        name_end = tag_end + _NUMBER.size + name_size
        # The routing key is the last part of the frame.
        if name_end >= end or name_end + 1 + buffer[name_end] != end:
            return Unread.OTHER
        routing_key = buffer[name_end + 1 : end]
        start = end + 1
        kind, same, size = _FRAME.unpack_from(buffer, start)
        if kind != _HEADER or same != channel or size < _CONTENT_MIN:
            return Unread.OTHER
        end = start + _HEAD + size
        _, _, _, basic, _, body_size = _CONTENT.unpack_from(buffer, start)
        if basic != _BASIC or buffer[end] != _END:
            return Unread.OTHER
        properties, body = buffer[start + _CONTENT.size : end], b""
        if body_size:
            start = end + 1
            kind, same, size = _FRAME.unpack_from(buffer, start)
            end = start + _HEAD + size
            if kind != _BODY or same != channel or size != body_size or buffer[end] != _END:
                return Unread.OTHER
            body = buffer[start + _HEAD : end]
    except (PackingError, IndexError):
        # A frame that is shorter than the beginning of a delivery, such as a heartbeat, may be all that comes.
        return Unread.PARTIAL if len(buffer) >= at + _BEGINNING.size else Unread.OTHER
    return consumer, number, bool(redelivered & 1), routing_key, properties, body, end + 1


def stamp_of(properties: bytes) -> tuple[str | None, int | None] | None:
    """What keywise has written into a message, and the time that its sender gave.

    None if there are other headers, or if anything is unusual; then all of it has to be read.
    """
    try:
        (flags,) = _FLAGS.unpack_from(properties)
        at, written, timestamp = _FLAGS.size, None, None
        if flags & _TEXTS_FIRST:
            at = _behind_texts(properties, at, flags & _TEXTS_FIRST)
        if flags & _HEADERS:
            start = at + _LONG.size + len(_OURS) + _LONG.size
            (size,), (text_size,) = _LONG.unpack_from(properties, at), _LONG.unpack_from(properties, start - 4)
            at += _LONG.size + size
            if not properties.startswith(_OURS, start - 4 - len(_OURS)) or start + text_size != at:
                return None
            written = properties[start:at].decode()
        at += (flags & _MODE > 0) + (flags & _PRIORITY > 0)
        if flags & _TEXTS_BETWEEN:
            at = _behind_texts(properties, at, flags & _TEXTS_BETWEEN)
        if flags & _TIMESTAMP:
            (timestamp,) = _LONG_LONG.unpack_from(properties, at)
            at += _LONG_LONG.size
        if flags & _TEXTS_LAST:
            at = _behind_texts(properties, at, flags & _TEXTS_LAST)
    except (PackingError, IndexError, UnicodeDecodeError):
        return None
    return None if flags & _MORE or at != len(properties) else (written, timestamp)


def settlement(channel: int, method: int, numbers: Sequence[int], together: int) -> bytes:
    """Say something of deliveries: one word for so many, which have to be all up to there, and one for each other."""
    flags = _REQUEUE if method == NACK else 0
    words = [(number, flags) for number in numbers[together:]]
    if together:
        words.insert(0, (numbers[together - 1], flags | _MULTIPLE))
    pack = _SETTLEMENT.pack
    return b"".join(pack(_METHOD, channel, _SETTLEMENT_SIZE, method, number, bits, _END) for number, bits in words)


def _behind_texts(properties: bytes, at: int, flags: int) -> int:
    for _ in range(flags.bit_count()):
        at += 1 + properties[at]
    return at
