"""Properties of RabbitMQ messages and of their copies: id, time, delivery count; the body is never changed."""

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
"""The header with a message's identity, and a digest of the body that it belongs to."""
DELAYS = "keywise.delay."
"""The prefix of the names of delay queues."""
ROUTED = "keywise-routing-key"
"""The header with the producer's routing key: a copy is published with the name of its queue as routing key."""
KEPT = "keywise-kept"
"""The header that keeps those headers of the original that the broker would act upon."""
COUNTED = "x-delivery-count"
"""The header in which a quorum queue counts earlier deliveries."""
OFFSET = "x-stream-offset"
"""The header with the offset of a message in a stream."""
HEADERS_MAX_BYTES = 100_000
"""All headers have to fit into one frame. A copy of a message with more headers than this has only ours."""
TEXT_MAX = 2_000
ID_MAX = 100
MILLISECONDS_FROM = 1e11
"""A timestamp above this is taken as milliseconds."""
SECONDS_MAX = 253_402_300_800
"""The end of year 9999; a later timestamp is ignored."""

# CC and BCC would route a copy to other queues as well; x-death may make the broker drop it as a dead-letter cycle.
_ACTING = ("CC", "BCC", "x-death")
_NOT_COPIED = ("headers", "delivery_mode", "expiration", "user_id", "cluster_id")
_DEATHS = ("x-first-death-", "x-last-death-")


class MessageIdentity(msgspec.Struct, frozen=True):
    """What all copies of a message have in common, and the number of this copy."""

    id: str
    count: int
    """How often the message was delivered before it was copied; each further copy has a higher number."""
    sent_at: float
    due: float = 0.0
    """When the message is due; if it arrives earlier, it has to wait again. 0: no such time."""

    def encoded(self, body: bytes) -> str:
        written = f"{self.id} {self.count} {self.sent_at!r} {zlib.crc32(body)}"
        return f"{written} {self.due!r}" if self.due else written


def identity_of(headers: Mapping[Any, Any], body: bytes) -> MessageIdentity | None:
    """Parse our header; None if it belongs to another body, because a program may have passed the header on."""
    written = headers.get(HEADER)
    return parse_identity(written, body) if isinstance(written, str) else None


def parse_identity(written: str, body: bytes) -> MessageIdentity | None:
    """Parse the value of our header; None if it is malformed or belongs to another body."""
    match written.split(" "):
        case [id, count, sent_at, digest, *due] if 0 < len(id) <= ID_MAX and len(due) <= 1:
            try:
                if int(digest) == zlib.crc32(body) and 0 <= float(sent_at) < SECONDS_MAX:
                    return MessageIdentity(id, max(0, int(count)), float(sent_at), *map(float, due))
            except ValueError:
                return None
    return None


def due_of(properties: Any, body: bytes) -> float:
    """Return when a message is due; 0 if it has no such time."""
    identity = identity_of(properties.headers or {}, body)
    return identity.due if identity is not None else 0.0


def times_before(headers: Mapping[Any, Any], redelivered: bool) -> int:
    """Return how often this copy was delivered before; a classic queue reports only whether it was."""
    counted = headers.get(COUNTED)
    if isinstance(counted, int) and counted > 0:
        return counted
    return int(redelivered)


def sent_at(moment: Any) -> float:
    """Convert a sender's timestamp, in seconds or milliseconds; return the current time if there is none."""
    if not isinstance(moment, int) or not 0 < moment < 1000 * SECONDS_MAX:
        return time.time()
    return moment / 1000 if moment > MILLISECONDS_FROM else float(moment)


def shown_headers(headers: Mapping[Any, Any]) -> dict[str, str] | None:
    """Return the producer's headers as text, for dead letters and read functions; ours are left out."""
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
    """Make the properties of a new message."""
    headers = {HEADER: MessageIdentity(id, 0, now, due).encoded(body)}
    return pika.BasicProperties(delivery_mode=2, timestamp=int(now), headers=headers)


def resent_properties(body: bytes, id: str, now: float, headers: Mapping[str, str], routing_key: str) -> Any:
    """Make the properties of a message that is sent again, with the headers and the routing key that it had before."""
    properties = fresh_properties(body, id, now)
    kept = _copied_headers(headers)
    properties.headers = {**kept, **properties.headers, **({ROUTED: routing_key} if routing_key else {})}
    return properties


def routing_key_of(headers: Mapping[Any, Any], published_with: Any) -> str:
    """Return the producer's routing key, for an original and for a copy."""
    given = headers.get(ROUTED)
    return _text(published_with or "" if given is None else given)


def copied_properties(properties: Any, body: bytes, identity: MessageIdentity, routing_key: str | None = None) -> Any:
    """Make the properties of a copy: all that a reader may need, and nothing that the broker would act upon.

    `routing_key=None` means that the original was published with the name of its queue, as the copy is.
    """
    headers = _copied_headers(properties.headers or {})
    if encode_table([], headers) > HEADERS_MAX_BYTES:
        headers = {}
    copied = copy(properties)
    copied.headers = {**headers, HEADER: identity.encoded(body)}
    if routing_key is not None:
        copied.headers[ROUTED] = routing_key
    # A copy is persistent even if its original was not, and loses its expiration: a message that was received must not
    # vanish any more.
    copied.delivery_mode, copied.expiration = 2, None
    # The broker refuses a message with a user id other than the publishing user's.
    copied.user_id = copied.cluster_id = None
    return copied


def content_of(properties: Any, body: bytes, routing_key: str) -> bytes:
    """Return a digest of what a message and its copies have in common; `routing_key` comes from `routing_key_of`."""
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
    """Whether a header was added by keywise, by one of its delay queues, or by the queue as a counter."""
    if name == "x-death" and isinstance(value, list):
        return all(isinstance(death, dict) and _text(death.get("queue")).startswith(DELAYS) for death in value)
    return name in (HEADER, ROUTED, KEPT, COUNTED)


def _encodable(value: Any) -> Any:
    """Return a value as it is if it can be encoded; otherwise its text."""
    try:
        encode_value([], value)
    except (AMQPError, PackingError, DecimalException, ValueError, OverflowError, TypeError, RecursionError):
        return _text(value)
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value[:TEXT_MAX].decode("utf-8", "backslashreplace")
    return str(value)[:TEXT_MAX]
