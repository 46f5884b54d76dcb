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
_BY_SIZE = {form.size: form for form in (_PLAIN, _DELETED, _FULL)}
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Entry).decode


def state_of(entry: Entry | None) -> bytes:
    """An entry as it is kept, without its rate, which stands elsewhere."""
    if entry is None:
        return GONE
    if entry.rate_at:
        entry = replace(entry, rate_at=0.0)
    if not entry.is_idle:
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
    return _idle(*_BY_SIZE[len(state) - 1].unpack(state[1:]))


def _idle(version: int, at: int, deleted: int = 0, era: int = 0, generation: int = 0) -> Entry:
    return Entry((era, version, generation), bool(deleted), at)
