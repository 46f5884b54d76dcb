"""Entries as the bytes that Redis keeps: a mark alone in 12 bytes, a plain claim in 43, and any other entry whole."""

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
# Written and read by `claim_plain.lua` and `commit_plain.lua` too. A whole entry begins with another byte.
_CLAIM = struct.Struct(">BqqddBqB")
"""The tag, the token, the claimed version, the claim's time, the lease, the kind and version of the mark, whether the
claim has an intent. The owner follows."""
_CLAIM_TAG = 1
_UNMARKED, _MARKED, _TOMBSTONE = range(3)
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Entry).decode


def state_of(entry: Entry | None) -> bytes:
    """An entry as it is kept, without its rate, which stands elsewhere."""
    if entry is None:
        return GONE
    if entry.rate_at:
        entry = replace(entry, rate_at=0.0)
    if not entry.is_idle:
        return ACTIVE + (_plain_claim(entry) or _ENCODE(entry))
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
        return _claimed(state[1:]) if state[1] == _CLAIM_TAG else _DECODE(state[1:])
    return _idle(*_BY_SIZE[len(state) - 1].unpack(state[1:]))


def is_plain_claim(state: bytes) -> bool:
    """Whether a state is a claim of a plain change that nothing but a renewal has happened to."""
    return state[:1] == ACTIVE and state[1] == _CLAIM_TAG


def _plain_claim(entry: Entry) -> bytes | None:
    """The short form of an entry that is a mark and a newer claim, neither with an era or a generation; else None."""
    tried, mark = entry.tried, entry.mark
    if tried is None or tried[0] or tried[2] or not (mark is None or (mark < tried and mark[0] == mark[2] == 0)):
        return None
    kind = _UNMARKED if mark is None else _TOMBSTONE if entry.deleted else _MARKED
    version, has_intent = mark[1] if mark is not None else 0, entry.intent is not None
    times = (entry.updated_at, entry.lease_until)
    packed = _CLAIM.pack(_CLAIM_TAG, entry.token, tried[1], *times, kind, version, has_intent) + entry.owner.encode()
    # Whatever else is going on is lost in the short form.
    return packed if entry.token and _claimed(packed) == entry else None


def _claimed(packed: bytes) -> Entry:
    _, token, wanted, at, lease_until, kind, version, has_intent = _CLAIM.unpack_from(packed)
    order = (0, wanted, 0)
    return Entry(
        None if kind == _UNMARKED else (0, version, 0),
        kind == _TOMBSTONE,
        at,
        token,
        packed[_CLAIM.size :].decode(),
        lease_until,
        intent=order if has_intent else None,
        tried=order,
        tried_at=at,
    )


def _idle(version: int, at: int, deleted: int = 0, era: int = 0, generation: int = 0) -> Entry:
    return Entry((era, version, generation), bool(deleted), at)
