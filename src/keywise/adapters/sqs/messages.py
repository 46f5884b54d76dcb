"""What is read from a message of SQS, and what is written into one: text, attributes, and a note of ours.

The body of a message in SQS is text. A body that is not, and all that a copy has to remember, need the attribute
`keywise`; a message that needs neither is sent without it.
"""

import base64
import binascii
import json
import re
import time
import zlib
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from keywise.core.change import Delivery

ATTRIBUTE = "keywise"
TRACE = "AWSTraceHeader"
GROUP = "MessageGroupId"
READ_ATTRIBUTES = ["ApproximateReceiveCount", "SentTimestamp", GROUP, TRACE]
"""What SQS itself knows of a message, as far as it is needed."""
ATTRIBUTES_MAX = 10
NAME_MAX, TEXT_MAX = 256, 2_000
EMPTY = "-"
"""The text of an empty body: SQS takes no empty text."""
BASE64, NOTHING = "base64", "empty"
SECONDS_MAX = 253_402_300_800
"""The end of the calendar; a time behind it is none."""

_REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME = re.compile(r"(?!aws\.|amazon\.)[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.IGNORECASE)

Attributes = Mapping[str, Mapping[str, Any]]
"""Attributes of a message as the client library has them: a type, and a text or bytes."""


class MessageNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What keywise notes in an attribute of a message. It counts only beside the text that it was written for."""

    crc: int
    """Of the text: programs pass attributes on with other bodies."""
    encoding: str = ""
    """`base64` or `empty`; the text is the body itself otherwise."""
    id: str = ""
    """Of the message that this is a copy of."""
    count: int = 0
    """How often the message was delivered before this copy was made."""
    sent_at: float = 0.0
    """When the original was sent."""
    copies: int = 0
    delay_s: float = 0.0
    """How long after it was sent the message is due, if SQS cannot delay it for so long."""
    attributes: dict[str, tuple[str, str]] | None = None
    """Attributes that SQS would refuse or that are too many, as type and text."""


class SqsDelivery(Delivery, frozen=True, gc=False):
    """A delivery with what only SQS needs: to copy the message, and to know how long it has been held."""

    received_at: float = 0.0
    """By the clock of the event loop."""
    receives: int = 1
    """How often SQS has delivered this message, or this copy of it."""
    due_s: float = 0.0
    """It came so much too early."""
    note: MessageNote | None = None
    attributes: Attributes | None = None


class OutgoingMessage(msgspec.Struct, frozen=True):
    """An entry of a batch to send, and what counts of it against the limits of SQS."""

    entry: dict[str, Any]
    size: int


def delivery_of(message: Mapping[str, Any], received_at: float, date: str) -> SqsDelivery:
    """Return a message of SQS as a delivery. `date` is the date of the answer that it came with."""
    system, text, attributes = message["Attributes"], message.get("Body", ""), message.get("MessageAttributes")
    receives, sent_at = int(system["ApproximateReceiveCount"]), int(system["SentTimestamp"]) / 1000
    note = _note_of(attributes[ATTRIBUTE], text) if attributes and ATTRIBUTE in attributes else None
    headers = _headers_of(attributes, note, system.get(TRACE)) if attributes or TRACE in system else None
    group = system.get(GROUP, "")
    if note is None:
        body = text.encode("utf-8", "surrogatepass")
        id, receipt = message["MessageId"], message["ReceiptHandle"]
        return SqsDelivery(
            id, receipt, body, sent_at, receives, headers, group, received_at, receives, 0.0, None, attributes
        )
    return SqsDelivery(
        note.id or message["MessageId"],
        message["ReceiptHandle"],
        _decoded(text, note.encoding),
        note.sent_at or sent_at,
        note.count + receives,
        headers,
        group,
        received_at,
        receives,
        max(0.0, note.delay_s - (_latest_at(date) - sent_at)) if note.delay_s else 0.0,
        note,
        attributes,
    )


def fresh_message(body: bytes, headers: Mapping[str, str] | None = None, delay_s: float = 0.0) -> OutgoingMessage:
    """Return a new message; `delay_s` is a delay that SQS cannot keep by itself."""
    attributes = {name: {"DataType": "String", "StringValue": value} for name, value in (headers or {}).items()}
    trace = attributes.pop(TRACE, None)
    return _message(body, attributes, MessageNote(0, delay_s=delay_s), trace)


def copied_message(delivery: SqsDelivery, delay_s: float = 0.0) -> OutgoingMessage:
    """Return a copy of a message. It has the id, the time of sending, the count and the attributes of the original."""
    before = delivery.note or MessageNote(0)
    note = MessageNote(
        0,
        id=str(delivery.id),
        count=delivery.count,
        sent_at=delivery.sent_at,
        copies=before.copies + 1,
        delay_s=delay_s,
    )
    attributes = {name: one for name, one in (delivery.attributes or {}).items() if name != ATTRIBUTE}
    attributes |= {name: _unpacked(*one) for name, one in (before.attributes or {}).items()}
    headers = delivery.headers or {}
    trace = {"DataType": "String", "StringValue": headers[TRACE]} if TRACE in headers else None
    return _message(delivery.body, attributes, note, None if TRACE in attributes else trace)


def is_group(text: str) -> bool:
    """Whether SQS takes this as the id of a message group."""
    return 0 < len(text) <= 128 and all("!" <= one <= "~" for one in text)


def _message(
    body: bytes, attributes: dict[str, Any], note: MessageNote, trace: Mapping[str, Any] | None
) -> OutgoingMessage:
    text, encoding = _encoded(body)
    is_noted = bool(encoding or note.id or note.delay_s)
    packed = None
    if len(attributes) + is_noted > ATTRIBUTES_MAX or not all(map(_is_storable, attributes, attributes.values())):
        packed, attributes = {name: _packed(one) for name, one in attributes.items()}, {}
    if is_noted or packed:
        crc = zlib.crc32(text.encode())
        note = msgspec.structs.replace(note, crc=crc, encoding=encoding, attributes=packed)
        noted = json.dumps(msgspec.to_builtins(note), separators=(",", ":"))  # ASCII, which SQS takes always
        attributes = {**attributes, ATTRIBUTE: {"DataType": "String", "StringValue": noted}}
    entry: dict[str, Any] = {"MessageBody": text}
    size = len(text) if text.isascii() else len(text.encode())
    if attributes:
        entry["MessageAttributes"] = attributes
        size += sum(len(name) + _size_of(one) for name, one in attributes.items())
    if trace is not None:
        entry["MessageSystemAttributes"] = {TRACE: trace}
    return OutgoingMessage(entry, size)


def _encoded(body: bytes) -> tuple[str, str]:
    if not body:
        return EMPTY, NOTHING
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return base64.b64encode(body).decode(), BASE64
    if _REFUSED.search(text):
        return base64.b64encode(body).decode(), BASE64
    return text, ""


def _decoded(text: str, encoding: str) -> bytes:
    if encoding == NOTHING:
        return b""
    if encoding == BASE64:
        return base64.b64decode(text, validate=True)
    return text.encode("utf-8", "surrogatepass")


def _note_of(attribute: Mapping[str, Any], text: str) -> MessageNote | None:
    """Return what keywise wrote about this text; None if it was written about another one, or not by keywise."""
    try:
        note = msgspec.json.decode(attribute.get("StringValue", ""), type=MessageNote)
        if note.crc != zlib.crc32(text.encode("utf-8", "surrogatepass")) or not 0 <= note.sent_at < SECONDS_MAX:
            return None
        _decoded(text, note.encoding)
    except (msgspec.DecodeError, binascii.Error, ValueError):
        return None
    return note


def _headers_of(attributes: Attributes | None, note: MessageNote | None, trace: str | None) -> dict[str, str] | None:
    """Attributes as text; ours is left out, unless a program passed it on with another body."""
    headers = {name: _text(one) for name, one in (attributes or {}).items() if name != ATTRIBUTE or note is None}
    if note is not None and note.attributes:
        headers |= {name: _text(_unpacked(*one)) for name, one in note.attributes.items()}
    if trace is not None:
        headers.setdefault(TRACE, trace)
    return headers or None


def _text(attribute: Mapping[str, Any]) -> str:
    if "StringValue" in attribute:
        return str(attribute["StringValue"])
    return bytes(attribute.get("BinaryValue", b""))[:TEXT_MAX].decode("utf-8", "backslashreplace")


def _packed(attribute: Mapping[str, Any]) -> tuple[str, str]:
    if "BinaryValue" in attribute:
        return attribute["DataType"], base64.b64encode(attribute["BinaryValue"]).decode()
    return attribute["DataType"], attribute["StringValue"]


def _unpacked(kind: str, text: str) -> dict[str, Any]:
    if kind.partition(".")[0] != "Binary":
        return {"DataType": kind, "StringValue": text}
    try:
        return {"DataType": kind, "BinaryValue": base64.b64decode(text)}
    except binascii.Error:
        return {"DataType": "String", "StringValue": text}


def _is_storable(name: str, attribute: Mapping[str, Any]) -> bool:
    """Whether SQS takes an attribute as it is."""
    value = attribute.get("StringValue", EMPTY)
    is_named = name != ATTRIBUTE and len(name) <= NAME_MAX and _NAME.fullmatch(name) is not None
    return is_named and bool(value) and _REFUSED.search(value) is None


def _size_of(attribute: Mapping[str, Any]) -> int:
    value = attribute.get("StringValue")
    return len(attribute["DataType"]) + len(attribute["BinaryValue"] if value is None else value.encode())


def _latest_at(date: str) -> float:
    """The latest time that the date of an answer may mean, by the clock of the service; it has whole seconds."""
    try:
        return parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp() + 1.0
    except (ValueError, TypeError):
        return time.time()
