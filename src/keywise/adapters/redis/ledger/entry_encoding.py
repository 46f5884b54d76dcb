"""Entries as the bytes that Redis keeps: a mark alone in 12 bytes, and whatever is going on as a whole entry."""

import math
import struct

import msgspec
from msgspec.structs import replace

from keywise.core.entry import Entry

GONE, IDLE, ACTIVE = b"", b"i", b"a"
"""The first byte of a state tells where it is kept; what is not there has none."""

# Told apart by their length: an ordinary mark, a tombstone, and whatever has an era or a generation besides.
_PLAIN = struct.Struct(">qI")
_DELETED = struct.Struct(">qIB")
_FULL = struct.Struct(">qIBqq")
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Entry).decode


def state_of(entry: Entry | None) -> bytes:
    """An entry as it is kept, without its rate, which stands elsewhere."""
    if entry is None:
        return GONE
    if entry.rate_at:
        entry = replace(entry, rate_at=0.0)
    if not is_idle(entry):
        return ACTIVE + _ENCODE(entry)
    if entry.mark is None:
        return GONE
    era, version, generation = entry.mark
    at = math.ceil(entry.updated_at)
    if era or generation:
        return IDLE + _FULL.pack(version, at, entry.deleted, era, generation)
    return IDLE + (_DELETED.pack(version, at, True) if entry.deleted else _PLAIN.pack(version, at))


def entry_of(state: bytes) -> Entry | None:
    if state == GONE:
        return None
    if state[:1] == ACTIVE:
        return _DECODE(state[1:])
    mark = state[1:]
    if len(mark) == _PLAIN.size:
        version, at = _PLAIN.unpack(mark)
        return Entry((0, version, 0), False, at)
    if len(mark) == _DELETED.size:
        version, at, deleted = _DELETED.unpack(mark)
        return Entry((0, version, 0), bool(deleted), at)
    version, at, deleted, era, generation = _FULL.unpack(mark)
    return Entry((era, version, generation), bool(deleted), at)


def is_idle(entry: Entry) -> bool:
    """Nothing but its mark is remembered."""
    return Entry(entry.mark, entry.deleted, entry.updated_at, rate_at=entry.rate_at) == entry
