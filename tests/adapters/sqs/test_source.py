"""The source on SQS beside what the conformance suite checks: batches, limits, FIFO queues, big bodies, headers."""

import asyncio
import time

import pytest

import keywise.adapters.sqs.source
from adapters.sqs.benches import created, fresh, source_at
from adapters.sqs.waiting import bodies_of, received, until
from keywise.core.errors import DatabaseError
from running import awaited
from servers import shared
from servers.aws_answers import aws_answers

pytestmark = pytest.mark.server("elasticmq")

MEBIBYTE = 1 << 20


@awaited
async def test_a_large_receive_is_many_requests_side_by_side():
    queue = created(shared.elasticmq(), fresh("many"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"%d" % number for number in range(230)])
        assert len(aws.of("SendMessageBatch")) == 23
        aws.side_by_side = 0
        held = await source.receive(200, 5.0)
        assert len(held) == 200
        assert aws.side_by_side > 1, "each request waited for the one before"
        assert {asked["MaxNumberOfMessages"] for asked in aws.of("ReceiveMessage")} == {10}
        assert len(aws.of("ReceiveMessage")) == 20
        await source.ack(held)
        assert [len(asked["Entries"]) for asked in aws.of("DeleteMessageBatch")] == [10] * 20
        assert await source.depth() == 30


@awaited
async def test_a_quiet_queue_costs_one_long_poll_however_short_the_waits_are():
    queue = created(shared.elasticmq(), fresh("quiet"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        for _ in range(5):
            assert await source.receive(500, 0.05) == []
        [asked] = aws.of("ReceiveMessage")
        assert asked["WaitTimeSeconds"] == 20
        await source.send([b"one"])
        assert bodies_of(await source.receive(500, 20.0)) == [b"one"]
        assert len(aws.of("ReceiveMessage")) == 1


@pytest.mark.parametrize("is_idle_first", [False, True])
@awaited
async def test_what_arrives_while_no_receive_follows_goes_back(is_idle_first: bool):
    server, queue = shared.elasticmq(), created(shared.elasticmq(), fresh("idle"))
    async with (
        aws_answers(server.url) as aws,
        source_at(aws.port, queue) as busy,
        source_at(server.port, queue) as other,
    ):
        assert await busy.receive(10, 0.01) == []
        await until(lambda: not is_idle_first or busy._polls._is_idle)
        await other.send([b"one"])
        await until(lambda: aws.of("ChangeMessageVisibilityBatch"))
        [got] = await received(other, 1)
        assert (got.body, got.count) == (b"one", 2)


@awaited
async def test_a_cancelled_receive_keeps_no_message():
    queue = created(shared.elasticmq(), fresh("cancelled"))
    async with source_at(shared.elasticmq().port, queue) as other:
        await other.send([b"%d" % number for number in range(50)])
        async with source_at(shared.elasticmq().port, queue) as source:
            for turns in range(1, 40):
                task = asyncio.create_task(source.receive(50, 0.0))
                await asyncio.wait([task], timeout=turns / 1000)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    await source.release(task.result(), 0.0)
        assert len({one.id for one in await received(other, 50)}) == 50


@awaited
async def test_bodies_that_are_too_large_are_refused_before_anything_is_sent():
    queue = created(shared.elasticmq(), fresh("large"))
    async with source_at(shared.elasticmq().port, queue) as source:
        for large in (b"x" * (MEBIBYTE + 1), b"\xff" * (MEBIBYTE * 3 // 4)):
            with pytest.raises(
                DatabaseError, match=r"above the limit of the queue, which is 1048576; store the content"
            ):
                await source.send([b"small", large])
        assert await source.depth() == 0


@awaited
async def test_a_batch_has_at_most_a_mebibyte():
    queue = created(shared.elasticmq(), fresh("heavy"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"x" * 400_000] * 5)
        assert sorted(len(asked["Entries"]) for asked in aws.of("SendMessageBatch")) == [1, 2, 2]
        assert sorted(len(one.body) for one in await received(source, 5)) == [400_000] * 5


@awaited
async def test_attributes_are_headers_and_a_message_is_sent_again_with_them():
    queue = created(shared.elasticmq(), fresh("headers"))
    async with source_at(shared.elasticmq().port, queue) as source:
        await source.send_again(b"\xff", {"sender": "cms", "a b": "", "AWSTraceHeader": "Root=1"}, "group-7")
        [held] = await received(source, 1)
        assert held.headers == {"sender": "cms", "a b": "", "AWSTraceHeader": "Root=1"}
        assert (held.body, held.routing_key) == (b"\xff", "group-7")
        assert abs(held.sent_at - time.time()) < 600


@awaited
async def test_a_message_of_another_program_is_read_as_it_is():
    server, queue = shared.elasticmq(), created(shared.elasticmq(), fresh("plain"))
    server.ask("SendMessage", QueueUrl=f"{server.url}/000000000000/{queue}", MessageBody="%7B%22a%22%3A1%7D")
    async with source_at(server.port, queue) as source:
        [held] = await received(source, 1)
        assert (held.body, held.headers, held.routing_key, held.count) == (b'{"a":1}', None, "", 1)


@awaited
async def test_a_fifo_queue_keeps_groups_and_takes_equal_bodies_twice():
    queue = created(shared.elasticmq(), fresh("orders") + ".fifo", ContentBasedDeduplication="true")
    async with source_at(shared.elasticmq().port, queue) as source:
        await source.send([b"same", b"same"])
        await source.send_again(b"first", {}, "order-7")
        await source.send_again(b"second", {}, "order-7")
        held = await received(source, 4)
        assert bodies_of(held) == [b"first", b"same", b"same", b"second"]
        groups = {one.body: one.routing_key for one in held}
        assert groups[b"first"] == groups[b"second"] == "order-7"
        assert len({one.routing_key for one in held}) == 3, "messages without a group wait for each other"
        await source.ack(held)
        assert await source.depth() == 0


@awaited
async def test_a_delay_above_fifteen_minutes_is_kept_by_the_source():
    queue = created(shared.elasticmq(), fresh("later"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        await source.send([b"later"], delay_s=86_400.0)
        [entry] = aws.of("SendMessageBatch")[0]["Entries"]
        assert entry["DelaySeconds"] == 900
        assert await source.depth() == 1


@awaited
async def test_a_message_that_comes_too_early_is_put_off_until_it_is_due(monkeypatch: pytest.MonkeyPatch):
    """As if SQS could delay a message by no more than a second."""
    monkeypatch.setattr(keywise.adapters.sqs.source, "DELAY_MAX_S", 1)
    queue = created(shared.elasticmq(), fresh("later"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        sent_at = time.time()
        await source.send([b"later"], delay_s=3.0)
        [entry] = aws.of("SendMessageBatch")[0]["Entries"]
        assert entry["DelaySeconds"] == 1
        assert bodies_of(await received(source, 1)) == [b"later"]
        # The date of an answer has whole seconds.
        assert time.time() - sent_at >= 3.0 - 1.0


@awaited
async def test_zero_is_believed_only_after_a_while():
    queue = created(shared.elasticmq(), fresh("counts"))
    async with (
        aws_answers(shared.elasticmq().url) as aws,
        source_at(aws.port, queue, settled_s=0.2) as source,
    ):
        await source.send([b"one", b"two"])
        await source.receive(1, 0.0)
        aws.false_zeros = 1
        first = await source.backlog()
        assert (first.seen, first.is_all) == (0, True) and first.unsure_s > 0
        second = await source.backlog()
        assert (second.seen, second.held) == (2, 1) and second.unsure_s > 0
        await source.ack([*await source.receive(10, 0.0)])
        aws.false_zeros = 10_000

        async def is_believed() -> bool:
            return (await source.backlog()).unsure_s == 0

        assert not await is_believed(), "a zero after another count is as new as the first"
        await until(is_believed)


@awaited
async def test_the_visibility_timeout_follows_the_lease_unless_the_url_sets_it():
    following, fixed = source_at(1, "q"), source_at(1, "q", visibility_s=90.0)
    for source in (following, fixed):
        source.follow_lease(29.5, 600.0)
    assert (following.visibility_s, fixed.visibility_s) == (30, 90)
