"""What is read from a message of Pub/Sub, and what is written into one: data, attributes, and an ordering key.

Data are any bytes, so most messages are sent as they are. An empty message and a delayed one need an attribute of ours.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.pubsub_v1.types import PubsubMessage

from keywise.core.change import Delivery

EMPTY = "keywise-empty"
"""The attribute of a message without data: Pub/Sub takes none without data and attributes."""
DUE = "keywise-due"
"""The attribute of a delayed message: when it is due, in Unix seconds by the clock of its sender."""
SECONDS_MAX = 253_402_300_800
"""The end of the calendar; a time behind it is none."""
BATCH_MAX, BATCH_MAX_BYTES = 1_000, 3_500_000
"""The most messages of one request, and the most bytes of one with several messages."""
MESSAGE_MAX_BYTES = 10_000_000

Message = PubsubMessage.pb()
"""The message of the protocol itself: the client library's class around it costs many times as much."""


def delivery_of(received: Any, count: int) -> Delivery:
    """Return a received message as a delivery."""
    message = received.message
    published = message.publish_time
    return Delivery(
        message.message_id,
        received.ack_id,
        message.data,
        published.seconds + published.nanos / 1e9,
        count,
        _headers_of(message) if message.attributes else None,
        message.ordering_key,
    )


def due_at(received: Any) -> float:
    """When a message is due, by the wall clock; 0 if it has no delay."""
    attributes = received.message.attributes
    return _time_of(attributes[DUE]) or 0.0 if DUE in attributes else 0.0


def new_message(body: bytes, headers: Mapping[str, str], ordering_key: str = "", due: float = 0.0) -> Any:
    """Return a message to publish; it is due at a time of the wall clock."""
    attributes = dict(headers)
    if due:
        attributes[DUE] = f"{due:.3f}"
    if not body and not attributes:
        attributes[EMPTY] = "1"
    return Message(data=body, attributes=attributes, ordering_key=ordering_key)


def sized_batches(messages: Sequence[Any]) -> list[list[Any]]:
    """Cut messages into batches that fit into a request."""
    batches, size = list[list[Any]](), 0
    for message in messages:
        one = message.ByteSize()
        if not batches or len(batches[-1]) == BATCH_MAX or size + one > BATCH_MAX_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(message)
        size += one
    return batches


def _headers_of(message: Any) -> dict[str, str] | None:
    """Attributes without ours; one of that name that keywise has not written is a header."""
    headers = dict(message.attributes)
    if DUE in headers and _time_of(headers[DUE]) is not None:
        del headers[DUE]
    if not message.data and headers.get(EMPTY) == "1":
        del headers[EMPTY]
    return headers or None


def _time_of(text: str) -> float | None:
    try:
        time = float(text)
    except ValueError:
        return None
    return time if math.isfinite(time) and 0 < time < SECONDS_MAX else None
