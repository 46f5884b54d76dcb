"""What is written into a message of Pub/Sub is read back: any body, headers, ordering key, and a delay."""

import pytest
from google.pubsub_v1 import types
from hypothesis import given
from hypothesis import strategies as st

from keywise.adapters.pubsub.messages import DUE, EMPTY, delivery_of, due_at, new_message, sized_batches

NOW = 1_794_968_202


def as_received(message, *, attempt: int = 0):
    """What a pull answers of a message that was published so."""
    received = types.ReceivedMessage.pb()(ack_id="r1", delivery_attempt=attempt)
    received.message.CopyFrom(message)
    received.message.message_id = "m1"
    received.message.publish_time.seconds = NOW
    received.message.publish_time.nanos = 250_000_000
    return received


def read(message, count: int = 1):
    return delivery_of(as_received(message), count)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.binary(max_size=50), st.dictionaries(TEXT.filter(lambda name: name not in (DUE, EMPTY)), TEXT, max_size=9))
def test_any_body_and_headers_come_back_and_no_message_is_without_content(body: bytes, headers: dict[str, str]):
    message = new_message(body, headers)
    assert message.data or message.attributes, "Pub/Sub refuses it"
    assert (read(message).body, read(message).headers or {}) == (body, headers)


def test_a_message_with_data_is_published_as_it_is():
    assert not new_message(b"\xff", {}).attributes
    assert dict(new_message(b"x", {"sender": "cms"}).attributes) == {"sender": "cms"}


def test_a_delivery_has_id_receipt_publish_time_count_and_ordering_key():
    delivery = read(new_message(b"x", {}, "order-7"), count=3)
    assert (delivery.id, delivery.receipt, delivery.sent_at) == ("m1", "r1", NOW + 0.25)
    assert (delivery.count, delivery.headers, delivery.routing_key) == (3, None, "order-7")


def test_a_delayed_message_says_when_it_is_due_and_shows_no_attribute_of_ours():
    message = new_message(b"", {"sender": "cms"}, due=NOW + 60.5)
    assert due_at(as_received(message)) == NOW + 60.5
    assert (read(message).body, read(message).headers) == (b"", {"sender": "cms"})
    assert due_at(as_received(new_message(b"x", {}))) == 0.0


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "-1", "1e30"])
def test_a_time_that_keywise_has_not_written_is_a_header_and_no_delay(value: str):
    message = new_message(b"x", {DUE: value})
    assert (due_at(as_received(message)), read(message).headers) == (0.0, {DUE: value})


def test_an_attribute_named_like_ours_beside_data_is_a_header():
    assert read(new_message(b"x", {EMPTY: "1"})).headers == {EMPTY: "1"}


def test_a_batch_has_at_most_a_thousand_messages_and_some_megabytes():
    small, large = new_message(b"x", {}), new_message(b"x" * 2_000_000, {})
    assert [len(batch) for batch in sized_batches([small] * 2_500)] == [1_000, 1_000, 500]
    assert [len(batch) for batch in sized_batches([large, small, large, large])] == [2, 1, 1]
    assert sized_batches([]) == []
