"""Parsing and encoding of the AMQP 0-9-1 frames that every message needs.

Parsing is most of the work per message, so it makes no object for each part of a frame.
Every unusual frame is left to the client library, which also reports what is wrong with it.
"""

import enum
from collections.abc import Mapping, Sequence
from struct import Struct
from struct import error as PackingError
from typing import TypeAlias, TypeVar

from keywise.adapters.rabbitmq.messages import HEADER

T = TypeVar("T")

ACK, NACK = 0x003C0050, 0x003C0078
"""Methods that settle deliveries; a NACK here always requeues."""

RawDelivery: TypeAlias = tuple[T, int, bool, bytes, bytes, bytes, int]
"""The consumer, delivery tag, redelivered, routing key, encoded properties, body, and where the next frame begins."""

_METHOD, _HEADER, _BODY = 1, 2, 3
_HEAD = 7
_END = 0xCE
_DELIVER = 0x003C003C
_BASIC = 60
_MULTIPLE, _REQUEUE = 1, 2

_FRAME = Struct(">BHL")
"""Frame type, channel, size."""
_DELIVER_HEAD = Struct(">BHLLB")
"""Frame head, method, and the length of the consumer tag."""
_NUMBER = Struct(">QBB")
"""Delivery tag, redelivered, and the length of the exchange's name."""
_CONTENT = Struct(">BHLHHQ")
"""Frame head, class, weight (unused), and the size of the body."""
_CONTENT_MIN = 14
_SETTLEMENT = Struct(">BHLLQBB")
_SETTLEMENT_SIZE = 13

_FLAGS, _LONG, _LONG_LONG = Struct(">H"), Struct(">L"), Struct(">Q")
_MORE = 1
_HEADERS, _MODE, _PRIORITY, _TIMESTAMP = 1 << 13, 1 << 12, 1 << 11, 1 << 6
_STRINGS_FIRST, _STRINGS_BETWEEN, _STRINGS_LAST = 0b11 << 14, 0b1111 << 7, 0b1111 << 2
"""Properties that are short strings: before the headers, between them and the timestamp, and after it."""
_OUR_HEADER = bytes([len(HEADER)]) + HEADER.encode() + b"S"


class Unread(enum.Enum):
    """Why no plain delivery can be read here."""

    OTHER = "something else"
    PARTIAL = "more has to come"


def delivery_at(buffer: bytes, at: int, consumers: Mapping[tuple[int, bytes], T]) -> RawDelivery[T] | Unread:
    """Return the plain delivery that begins here: method, header, and at most one body frame, for a known consumer."""
    try:
        kind, channel, size, method, tag_size = _DELIVER_HEAD.unpack_from(buffer, at)
        end = at + _HEAD + size
        if method != _DELIVER or kind != _METHOD or buffer[end] != _END:
            return Unread.OTHER
        tag_end = at + _DELIVER_HEAD.size + tag_size
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
        # Fewer bytes than the beginning of a delivery may be a complete frame of another kind, such as a heartbeat. The
        # client library gets it now: more bytes may not come for a long time.
        return Unread.PARTIAL if len(buffer) >= at + _DELIVER_HEAD.size else Unread.OTHER
    return consumer, number, bool(redelivered & 1), routing_key, properties, body, end + 1


def stamp_of(properties: bytes) -> tuple[str | None, int | None] | None:
    """Return the header that keywise wrote into a message, and the timestamp of its sender.

    None if there are other headers or anything unusual; then the properties have to be decoded.
    """
    try:
        (flags,) = _FLAGS.unpack_from(properties)
        at, written, timestamp = _FLAGS.size, None, None
        if flags & _STRINGS_FIRST:
            at = _skip_strings(properties, at, flags & _STRINGS_FIRST)
        if flags & _HEADERS:
            start = at + _LONG.size + len(_OUR_HEADER) + _LONG.size
            (size,), (text_size,) = _LONG.unpack_from(properties, at), _LONG.unpack_from(properties, start - 4)
            at += _LONG.size + size
            if not properties.startswith(_OUR_HEADER, start - 4 - len(_OUR_HEADER)) or start + text_size != at:
                return None
            written = properties[start:at].decode()
        at += (flags & _MODE > 0) + (flags & _PRIORITY > 0)
        if flags & _STRINGS_BETWEEN:
            at = _skip_strings(properties, at, flags & _STRINGS_BETWEEN)
        if flags & _TIMESTAMP:
            (timestamp,) = _LONG_LONG.unpack_from(properties, at)
            at += _LONG_LONG.size
        if flags & _STRINGS_LAST:
            at = _skip_strings(properties, at, flags & _STRINGS_LAST)
    except (PackingError, IndexError, UnicodeDecodeError):
        return None
    return None if flags & _MORE or at != len(properties) else (written, timestamp)


def settlement(channel: int, method: int, tags: Sequence[int], cumulative: int) -> bytes:
    """Encode acks or nacks: one `multiple` frame for the first `cumulative` tags, and one frame for each other tag.

    The first ones must be all unsettled tags up to there, because `multiple` covers every lower tag.
    """
    flags = _REQUEUE if method == NACK else 0
    frames = [(tag, flags) for tag in tags[cumulative:]]
    if cumulative:
        frames.insert(0, (tags[cumulative - 1], flags | _MULTIPLE))
    pack = _SETTLEMENT.pack
    return b"".join(pack(_METHOD, channel, _SETTLEMENT_SIZE, method, tag, bits, _END) for tag, bits in frames)


def _skip_strings(properties: bytes, at: int, flags: int) -> int:
    for _ in range(flags.bit_count()):
        at += 1 + properties[at]
    return at
