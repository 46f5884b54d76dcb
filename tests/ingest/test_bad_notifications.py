"""Notifications that are broken or hostile: every one is read, skipped, or refused with what to do."""

import json
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingest.golden_files import aws_record, delivery, gcs_attributes, golden, golden_names
from keywise.core.change import check_key
from keywise.core.errors import MalformedError
from keywise.ingest.dialects import dialect_of, read_gcs, read_notification, read_s3, read_uri
from keywise.ingest.notification import Announcement, ObjectEvent, ObjectSelection, Skipped, SkipReason, Unreadable

LOGS = ObjectSelection("s3://logs")
HOSTILE = [
    "a b+c=1/é%2F.ndjson",
    "../../x",
    "/etc/passwd",
    "שלום/\u202egpj.exe",
    "🦊🏳️‍🌈.ndjson",
    "a\nb\t\x01",
    " ",
    "%",
    "%zz%41",
    "+",
    "&<>\"'\\",
    ("%2F+é" * 300)[:1000],
]
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300).filter(
    lambda name: not name.endswith(("/", "_$folder$"))
)


def s3(record: dict[str, Any]) -> Announcement:
    [found] = read_s3(json.dumps({"Records": [record]}).encode())
    return found


def object_of(found: Announcement) -> str:
    assert isinstance(found, ObjectEvent), found
    check_key(found.key)
    return found.name


def read_names(name: str) -> list[str]:
    """The name as every dialect reads it from the encoding of its service."""
    bridge = {"source": "aws.s3", "detail-type": "Object Created", "time": "2021-11-12T00:00:00Z"}
    bridge |= {"detail": aws_record(name)["s3"]}  # type: ignore[dict-item]
    versitygw = aws_record(name, eventName="s3:ObjectCreated:Put", sequencer="8E")
    return [
        object_of(s3(aws_record(quote_plus(name, safe="/")))),
        object_of(s3(aws_record(quote(name)))),
        object_of(s3(aws_record(quote_plus(name), eventSource="minio:s3", sequencer="17A9AB4FA93B35D8"))),
        object_of(s3(versitygw)),
        object_of(read_s3(json.dumps(bridge).encode())[0]),
        object_of(read_gcs(b"", gcs_attributes(name))[0]),
        object_of(read_uri(f"s3://logs/{name}\n".encode())[0]),
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_decoded_once_in_every_dialect(name: str):
    assert set(read_names(name)) == {name}


@given(NAMES)
def test_every_name_is_decoded_once_in_every_dialect(name: str):
    assert set(read_names(name)) == {name}


def test_a_name_of_1024_bytes_is_kept_and_its_key_fits():
    name = ("a b+c=1/é%2F" * 100).encode()[:1024].decode(errors="ignore")
    found = s3(aws_record(quote_plus(name, safe="/")))
    assert object_of(found) == name
    assert isinstance(found, ObjectEvent) and found.uri == f"s3://logs/{name}" != found.key


@pytest.mark.parametrize("key", ["a%00b", "%FF", "a%C3"])
def test_a_name_that_cannot_be_a_key_is_a_dead_letter(key: str):
    found = s3(aws_record(key))
    assert isinstance(found, Unreadable)
    assert "rename" in found.cause or "function: dialect=…" in found.cause


def test_one_bad_record_does_not_affect_the_others():
    records = [aws_record("a"), aws_record("b", sequencer="z"), {"no": "record"}, aws_record("c")]
    kinds = [type(found) for found in read_s3(json.dumps({"Records": records}).encode())]
    assert kinds == [ObjectEvent, Unreadable, Unreadable, ObjectEvent]


def test_a_sequencer_that_does_not_fit_is_a_dead_letter_with_what_to_do():
    found = s3(aws_record("a", sequencer="0A1B2C3D4E5F678901"))
    assert isinstance(found, Unreadable)
    assert "has 18 digits" in found.cause and "function: dialect=…" in found.cause


def test_a_bad_event_of_eventbridge_is_a_dead_letter_too():
    event = json.loads(golden("eventbridge_created").body)
    for field, value, cause in (("sequencer", "z", "no hexadecimal number"), ("key", "", "names no object")):
        event["detail"]["object"][field] = value
        [found] = read_s3(json.dumps(event).encode())
        assert isinstance(found, Unreadable) and cause in found.cause
        event["detail"]["object"]["sequencer"] = "617f08299329d189"


def test_a_record_without_a_sequencer_and_a_time_is_a_dead_letter():
    found = s3(aws_record("a", sequencer=None, eventTime=None))
    assert isinstance(found, Unreadable) and "neither a sequencer nor a time" in found.cause


def test_a_service_that_is_not_known_is_a_dead_letter_because_names_could_be_encoded_in_any_way():
    found = s3(aws_record("a", eventSource="ceph:s3"))
    assert isinstance(found, Unreadable) and "'ceph:s3'" in found.cause and "function: dialect=…" in found.cause


@pytest.mark.parametrize("key", ["folder/", "a/b/", "x_$folder$"])
@pytest.mark.parametrize("event", ["ObjectCreated:Put", "ObjectRemoved:Delete"])
def test_what_stands_for_a_folder_is_skipped(key: str, event: str):
    found = s3(aws_record(key, size=0, eventName=event))
    assert isinstance(found, Skipped) and found.reason is SkipReason.FOLDER


def test_content_under_the_name_of_a_folder_is_not_dropped_in_silence():
    found = s3(aws_record("folder/", size=7))
    assert isinstance(found, Unreadable) and "has 7 bytes" in found.cause and "rename" in found.cause


def test_an_empty_object_is_an_object():
    assert object_of(s3(aws_record("empty", size=0))) == "empty"


@pytest.mark.parametrize("event", ["ObjectRestore:Completed", "ObjectTagging:Put", "Replication:X", "New", "", ":::"])
def test_other_events_are_skipped_known_or_not(event: str):
    found = s3(aws_record("a", eventName=event))
    assert isinstance(found, Skipped) and found.reason is SkipReason.OTHER_EVENT


def test_what_is_reported_of_a_hostile_name_can_be_stored_and_shown():
    found = s3(aws_record("a%00%E2%80%AE%0A", eventName="New\0"))
    assert isinstance(found, Skipped)
    assert r"a\x00\u202e\n" in found.detail and found.detail.isprintable()


NO_NOTIFICATION = {
    "nothing": b"",
    "no JSON": b"s3://logs/a",
    "no UTF-8": b'{"Records": "\xff"}',
    "a number": b"1",
    "no records": b"{}",
    "an empty list": b"[]",
    "empty records": b'{"Records": []}',
    "records of another type": b'{"Records": {}}',
    "deep": b"[" * 100_000,
    "SNS without a message": b'{"Type": "Notification"}',
    "SNS of something else": b'{"Type": "Notification", "Message": "hello"}',
    "EventBridge of another service": b'{"source": "aws.ec2", "detail-type": "EC2 Instance State-change"}',
}


@pytest.mark.parametrize("body", NO_NOTIFICATION.values(), ids=NO_NOTIFICATION.keys())
def test_what_is_no_notification_of_s3_is_refused_with_what_to_do(body: bytes):
    with pytest.raises(MalformedError, match=r"function: dialect=…|let the rule match"):
        read_s3(body)


def test_envelopes_are_opened_only_so_deep():
    body: object = {"Records": [aws_record("a")]}
    for _ in range(3):
        body = {"Type": "Notification", "Message": json.dumps(body)}
    with pytest.raises(MalformedError, match="more than 3 envelopes"):
        read_s3(json.dumps(body).encode())


@pytest.mark.parametrize("missing", ["eventType", "bucketId", "objectId"])
def test_a_message_without_the_attributes_of_cloud_storage_is_refused(missing: str):
    attributes = gcs_attributes()
    del attributes[missing]
    with pytest.raises(MalformedError, match=f"no attribute {missing}; subscribe to the topic"):
        read_gcs(b"", attributes)
    with pytest.raises(MalformedError, match="no attribute eventType"):
        read_gcs(b"", None)


def test_a_body_of_cloud_storage_that_is_no_json_is_refused():
    with pytest.raises(MalformedError, match="cannot be read as one of Cloud Storage"):
        read_gcs(b"x", gcs_attributes(payloadFormat="JSON_API_V1"))


def test_a_generation_that_is_no_number_is_a_dead_letter():
    for generation in ("x", "", str(2**62)):
        [found] = read_gcs(b"", gcs_attributes(objectGeneration=generation))
        assert isinstance(found, Unreadable), generation


@pytest.mark.parametrize("body", [b"", b"a.ndjson", b"s3:/x", b"s3://bucket", b"\xff", b'"s3://b/x"', b" s3://b/x"])
def test_a_message_that_is_no_uri_is_refused_with_an_example(body: bytes):
    with pytest.raises(MalformedError, match="s3://bucket/name"):
        read_uri(body)


def test_a_uri_has_no_version_and_local_files_have_no_bucket():
    [found] = read_uri(b"file:///data/a%20b")
    assert isinstance(found, ObjectEvent)
    assert (found.bucket, found.name, found.version) == ("", "data/a%20b", None)


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        (ObjectSelection("s3://other"), SkipReason.OTHER_BUCKET),
        (ObjectSelection("s3://log"), SkipReason.OTHER_BUCKET),
        (ObjectSelection("gs://logs"), SkipReason.OTHER_BUCKET),
        (ObjectSelection("s3://logs", prefix="in/"), SkipReason.OTHER_NAME),
        (ObjectSelection("s3://logs", suffix=".csv"), SkipReason.OTHER_NAME),
    ],
)
def test_objects_of_other_buckets_and_names_are_skipped(selection: ObjectSelection, reason: SkipReason):
    [found] = read_notification(golden("aws_put"), dialect_of("s3"), selection)
    assert isinstance(found, Skipped) and found.reason is reason


def test_objects_of_the_selection_are_kept_and_so_is_what_is_no_object():
    everything = [aws_record("in/a.csv"), aws_record("in/b", sequencer="z"), aws_record("in/c", eventName="New")]
    selection = ObjectSelection("s3://logs", "in/", ".csv")
    found = read_notification(delivery({"Records": everything}), dialect_of("s3"), selection)
    assert [type(one) for one in found] == [ObjectEvent, Unreadable, Skipped]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["eventName", "eventSource", "eventTime", "key", "size", "eTag", "sequencer"]
TEXT = st.text(st.characters(), max_size=30)
TWISTED = st.dictionaries(st.sampled_from(FIELDS), JSON | TEXT, max_size=4)


def expect_an_answer(body: bytes, attributes: dict[str, str] | None = None) -> None:
    for dialect in ("s3", "gcs", "uri"):
        try:
            announced = read_notification(delivery(body, attributes), dialect_of(dialect), LOGS)
        except MalformedError as error:
            expect_storable(str(error))
            continue
        assert announced
        for found in announced:
            match found:
                case ObjectEvent():
                    check_key(found.key)
                    assert found.order < (1, 0, 0)
                case Skipped():
                    expect_storable(found.detail)
                case Unreadable():
                    expect_storable(found.cause)


def expect_storable(text: str) -> None:
    assert text and "\0" not in text
    assert len(text.encode()) < 4000


@given(st.binary(max_size=200))
@example(b'{"Event": "\\u0000\\ud83d"}')
def test_any_bytes_get_an_answer(body: bytes):
    expect_an_answer(body)
    expect_an_answer(body, gcs_attributes(payloadFormat="JSON_API_V1"))


@given(JSON)
def test_any_json_gets_an_answer(content: Any):
    expect_an_answer(json.dumps(content).encode())


@given(st.lists(TWISTED, min_size=1, max_size=3))
def test_any_twisted_record_gets_an_answer(twists: list[dict[str, Any]]):
    records = [aws_record(twist.pop("key", "a"), **twist) for twist in twists]
    expect_an_answer(json.dumps({"Records": records}).encode())


@given(
    st.dictionaries(st.sampled_from([*gcs_attributes(), "overwrittenByGeneration"]), TEXT),
    st.sampled_from(["OBJECT_FINALIZE", "OBJECT_DELETE", "OBJECT_ARCHIVE"]),
)
def test_any_attributes_get_an_answer(twist: dict[str, str], event: str):
    expect_an_answer(b"{}", {**gcs_attributes(eventType=event), **twist})


@given(st.sampled_from(sorted(golden_names())), st.data())
def test_a_damaged_notification_gets_an_answer(name: str, data: st.DataObject):
    message = golden(name)
    damaged = bytearray(message.body or b"{}")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    expect_an_answer(bytes(damaged), dict(message.headers) if message.headers else None)
