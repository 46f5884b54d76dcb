"""What is written into a message of SQS is read back: any body, any header, and what a copy remembers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise.adapters.sqs.messages import ATTRIBUTE, SqsDelivery, copied_message, delivery_of, fresh_message, is_group

DATE = "Wed, 18 Nov 2026 02:16:42 GMT"
NOW = 1_794_968_202.0


def as_received(message, *, receives: int = 1, sent_at: float = NOW, group: str = "", id: str = "m1") -> dict:
    """What SQS answers to a receive of a message that was sent so."""
    system = {"ApproximateReceiveCount": str(receives), "SentTimestamp": str(round(sent_at * 1000))}
    system |= {"MessageGroupId": group} if group else {}
    traced = message.entry.get("MessageSystemAttributes", {})
    system |= {name: one["StringValue"] for name, one in traced.items()}
    received = {"MessageId": id, "ReceiptHandle": "r1", "Body": message.entry["MessageBody"], "Attributes": system}
    if "MessageAttributes" in message.entry:
        received["MessageAttributes"] = message.entry["MessageAttributes"]
    return received


def read(message, **options) -> SqsDelivery:
    return delivery_of(as_received(message, **options), 0.0, DATE)


def is_allowed(text: str) -> bool:
    """The characters that SQS documents."""
    return all(
        one in "\t\n\r" or " " <= one <= "\ud7ff" or "\ue000" <= one <= "\ufffd" or one >= "\U00010000" for one in text
    )


@given(st.binary() | st.text(max_size=50).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_body_comes_back_and_is_sent_as_text_that_sqs_takes(body: bytes):
    message = fresh_message(body)
    text = message.entry["MessageBody"]
    assert text and is_allowed(text)
    assert read(message).body == body


def test_a_body_that_is_text_is_sent_as_it_is_and_without_attributes():
    message = fresh_message('{"key": "日本"}'.encode())
    assert message.entry == {"MessageBody": '{"key": "日本"}'}
    assert message.size == len('{"key": "日本"}'.encode())


@given(
    st.dictionaries(st.text(max_size=20), st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=15)
)
def test_any_headers_come_back(headers: dict[str, str]):
    message = fresh_message(b"x", headers)
    attributes = message.entry.get("MessageAttributes", {})
    assert len(attributes) <= 10
    assert all(one["StringValue"] and is_allowed(one["StringValue"]) for one in attributes.values())
    assert (read(message).headers or {}) == headers


def test_headers_that_sqs_takes_are_attributes_which_other_consumers_can_read():
    message = fresh_message(b"x", {"sender": "cms", "AWSTraceHeader": "Root=1"})
    assert message.entry["MessageAttributes"] == {"sender": {"DataType": "String", "StringValue": "cms"}}
    assert message.entry["MessageSystemAttributes"]["AWSTraceHeader"]["StringValue"] == "Root=1"
    assert read(message).headers == {"sender": "cms", "AWSTraceHeader": "Root=1"}


def test_a_copy_keeps_id_time_count_body_and_attributes():
    attributes = {
        "kind": {"DataType": "String.custom", "StringValue": "page"},
        "size": {"DataType": "Number", "StringValue": "3"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\xff\x00"},
    }
    received = as_received(fresh_message(b"\xff body"), receives=4, sent_at=NOW - 60, group="g")
    received["MessageAttributes"] |= attributes
    original = delivery_of(received, 0.0, DATE)
    copy = read(copied_message(original), receives=2, sent_at=NOW, group="g", id="m2")
    assert (copy.id, copy.body, copy.sent_at, copy.count, copy.receives) == ("m1", b"\xff body", NOW - 60, 6, 2)
    assert copy.headers == original.headers == {"kind": "page", "size": "3", "raw": "\\xff\x00"}
    assert copy.note is not None and copy.note.copies == 1
    again = copied_message(copy)
    assert {name: one for name, one in again.entry["MessageAttributes"].items() if name != ATTRIBUTE} == attributes
    assert read(again, id="m3").note.copies == 2


def test_a_copy_of_a_message_with_ten_attributes_keeps_all_of_them():
    attributes = {f"a{number}": {"DataType": "Binary", "BinaryValue": bytes([number])} for number in range(10)}
    received = as_received(fresh_message(b"x")) | {"MessageAttributes": attributes}
    original = delivery_of(received, 0.0, DATE)
    message = copied_message(original)
    assert list(message.entry["MessageAttributes"]) == [ATTRIBUTE]
    assert read(message).headers == original.headers
    assert read(copied_message(read(message))).headers == original.headers


def test_the_note_of_another_body_is_not_believed():
    """A program that passes attributes on with a body of its own must not make two messages share an id."""
    received = as_received(copied_message(read(fresh_message(b"one"))), id="m2") | {"Body": "two"}
    passed_on = delivery_of(received, 0.0, DATE)
    assert (passed_on.id, passed_on.body, passed_on.note) == ("m2", b"two", None)
    assert passed_on.headers is not None and ATTRIBUTE in passed_on.headers


@pytest.mark.parametrize(
    "value",
    [
        "",
        "yes",
        "[]",
        '{"crc": "many"}',
        json.dumps({"crc": 2_439_710_439, "encoding": "base64"}),
        json.dumps({"crc": 2_439_710_439, "sent_at": 1e30}),
    ],
)
def test_an_attribute_of_this_name_that_keywise_did_not_write_is_a_header(value: str):
    received = as_received(fresh_message(b"!?")) | {
        "MessageAttributes": {ATTRIBUTE: {"DataType": "String", "StringValue": value}}
    }
    delivery = delivery_of(received, 0.0, DATE)
    assert (delivery.id, delivery.body, delivery.headers) == ("m1", b"!?", {ATTRIBUTE: value})


def test_a_message_that_comes_too_early_says_for_how_long():
    message = fresh_message(b"x", delay_s=3600.0)
    assert read(message, sent_at=NOW - 600).due_s == pytest.approx(3600 - 600 - 1)
    assert read(message, sent_at=NOW - 3601).due_s == 0.0


def test_a_group_has_the_characters_that_sqs_takes():
    assert is_group("!order-7~") and is_group("x" * 128)
    assert not any(map(is_group, ("", "a b", "é", "x" * 129)))
