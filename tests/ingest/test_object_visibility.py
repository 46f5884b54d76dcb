"""The message of an object stays with its worker from receipt to commit, and the queue's own limits never end it."""

import asyncio
import json
from pathlib import Path

import pytest

import keywise
from adapters.sqs.benches import created
from ingest.object_rig import Bucket, Folder, ObjectRig, fresh, ndjson, s3_message, sqlite_rig
from keywise.core import events
from running import run
from servers import shared
from servers.aws_answers import AwsAnswers, aws_answers

pytestmark = [pytest.mark.server("elasticmq")]

VISIBILITY_S, OBJECTS = 6, 10
SHORT = {"lease": f"{VISIBILITY_S}s", "attempts_max": 1000}


def queue_url(port: int, queue: str) -> str:
    return f"sqs://127.0.0.1:{port}/{queue}?tls=off&settled=0s&visibility={VISIBILITY_S}s"


def extensions(aws: AwsAnswers) -> dict[str, int]:
    """How often each receipt was extended."""
    counts: dict[str, int] = {}
    for asked in aws.of("ChangeMessageVisibilityBatch"):
        for entry in asked["Entries"]:
            counts[entry["ReceiptHandle"]] = counts.get(entry["ReceiptHandle"], 0) + 1
    return counts


class SlowSink:
    """A plain sink that lets each object wait until all messages were extended a few times."""

    def __init__(self, rig: ObjectRig, aws: AwsAnswers, enough: int) -> None:
        self.rig, self._aws, self._enough = rig, aws, enough
        self.records: list[str] = []
        rig.logs.apply(self.write)

    async def write(self, records: list[keywise.Record]) -> None:
        while not self._have_waited():
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.05)
        self.records += [record.key for record in records]

    def _have_waited(self) -> bool:
        counts = extensions(self._aws)
        return len(counts) >= OBJECTS and min(counts.values()) >= self._enough


def test_messages_of_long_objects_are_received_once_also_while_they_wait(tmp_path: Path):
    """One object is written at a time, so nine wait, each for several times the visibility timeout."""

    async def story() -> None:
        queue = created(shared.elasticmq(), fresh("slow"))
        async with aws_answers(shared.elasticmq().url) as aws:
            place = Folder(tmp_path / "objects")
            rig = sqlite_rig(
                tmp_path, place, sink="", queue=queue_url(aws.port, queue), part_records=2, concurrency=1, **SHORT
            )
            sink = SlowSink(rig, aws, enough=4)
            for number in range(OBJECTS):
                await rig.put(f"o{number}", ndjson(6))
            await rig.work_until_empty()
            assert aws.receives_of(queue) == OBJECTS
            assert len(extensions(aws)) == OBJECTS
        assert sorted(sink.records) == sorted(f"{place.uri(f'o{n}')}#{i}" for n in range(OBJECTS) for i in range(6))
        assert rig.emitted(events.ClaimLost) == []

    run(story(), limit_s=60)


@pytest.mark.server("seaweedfs")
def test_an_object_in_progress_is_never_moved_to_the_dead_letter_queue(tmp_path: Path):
    """The queue gives a message up after three receives, and the object has to be put off more often than that."""

    async def story() -> None:
        server, dead = shared.elasticmq(), fresh("dead")
        created(server, dead)
        policy = {"deadLetterTargetArn": f"arn:aws:sqs:elasticmq:000000000000:{dead}", "maxReceiveCount": 3}
        queue = created(server, fresh("redriven"), RedrivePolicy=json.dumps(policy))
        bucket = Bucket()
        url = f"sqs://127.0.0.1:{server.port}/{queue}?tls=off&settled=0s"
        rig = sqlite_rig(tmp_path, bucket, sink="", queue=url, part_records=2)
        calls: list[int] = []

        @rig.logs.apply
        async def write(records: list[keywise.Record]) -> None:
            calls.append(records[0].ordinal)
            if len(calls) % 2:
                # Released to the queue, and received again.
                raise keywise.Snooze(0.01)

        bucket.put("o", ndjson(12))
        await rig.send(s3_message(bucket.s3_record("o", 1)))
        await rig.work_until_empty()
        assert [calls.count(first) for first in range(0, 12, 2)] == [2] * 6
        assert len(rig.emitted(events.Snoozed)) == 6
        counted = server.ask(
            "GetQueueAttributes",
            QueueUrl=f"{server.url}/000000000000/{dead}",
            **{"AttributeName.1": "ApproximateNumberOfMessages"},
        )
        assert "<Value>0</Value>" in counted
        entry = await rig.entry("o")
        assert entry is not None and entry.mark is not None
        assert await rig.letters() == []

    run(story(), limit_s=60)


def test_a_worker_whose_message_was_given_away_stops_at_its_next_part_and_another_goes_on(tmp_path: Path):
    """The proxy refuses an extension as AWS does it when the message has become visible meanwhile."""

    async def story() -> None:
        queue = created(shared.elasticmq(), fresh("given_away"))
        async with aws_answers(shared.elasticmq().url) as aws:
            place, written = Folder(tmp_path / "objects"), list[tuple[str, int]]()
            rigs = {
                name: sqlite_rig(tmp_path, place, sink="", queue=queue_url(aws.port, queue), part_records=2, **SHORT)
                for name in ("first", "second")
            }

            def asked() -> int:
                return len(aws.of("ChangeMessageVisibilityBatch"))

            @rigs["first"].logs.apply
            async def write_first(records: list[keywise.Record]) -> None:
                if records[0].ordinal == 2:
                    aws.forget_receipts()
                    # When a second one is asked for, the worker has heard the answer to the first.
                    enough = asked() + 2
                    while asked() < enough:
                        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.05)
                written.append(("first", records[0].ordinal))

            @rigs["second"].logs.apply
            async def write_second(records: list[keywise.Record]) -> None:
                written.append(("second", records[0].ordinal))

            await rigs["first"].put("o", ndjson(8))

            async def has_stopped() -> bool:
                return bool(rigs["first"].emitted(events.Snoozed))

            await rigs["first"].work_until(has_stopped)
            assert written == [("first", 0), ("first", 2)]
            await rigs["second"].work_until_empty()
            assert written[2:] == [("second", 4), ("second", 6)]
            for rig in rigs.values():
                assert rig.emitted(events.Failed) == [] and rig.emitted(events.ClaimLost) == []
            assert await rigs["second"].letters() == []

    run(story(), limit_s=60)
