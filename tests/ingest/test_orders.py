"""Events of one object end right in every order in which a queue may deliver them."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.one_key import SAFE, OneKey
from ingest.golden_files import aws_record, delivery, gcs_attributes
from keywise.core.change import Delivery
from keywise.ingest.dialects import dialect_of
from keywise.ingest.notification import ObjectEvent
from keywise.ingest.versions import generation_version

GONE = "gone"


def gcs(event: str, generation: int, **more: str) -> Delivery:
    return delivery(b"", gcs_attributes(eventType=event, objectGeneration=str(generation), **more))


def s3(event: str, sequencer: str) -> Delivery:
    return delivery({"Records": [aws_record("x.ndjson", eventName=event, sequencer=sequencer, eTag=sequencer)]})


CREATED = gcs("OBJECT_FINALIZE", 10)
OVERWROTE = gcs("OBJECT_FINALIZE", 11, overwroteGeneration="10")
OVERWRITTEN = gcs("OBJECT_DELETE", 10, overwrittenByGeneration="11")
DELETED = gcs("OBJECT_DELETE", 11)
RECREATED = gcs("OBJECT_FINALIZE", 12)

PUT = s3("ObjectCreated:Put", "00667D73D45F53EA22")
PUT_AGAIN = s3("ObjectCreated:CompleteMultipartUpload", "00667D73D45F53EA23")
REMOVED = s3("ObjectRemoved:Delete", "00667D73D460")
PUT_LAST = s3("ObjectCreated:Put", "667D73D461000000")

HISTORIES = {
    "gcs: created, deleted": ([gcs("OBJECT_FINALIZE", 11), DELETED], GONE),
    "gcs: created, overwritten": ([CREATED, OVERWROTE, OVERWRITTEN], 22),
    "gcs: created, overwritten, deleted": ([CREATED, OVERWROTE, OVERWRITTEN, DELETED], GONE),
    "gcs: created, overwritten, deleted, created": ([CREATED, OVERWROTE, OVERWRITTEN, DELETED, RECREATED], 24),
    "s3: put, deleted": ([PUT, REMOVED], GONE),
    "s3: put, put, deleted": ([PUT, PUT_AGAIN, REMOVED], GONE),
    "s3: put, put, deleted, put": ([PUT, PUT_AGAIN, REMOVED, PUT_LAST], (0x667D73D4 - 0x54000000 << 32) + 0x61000000),
}


def ended(deliveries: Sequence[Delivery], dialect: str) -> object:
    """Apply what the rules of the ledger grant; return the version of the object in the end."""
    key = OneKey(SAFE)
    state: object = GONE
    for one in deliveries:
        for found in dialect_of(dialect)(one):
            if isinstance(found, ObjectEvent) and key.transact(found.version, deleted=found.deleted) is None:
                state = GONE if found.deleted else found.version
    return state


@pytest.mark.parametrize("story", HISTORIES)
def test_every_order_ends_right(story: str):
    events, end = HISTORIES[story]
    dialect = story.partition(":")[0]
    assert {ended(order, dialect) for order in permutations(events)} == {end}


@pytest.mark.parametrize("story", HISTORIES)
@given(st.data())
def test_every_order_ends_right_when_events_come_twice(story: str, data: st.DataObject):
    events, end = HISTORIES[story]
    order = data.draw(st.permutations([*events, *events]))
    assert ended(order, story.partition(":")[0]) == end


def test_versions_of_generations_settle_an_overwritten_one_too():
    """The reader skips the deletion of an overwritten generation; the end does not depend on that."""
    steps = [(10, False), (11, False), (10, True), (11, True)]
    for order in permutations(steps):
        key = OneKey(SAFE)
        applied = [
            gone
            for number, gone in order
            if key.transact(generation_version(str(number), deleted=gone), deleted=gone) is None
        ]
        assert applied[-1] is True
        assert key.entry is not None and key.entry.deleted
