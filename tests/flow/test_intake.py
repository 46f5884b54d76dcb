"""From deliveries to changes by the names of fields: what is read, what is refused with a cause, and who is harmed."""

import json
from datetime import UTC, datetime

import pytest

from keywise.core.change import KEY_MAX_BYTES, VERSION_MAX, VERSION_MIN, Delivery, order_of
from keywise.core.errors import MalformedError, SettingsError
from keywise.flow.intake import FieldRoute, Fields, MessageReader, ReadBatch

GOOD = b'{"id": "good", "v": 1}'
LIMIT = 2000
MICROSECONDS = 1_700_000_000_123_456


def reader(fields: Fields | None = None) -> MessageReader:
    return MessageReader(FieldRoute(fields or Fields("id", "v", {"state": ["gone", "moved"]})), body_max_bytes=LIMIT)


def deliveries(*bodies: bytes) -> list[Delivery]:
    return [Delivery(number, number, body, 50.0) for number, body in enumerate(bodies)]


def read(*bodies: bytes, fields: Fields | None = None) -> ReadBatch:
    return reader(fields).read(deliveries(*bodies), 0, 7.0)


def one(**fields: object) -> bytes:
    return json.dumps({"id": "a", "v": 1, **fields}).encode()


def test_key_and_version_are_read_and_the_body_stays_as_it_is():
    delivery = Delivery(1, 9, b'{"id": "a", "v": 5, "text": "x"}', 50.0)
    [ticket] = reader().read([delivery], 3, 7.0).tickets
    change = ticket.change
    assert (change.key, change.order, change.deleted, change.sent_at) == ("a", order_of(5), False, 50.0)
    assert (change.body, change.value) == (delivery.body, {"id": "a", "v": 5, "text": "x"})
    assert (ticket.delivery, ticket.source, ticket.extended_at) == (delivery, 3, 7.0)


BAD = {
    "no JSON": (b"{id: 1}", "malformed"),
    "nothing": (b"", "truncated"),
    "half an object": (b'{"id": "a", "v": 1', "truncated"),
    "text after the object": (GOOD + b" x", "trailing"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD, "malformed"),
    "no object": (b"[1]", "Expected `object`"),
    "null": (b"null", "Expected `object`"),
    "no key": (b'{"v": 1}', "missing required field `id`"),
    "no version": (b'{"id": "a"}', "missing required field `v`"),
    "a number as key": (b'{"id": 5, "v": 1}', "Expected `str`"),
    "null as key": (b'{"id": null, "v": 1}', "Expected `str`"),
    "null as version": (b'{"id": "a", "v": null}', "Expected `int"),
    "text as version": (b'{"id": "a", "v": "5"}', "a version is an integer, or an RFC3339 time such as"),
    "a list as version": (b'{"id": "a", "v": [1]}', "Expected `int"),
    "true as version": (b'{"id": "a", "v": true}', "Expected `int"),
    "a fraction as version": (b'{"id": "a", "v": 1.5}', "Expected `int"),
    "a whole float as version": (b'{"id": "a", "v": 5.0}', "Expected `int"),
    "an exponent as version": (b'{"id": "a", "v": 1e3}', "Expected `int"),
    "not a number": (b'{"id": "a", "v": NaN}', "malformed"),
    "infinity": (b'{"id": "a", "v": Infinity}', "malformed"),
    "a version above 64 bits": (one(v=VERSION_MAX + 1), "<= 9223372036854775807"),
    "a version below 64 bits": (one(v=VERSION_MIN - 1), "-9223372036854775808"),
    "a version of a thousand digits": (b'{"id": "a", "v": ' + b"9" * 1000 + b"}", "<= 9223372036854775807"),
    "a time without a zone": (b'{"id": "a", "v": "2026-01-02T03:04:05"}', "time zone"),
    "an impossible time": (b'{"id": "a", "v": "2026-13-02T03:04:05Z"}', "RFC3339"),
    "an empty key": (one(id=""), "key is empty"),
    "a key with NUL": (one(id="a\0b"), "NUL"),
    "a long key": (one(id="k" * (KEY_MAX_BYTES + 1)), "513 bytes, the limit is 512"),
    "a long key of wide characters": (one(id="ü" * (KEY_MAX_BYTES // 2 + 1)), "514 bytes, the limit is 512"),
    "half a character as key": (b'{"id": "\\ud800", "v": 1}', "surrogate"),
    "bytes that are no UTF-8": (b'{"id": "\xff", "v": 1}', "utf-8"),
    "a body over the limit": (one(text="x" * LIMIT), f"over the limit of {LIMIT}"),
    "deep nesting": (b'{"id": "a", "v": 1, "x": ' + b"[" * 1500, "recursion"),
}


@pytest.mark.parametrize(("body", "cause"), BAD.values(), ids=BAD.keys())
def test_a_bad_body_is_set_aside_with_its_cause_and_harms_no_neighbour(body: bytes, cause: str):
    """Rule 17: one bad change never takes its batch with it."""
    read_batch = read(GOOD, body, GOOD)
    assert [ticket.delivery.id for ticket in read_batch.tickets] == [0, 2]
    [(delivery, said, *_)] = read_batch.malformed
    assert delivery.id == 1
    assert cause.lower() in said.lower()
    assert len(said) < 200, "a cause is read by a person"
    assert read_batch.ignored == []


def test_all_bad_bodies_together_are_told_one_by_one():
    """Rule 17: each keeps its own cause."""
    read_batch = read(*(body for body, _ in BAD.values()))
    assert [delivery.id for delivery, *_ in read_batch.malformed] == list(range(len(BAD)))
    assert read_batch.tickets == []


@pytest.mark.parametrize("key", ["k" * KEY_MAX_BYTES, "ü" * (KEY_MAX_BYTES // 2), " ", "a/b?c", "日本", "\u202e", "\n"])
def test_a_key_within_the_limit_may_be_any_text(key: str):
    [ticket] = read(one(id=key)).tickets
    assert key == ticket.change.key


@pytest.mark.parametrize("version", [VERSION_MIN, -1, 0, 2**53 + 1, VERSION_MAX])
def test_versions_of_64_bits_are_read_exactly(version: int):
    [ticket] = read(one(v=version)).tickets
    assert order_of(version) == ticket.change.order


def test_a_time_becomes_its_microseconds():
    moment = datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=123_456)
    [ticket] = read(one(v=moment.isoformat())).tickets
    assert ticket.change.version == MICROSECONDS


def test_the_zone_of_a_time_is_heeded():
    east, west = read(one(v="2026-01-02T03:00:00+02:00"), one(v="2026-01-02T01:00:00Z")).tickets
    assert east.change.order == west.change.order


@pytest.mark.parametrize(("state", "deleted"), [("gone", True), ("moved", True), ("live", False), (None, False)])
def test_a_field_with_a_listed_value_means_deleted(state: str | None, deleted: bool):
    [ticket] = read(one(state=state)).tickets
    assert deleted is ticket.change.deleted


def test_a_missing_field_does_not_mean_deleted():
    [ticket] = read(GOOD).tickets
    assert ticket.change.deleted is False


def test_any_of_several_fields_may_say_deleted():
    fields = Fields("id", "v", {"state": ["gone"], "withdrawn": [True]})
    bodies = [one(), one(state="gone"), one(withdrawn=True), one(state="live", withdrawn=False), one(state=["gone"])]
    read_batch = read(*bodies, fields=fields)
    assert [ticket.change.deleted for ticket in read_batch.tickets] == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("listed", "said", "deleted"),
    [
        (True, True, True),
        (True, 1, False),
        (1, 1, True),
        (1, True, False),
        (1, 1.0, True),
        (False, 0, False),
        (0, False, False),
        (None, None, True),
    ],
)
def test_true_is_not_one_and_false_is_not_zero(listed: object, said: object, deleted: bool):
    [ticket] = read(one(state=said), fields=Fields("id", "v", {"state": ["gone", listed]})).tickets
    assert deleted is ticket.change.deleted


def test_a_missing_field_is_not_null():
    [ticket] = read(GOOD, fields=Fields("id", "v", {"state": [None]})).tickets
    assert ticket.change.deleted is False


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (Fields("id", "v", {"v": [-1]}), "name the field 'v' twice; each of them needs a field of its own"),
        (Fields("id", "v", {"id": ["x"]}), "name the field 'id' twice"),
        (Fields("id", "id"), "name the field 'id' twice"),
        (Fields("id", "v", {"state": "gone"}), "not 'state' to 'gone'; write for example"),
        (Fields("id", "v", {"state": True}), "not 'state' to True; write for example"),
        (Fields("id", "v", {5: ["gone"]}), "not 5 to"),
        (Fields('i"d', "v"), "name fields of JSON objects: "),
    ],
)
def test_fields_that_cannot_be_meant_are_refused_before_anything_starts(fields: Fields, told: str):
    with pytest.raises(SettingsError, match=told):
        FieldRoute(fields)


def test_fields_may_have_names_that_are_no_identifiers():
    fields = Fields("content-id", "payload version", {"document type": ["gone"]})
    body = b'{"content-id": "a", "payload version": 3, "document type": "gone"}'
    [ticket] = read(body, fields=fields).tickets
    assert (ticket.change.key, ticket.change.version, ticket.change.deleted) == ("a", 3, True)


def test_without_a_version_field_every_change_is_unversioned():
    """Rule 21: it then means once per key."""
    [ticket] = read(b'{"id": "a", "v": 5}', fields=Fields("id")).tickets
    assert (ticket.change.version, ticket.change.order) == (None, order_of(None))


def test_the_last_of_two_equal_fields_counts():
    [ticket] = read(b'{"id": "a", "v": 1, "id": "b"}').tickets
    assert ticket.change.key == "b"


def test_one_body_is_read_without_a_source():
    change = reader().read_one(one(id="a", v=3, state="gone"))
    assert (change.key, change.version, change.deleted) == ("a", 3, True)
    assert change.sent_at == float("inf"), "what is asked for now is never late"


def test_one_bad_body_raises_its_cause():
    with pytest.raises(MalformedError, match="missing required field"):
        reader().read_one(b"{}")
    with pytest.raises(MalformedError, match="over the limit"):
        reader().read_one(b" " * (LIMIT + 1))
