"""The chain from Cloud Storage to events of objects: a fake of the store publishes to Pub/Sub, and `read_gcs` reads."""

from collections.abc import Sequence

import pytest

from adapters.pubsub.benches import created, fresh, source_at, topic_of
from adapters.pubsub.waiting import received
from keywise.core.change import Delivery
from keywise.ingest.dialects import read_gcs
from keywise.ingest.notification import ObjectEvent, Skipped, SkipReason
from keywise.ingest.versions import VersionScale
from running import awaited
from servers import shared

pytestmark = [pytest.mark.server("pubsub"), pytest.mark.server("fakegcs")]

NAMES = ("one.ndjson", "a b+c=1/é%2F.ndjson", "日本/😀?#&.csv")


async def notified_bucket(*, is_versioned: bool = False) -> tuple[str, str]:
    """A new bucket, and the subscription that its events are delivered to."""
    server, subscription = shared.fakegcs(), await created(fresh("objects"), ack_deadline_seconds=600)
    bucket = fresh("uploads")
    server.create_bucket(bucket, is_versioned=is_versioned)
    server.notify(bucket, topic_of(subscription))
    return bucket, subscription


def events_of(deliveries: Sequence[Delivery]) -> list[ObjectEvent]:
    """The events of objects in the order of their versions, whatever order they came in."""
    found = [one for delivery in deliveries for one in read_gcs(delivery.body, delivery.headers)]
    return sorted((one for one in found if isinstance(one, ObjectEvent)), key=lambda one: (one.name, one.version))


def skips_of(deliveries: Sequence[Delivery]) -> list[SkipReason]:
    found = [one for delivery in deliveries for one in read_gcs(delivery.body, delivery.headers)]
    return [one.reason for one in found if isinstance(one, Skipped)]


@pytest.mark.parametrize("removal", ["OBJECT_DELETE", "OBJECT_ARCHIVE"])
@awaited
async def test_an_object_that_is_put_overwritten_and_deleted_has_three_events(removal: str):
    server = shared.fakegcs()
    bucket, subscription = await notified_bucket(is_versioned=removal == "OBJECT_ARCHIVE")
    expected = []
    for name in sorted(NAMES):
        first, second = server.put(bucket, name, b""), server.put(bucket, name, b"{}\n")
        server.delete(bucket, name)
        expected += [(name, False, 2 * first), (name, False, 2 * second), (name, True, 2 * second + 1)]
    async with source_at(shared.pubsub().address, subscription, visibility_s=600.0) as source:
        # The fourth of each name says that the first generation was overwritten.
        deliveries = await received(source, 4 * len(NAMES))
        assert {(one.headers or {})["eventType"] for one in deliveries} == {"OBJECT_FINALIZE", removal}
        events = events_of(deliveries)
        assert [(one.name, one.deleted, one.version) for one in events] == expected
        assert {(one.bucket, one.scale) for one in events} == {(bucket, VersionScale.GCS_GENERATION)}
        assert all(one.uri == f"gs://{bucket}/{one.name}" for one in events)
        assert [one.size for one in events if not one.deleted] == [0, 3] * len(NAMES)
        assert skips_of(deliveries) == [SkipReason.OVERWRITTEN] * len(NAMES)
        await source.ack(deliveries)
        assert shared.pubsub().unacked(topic_of(subscription)) == 0


@awaited
async def test_a_folder_and_a_change_of_metadata_announce_no_object():
    server = shared.fakegcs()
    bucket, subscription = await notified_bucket()
    server.put(bucket, "folder/", b"")
    server.put(bucket, "folder/one.csv", b"a,b\n")
    server.change_metadata(bucket, "folder/one.csv", owner="shop")
    async with source_at(shared.pubsub().address, subscription, visibility_s=600.0) as source:
        deliveries = await received(source, 3)
        assert [one.name for one in events_of(deliveries)] == ["folder/one.csv"]
        assert set(skips_of(deliveries)) == {SkipReason.FOLDER, SkipReason.OTHER_EVENT}
        await source.ack(deliveries)
        assert shared.pubsub().unacked(topic_of(subscription)) == 0
