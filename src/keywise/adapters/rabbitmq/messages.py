"""What is read from a message of RabbitMQ and written into its copies: id, time, count; the body is never touched."""

import hashlib
import time
import zlib
from collections.abc import Mapping
from copy import copy
from decimal import DecimalException
from struct import error as PackingError
from typing import Any

import msgspec
import pika
from pika.data import encode_table, encode_value
from pika.exceptions import AMQPError

HEADER = "keywise"
"""Who a message is, beside the digest of the body that this was said of."""
DELAYS = "keywise.delay."
"""How the names of our delay queues begin."""
ROUTED = "keywise-routing-key"
"""The routing key that a message was published with: a copy is published with the name of its queue."""
KEPT = "keywise-kept"
"""Headers that would act on a copy, put aside."""
COUNTED = "x-delivery-count"
"""Where a quorum queue says how often it has handed a message over before."""
OFFSET = "x-stream-offset"
"""Where a stream says which of its messages this is."""
HEADERS_MAX_BYTES = 100_000
"""A header of a message has to fit into one frame; with more than this, a copy has none but ours."""
TEXT_MAX = 2_000
ID_MAX = 100
MILLISECONDS_FROM = 1e11
"""A time of sending that is above this was not given in seconds."""
SECONDS_MAX = 253_402_300_800
"""The end of the calendar; a time behind it is none."""

# They would route a copy to other queues as well, or make the broker believe that it goes round in a circle.
_ACTING = ("CC", "BCC", "x-death")
_NOT_COPIED = ("headers", "delivery_mode", "expiration", "user_id", "cluster_id")
_DEATHS = ("x-first-death-", "x-last-death-")


class MessageIdentity(msgspec.Struct, frozen=True):
    """What a message keeps over its copies."""

    id: str
    count: int
    """How often it was handed over before it was copied; each further copy of a message has a higher number."""
    sent_at: float
    due: float = 0.0
    """If it comes before this moment, it has to wait again."""

    def encoded(self, body: bytes) -> str:
        written = f"{self.id} {self.count} {self.sent_at!r} {zlib.crc32(body)}"
        return f"{written} {self.due!r}" if self.due else written


def identity_of(headers: Mapping[Any, Any], body: bytes) -> MessageIdentity | None:
    """What was written into a header by us, about this body; a program may have passed it on with another one."""
    written = headers.get(HEADER)
    return parse_identity(written, body) if isinstance(written, str) else None


def parse_identity(written: str, body: bytes) -> MessageIdentity | None:
    """What was written into our header about this body."""
    match written.split(" "):
        case [id, count, sent_at, digest, *due] if 0 < len(id) <= ID_MAX and len(due) <= 1:
            try:
                if int(digest) == zlib.crc32(body) and 0 <= float(sent_at) < SECONDS_MAX:
                    return MessageIdentity(id, max(0, int(count)), float(sent_at), *map(float, due))
            except ValueError:
                return None
    return None


def due_of(properties: Any, body: bytes) -> float:
    """Before which moment a message must not be handed over; 0 if it does not say so."""
    identity = identity_of(properties.headers or {}, body)
    return identity.due if identity is not None else 0.0


def times_before(headers: Mapping[Any, Any], redelivered: bool) -> int:
    """How often this copy was handed over before; a classic queue tells only whether it ever was."""
    counted = headers.get(COUNTED)
    if isinstance(counted, int) and counted > 0:
        return counted
    return int(redelivered)


def sent_at(moment: Any) -> float:
    """The time that a sender gave, in seconds or thousandths of them; now if it gave none."""
    if not isinstance(moment, int) or not 0 < moment < 1000 * SECONDS_MAX:
        return time.time()
    return moment / 1000 if moment > MILLISECONDS_FROM else float(moment)


def shown_headers(headers: Mapping[Any, Any]) -> dict[str, str] | None:
    """Headers as text, for people who look at a dead letter; ours are left out."""
    kept = headers.get(KEPT)
    given = {**headers, **(kept if isinstance(kept, dict) else {})}
    own_deaths = tuple(begin for begin in _DEATHS if _text(given.get(f"{begin}queue", "")).startswith(DELAYS))
    shown = {
        _text(name): _text(value)
        for name, value in given.items()
        if not _is_ours(name, value) and not str(name).startswith(own_deaths)
    }
    return shown or None


def fresh_properties(body: bytes, id: str, now: float, due: float = 0.0) -> Any:
    """The properties of a new message."""
    headers = {HEADER: MessageIdentity(id, 0, now, due).encoded(body)}
    return pika.BasicProperties(delivery_mode=2, timestamp=int(now), headers=headers)


def resent_properties(body: bytes, id: str, now: float, headers: Mapping[str, str], routing_key: str) -> Any:
    """The properties of a message that is sent again, with the headers and the routing key that it had before."""
    properties = fresh_properties(body, id, now)
    kept = _copied_headers(headers)
    properties.headers = {**kept, **properties.headers, **({ROUTED: routing_key} if routing_key else {})}
    return properties


def routing_key_of(headers: Mapping[Any, Any], published_with: Any) -> str:
    """The routing key that the producer gave, also if this is a copy of ours."""
    given = headers.get(ROUTED)
    return _text(published_with or "" if given is None else given)


def copied_properties(properties: Any, body: bytes, identity: MessageIdentity, routing_key: str | None = None) -> Any:
    """The properties of a copy: all that a reader may need, and nothing that acts on where and how long it goes.

    `routing_key=None` means that the original was published with the name of its queue, as the copy is.
    """
    headers = _copied_headers(properties.headers or {})
    if encode_table([], headers) > HEADERS_MAX_BYTES:
        headers = {}
    copied = copy(properties)
    copied.headers = {**headers, HEADER: identity.encoded(body)}
    if routing_key is not None:
        copied.headers[ROUTED] = routing_key
    # What was taken over is not lost by a restart, however it was sent; and it has no time to expire any more.
    copied.delivery_mode, copied.expiration = 2, None
    # The broker refuses a user other than the one that publishes.
    copied.user_id = copied.cluster_id = None
    return copied


def content_of(properties: Any, body: bytes, routing_key: str) -> bytes:
    """A digest of all that a message and its copies have in common; `routing_key` is the one of `routing_key_of`."""
    headers = sorted(_copied_headers(properties.headers or {}).items(), key=repr)
    given = sorted((name, value) for name, value in vars(properties).items() if name not in _NOT_COPIED)
    digest = hashlib.blake2b(repr((headers, given, routing_key)).encode("utf-8", "backslashreplace"), digest_size=16)
    digest.update(body)
    return digest.digest()


def _copied_headers(headers: Mapping[Any, Any]) -> dict[Any, Any]:
    kept = headers.get(KEPT)
    aside = {name: _encodable(value) for name, value in kept.items()} if isinstance(kept, dict) else {}
    copied = {
        name: _encodable(value)
        for name, value in headers.items()
        if not _is_ours(name, value) and not str(name).startswith(_DEATHS)
    }
    aside |= {name: copied.pop(name) for name in _ACTING if name in copied}
    return {**copied, KEPT: aside} if aside else copied


def _is_ours(name: Any, value: Any) -> bool:
    """Whether a header comes from a delay of ours, or is a number of the queue's own."""
    if name == "x-death" and isinstance(value, list):
        return all(isinstance(death, dict) and _text(death.get("queue")).startswith(DELAYS) for death in value)
    return name in (HEADER, ROUTED, KEPT, COUNTED)


def _encodable(value: Any) -> Any:
    """A value that can be written as it was read; else its text."""
    try:
        encode_value([], value)
    except (AMQPError, PackingError, DecimalException, ValueError, OverflowError, TypeError, RecursionError):
        return _text(value)
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value[:TEXT_MAX].decode("utf-8", "backslashreplace")
    return str(value)[:TEXT_MAX]
