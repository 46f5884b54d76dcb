"""What messages announce: many objects, none, or nothing that can be read; each has one counted end."""

import asyncio
import json
from pathlib import Path

import pytest

import keywise
from adapters.sqs.benches import created
from ingest.golden_files import golden
from ingest.object_rig import Bucket, ObjectRig, fresh, ndjson, s3_message, sqlite_rig
from keywise.core import events
from keywise.core.change import Outcome
from running import awaited
from servers import shared

pytestmark = pytest.mark.server("seaweedfs")


def settled(rig: ObjectRig) -> dict[Outcome, int]:
    counts: dict[Outcome, int] = {}
    for event in rig.emitted(events.Settled):
        counts[event.outcome] = counts.get(event.outcome, 0) + event.changes
    return counts


@awaited
async def test_a_message_with_many_objects_is_acked_when_the_last_of_them_has_ended(tmp_path: Path):
    """One of them cannot be written until the test says so; the others are, and the message stays."""
    bucket, may_go = Bucket(), asyncio.Event()
    rig = sqlite_rig(tmp_path, bucket, sink="", attempts_max=1000)
    written: list[str] = []

    @rig.logs.apply
    async def write(records: list[keywise.Record]) -> None:
        # Small objects share a call.
        written.extend(record.key for record in records if "slow" not in record.object)
        slow = [record.key for record in records if "slow" in record.object]
        if slow:
            await may_go.wait()
            written.extend(slow)

    names = ["a", "slow", "b", "c"]
    for name in names:
        bucket.put(name, ndjson(2))
    await rig.send(s3_message(*(bucket.s3_record(name, 1) for name in names)))
    async with rig.opened() as pipeline:
        [(_, source)] = pipeline.sources

        async def are_others_written() -> bool:
            if len(written) < 6:
                return False
            if not may_go.is_set():
                assert await source.depth() == 1
                may_go.set()
            return await source.depth() == 0

        await rig.work_until(are_others_written)
    assert sorted(written) == sorted(f"{bucket.uri(name)}#{n}" for name in names for n in range(2))


@awaited
async def test_messages_that_concern_no_object_are_counted_and_acked(tmp_path: Path):
    bucket, other = Bucket(), Bucket()
    rig = sqlite_rig(tmp_path, bucket, prefix="in/", suffix=".ndjson")
    bucket.put("in/empty.ndjson", b"")
    bucket.put("in/one.ndjson", ndjson(1))
    folder = bucket.s3_record("in/", 1)
    folder["s3"]["object"]["size"] = 0
    await rig.send(
        golden("aws_test_event").body,
        golden("sns_test_event").body,
        s3_message(folder),
        s3_message(bucket.s3_record("out/one.ndjson", 1), bucket.s3_record("in/one.csv", 1)),
        s3_message(other.s3_record("in/one.ndjson", 1)),
        s3_message(bucket.s3_record("in/one.ndjson", 1, event="ObjectTagging:Put")),
        s3_message(bucket.s3_record("in/empty.ndjson", 1), bucket.s3_record("in/one.ndjson", 1)),
    )
    await rig.work_until_empty()
    reasons = {"test event": 2, "folder": 1, "other name": 2, "other bucket": 1, "other event": 1}
    assert rig.ignored() == reasons
    assert settled(rig) == {Outcome.APPLIED: 2}
    assert await rig.records() == {"in/one.ndjson": [0]}
    assert await rig.letters() == []


BAD = {
    "no JSON": (b"hello", "cannot be read as one of S3"),
    "no records": (b"{}", "has no Records; point the bucket's notifications at this queue"),
    "no name": (json.dumps({"Records": [{"eventName": "ObjectCreated:Put", "s3": {}}]}).encode(), "cannot be read"),
    "a subscription": (golden("sns_subscription_confirmation").body, "confirm the subscription"),
}


@pytest.mark.server("elasticmq")
@awaited
async def test_bad_notifications_are_dead_letters_that_say_what_to_do_and_hold_up_nothing(tmp_path: Path):
    bucket, server = Bucket(), shared.elasticmq()
    queue = created(server, fresh("uploads"))
    rig = sqlite_rig(tmp_path, bucket, queue=f"sqs://127.0.0.1:{server.port}/{queue}?tls=off&settled=0s")
    bucket.put("o", ndjson(1))
    good, no_number = bucket.s3_record("o", 1), bucket.s3_record("o", 2)
    no_number["s3"]["object"]["sequencer"] = "yesterday"
    own_time = bucket.s3_record("o", 3) | {"eventTime": "2026-11-18T10:00:00.000Z"}
    del own_time["s3"]["object"]["sequencer"]
    await rig.send(*(body for body, _ in BAD.values()), s3_message(good, no_number, own_time))
    await rig.work_until_empty()
    causes = [letter.cause for letter in await rig.letters()]
    assert len(causes) == len(BAD) + 2
    for said in (*(said for _, said in BAD.values()), "is no hexadecimal number; if another service"):
        assert any(said in cause for cause in causes), said
    assert any("these cannot be compared; announce each kind of event to a pipeline of its own" in c for c in causes)
    assert await rig.records() == {"o": [0]}
    assert settled(rig) == {Outcome.APPLIED: 1, Outcome.DEAD: len(BAD) + 2}
