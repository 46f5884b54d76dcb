"""The source on Pub/Sub beside what the conformance suite checks: pulls, deadlines, counts, delays, last deliveries."""

import asyncio
import time

import pytest

from adapters.pubsub.benches import MovedClock, created, fresh, seen_by, source_at, topic_of
from adapters.pubsub.waiting import bodies_of, received, until
from keywise.core.errors import DatabaseError, UnavailableError
from running import awaited
from servers import shared
from servers.pubsub_answers import PubSubAnswers, pubsub_answers

pytestmark = pytest.mark.server("pubsub")


def deadlines(proxy: PubSubAnswers) -> list[int]:
    return [asked.ack_deadline_seconds for asked in proxy.of("ModifyAckDeadline")]


@awaited
async def test_a_large_receive_is_one_pull_and_its_acks_are_one_request():
    name = await created(fresh("many"))
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        await source.send([b"%d" % number for number in range(1_200)])
        assert [len(asked.messages) for asked in proxy.of("Publish")] == [1_000, 200]
        held = await received(source, 500)
        assert len(held) == 500 and proxy.of("Pull")[0].max_messages == 500
        await source.ack(held)
        assert [len(asked.ack_ids) for asked in proxy.of("Acknowledge")] == [500]
        assert shared.pubsub().unacked(topic_of(name)) == 700


@awaited
async def test_while_messages_come_pulls_wait_side_by_side_and_never_for_more_than_is_wanted():
    name = await created(fresh("busy"))
    async with (
        pubsub_answers(shared.pubsub().address) as proxy,
        source_at(proxy.address, name, requests=3) as source,
        source_at(shared.pubsub().address, name) as sender,
    ):
        for number in range(10):
            await sender.send([b"%d" % number])
            assert len(await received(source, 1)) == 1
        waiting = asyncio.create_task(source.receive(10, 5.0))
        await until(lambda: proxy.side_by_side == 3)
        assert sum(source._polls._polls.values()) <= 10
        await sender.send([b"last"])
        assert bodies_of(await waiting) == [b"last"]


@awaited
async def test_a_quiet_subscription_has_one_pull_however_short_the_waits_are():
    name = await created(fresh("quiet"))
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        for _ in range(5):
            assert await source.receive(500, 0.01) == []
        assert len(proxy.of("Pull")) <= 2 and proxy.side_by_side == 1
        await source.send([b"one"])
        assert bodies_of(await source.receive(500, 20.0)) == [b"one"]


@awaited
async def test_what_arrives_while_no_receive_follows_goes_back():
    name = await created(fresh("idle"))
    async with (
        pubsub_answers(shared.pubsub().address) as proxy,
        source_at(proxy.address, name) as busy,
        source_at(shared.pubsub().address, name) as other,
    ):
        assert await busy.receive(10, 0.01) == []
        await other.send([b"one"])
        await until(lambda: 0 in deadlines(proxy))
        assert bodies_of(await received(other, 1)) == [b"one"]


@awaited
async def test_a_cancelled_receive_keeps_no_message():
    name = await created(fresh("cancelled"))
    async with source_at(shared.pubsub().address, name) as other:
        await other.send([b"%d" % number for number in range(50)])
        async with source_at(shared.pubsub().address, name) as source:
            for turns in range(1, 20):
                task = asyncio.create_task(source.receive(50, 0.0))
                await asyncio.wait([task], timeout=turns / 2000)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    await source.release(task.result(), 0.0)
        with MovedClock() as clock:
            # Of a pull that was broken off by the end of the source.
            clock.advance(61.0)
            assert len({one.id for one in await received(other, 50)}) == 50


@awaited
async def test_the_ack_deadline_of_a_received_message_is_the_visibility_timeout():
    name = await created(fresh("deadline"), ack_deadline_seconds=30)
    async with pubsub_answers(shared.pubsub().address) as proxy:
        for visibility_s, asked in ((45.5, [46]), (30.0, []), (7200.0, [600])):
            async with source_at(proxy.address, name, visibility_s=visibility_s) as source:
                proxy.asked.clear()
                await source.send([b"one"])
                held = await received(source, 1)
                assert deadlines(proxy) == asked
                await source.ack(held)


@awaited
async def test_the_visibility_timeout_follows_the_lease_within_the_limits_unless_the_url_sets_it():
    for lease_s, visibility_s in ((29.5, 30), (5.0, 10), (3600.0, 600)):
        following, fixed = source_at("127.0.0.1:1", "q"), source_at("127.0.0.1:1", "q", visibility_s=90.0)
        for source in (following, fixed):
            source.follow_lease(lease_s, 600.0)
        assert (following.visibility_s, fixed.visibility_s) == (visibility_s, 90)


@awaited
async def test_a_release_is_a_deadline_of_at_most_ten_minutes_and_without_a_delay_a_nack():
    name = await created(fresh("released"), ack_deadline_seconds=60)
    async with (
        pubsub_answers(shared.pubsub().address) as proxy,
        source_at(proxy.address, name, visibility_s=60.0) as source,
    ):
        for delay_s in (0.0, 0.2, 30.0, 3600.0):
            await source.send([b"one"])
            await source.release(await received(source, 1), delay_s)
            await source.ack(await source.receive(1, 0.0))
        assert deadlines(proxy) == [0, 1, 30, 600]


@awaited
async def test_attributes_are_headers_and_a_message_is_sent_again_with_them_and_its_ordering_key():
    name = await created(fresh("headers"))
    async with source_at(shared.pubsub().address, name) as source:
        await source.send_again(b"\xff", {"sender": "cms", "empty": ""}, "order-7")
        [held] = await received(source, 1)
        assert (held.headers, held.body, held.routing_key) == ({"sender": "cms", "empty": ""}, b"\xff", "order-7")
        assert abs(held.sent_at - time.time()) < 600
        await source.release([held], 0.0)
        [again] = await received(source, 1)
        assert seen_by(again) == seen_by(held)


@awaited
async def test_deliveries_are_counted_by_pub_sub_if_there_is_a_dead_letter_policy():
    name = await created(fresh("counted"), attempts_max=10)
    async with (
        source_at(shared.pubsub().address, name) as source,
        source_at(shared.pubsub().address, name) as another,
    ):
        await source.send([b"one"])
        counts = []
        for one in (source, another, source, another):
            held = await received(one, 1)
            counts.append(held[0].count)
            await one.release(held, 0.0)
        assert counts == [1, 2, 3, 4]


@awaited
async def test_without_a_policy_only_what_the_same_process_gave_back_is_counted():
    name = await created(fresh("uncounted"))
    async with (
        source_at(shared.pubsub().address, name) as source,
        source_at(shared.pubsub().address, name) as another,
    ):
        await source.send([b"one"])
        counts = []
        for one in (source, source, another, source):
            held = await received(one, 1)
            counts.append(held[0].count)
            assert one.last_delivery(held[0]) == ""
            await one.release(held, 0.0)
        assert counts == [1, 2, 1, 3]


@awaited
async def test_the_last_delivery_of_a_policy_is_known_as_such():
    name = await created(fresh("last"), attempts_max=5)
    async with source_at(shared.pubsub().address, name) as source:
        await source.send([b"one"])
        for count in range(1, 6):
            held = await received(source, 1)
            assert held[0].count == count
            cause = source.last_delivery(held[0])
            assert bool(cause) == (count == 5), cause
            await source.release(held, 0.0)
        assert "delivered 5 times" in cause and "allows 5; replay it, and raise maxDeliveryAttempts" in cause
        assert await source.receive(1, 0.0) == [], "Pub/Sub has moved it"
    async with source_at(shared.pubsub().address, f"{name}_dead") as letters:
        assert bodies_of(await received(letters, 1)) == [b"one"]


@awaited
async def test_a_policy_that_changes_is_read_again_when_it_matters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("keywise.adapters.pubsub.source.POLICY_S", -1.0)
    name = await created(fresh("changed"), attempts_max=6)
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        source._attempts_max = 100
        await source.send([b"one"])
        for _ in range(4):
            await source.release(await received(source, 1), 0.0)
        assert len(proxy.of("GetSubscription")) == 1
        held = await received(source, 1)
        assert len(proxy.of("GetSubscription")) == 2 and source._attempts_max == 6
        await source.ack(held)


@awaited
async def test_a_delayed_message_is_put_off_again_until_it_is_due(monkeypatch: pytest.MonkeyPatch):
    """As if Pub/Sub could hide a message for no more than 100 seconds: its fake forgets one after ten minutes."""
    monkeypatch.setattr("keywise.adapters.pubsub.source.DEADLINE_MAX_S", 100)
    name = await created(fresh("later"), attempts_max=100)
    with MovedClock() as clock:
        async with (
            pubsub_answers(shared.pubsub().address) as proxy,
            source_at(proxy.address, name, wall=clock.wall) as source,
        ):
            await source.send([b"later"], delay_s=250.0)
            for _ in range(3):
                assert await source.receive(1, 0.0) == []
                assert 0 < (await source.backlog()).unsure_s <= 100
                clock.advance(101.0)
            assert deadlines(proxy)[:2] == [100, 100] and 0 < deadlines(proxy)[2] <= 50
            [held] = await source.receive(1, 0.0)
            assert (held.body, held.count, held.headers) == (b"later", 4, None)


@awaited
async def test_the_last_delivery_of_a_delayed_message_is_handed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("keywise.adapters.pubsub.source.DEADLINE_MAX_S", 100)
    name = await created(fresh("late"), attempts_max=5)
    with MovedClock() as clock:
        async with source_at(shared.pubsub().address, name, wall=clock.wall) as source:
            await source.send([b"later"], delay_s=500.0)
            for _ in range(4):
                assert await source.receive(1, 0.0) == []
                clock.advance(101.0)
            [held] = await source.receive(1, 0.0)
            assert held.body == b"later" and source.last_delivery(held)


@awaited
async def test_a_message_that_is_too_large_is_refused_before_anything_is_sent():
    name = await created(fresh("large"))
    async with source_at(shared.pubsub().address, name) as source:
        with pytest.raises(DatabaseError, match=r"above the limit of Pub/Sub, which is 10000000; store the content"):
            await source.send([b"small", b"x" * 10_000_000])
        assert shared.pubsub().unacked(topic_of(name)) == 0


@awaited
async def test_the_backlog_is_what_the_process_holds_and_unsure_for_a_while():
    name = await created(fresh("backlog"))
    async with source_at(shared.pubsub().address, name, settled_s=0.2) as source:
        assert await source.depth() is None
        first = await source.backlog()
        assert (first.seen, first.depth) == (0, None) and first.unsure_s > 0 and "Cloud Monitoring" in first.advice

        async def is_settled() -> bool:
            return (await source.backlog()).unsure_s == 0

        await until(is_settled)
        await source.send([b"one", b"two"])
        held = await received(source, 2)
        assert (await source.backlog()).seen == 2
        await source.ack(held[:1])
        await source.release(held[1:], 30.0)
        last = await source.backlog()
        assert last.seen == 0 and 0.2 < last.unsure_s <= 30.0


@awaited
async def test_receipts_that_exactly_once_delivery_refuses_are_no_error_unless_the_service_failed():
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.rpc.error_details_pb2 import ErrorInfo
    from google.rpc.status_pb2 import Status
    from grpc import StatusCode

    name = await created(fresh("once"))
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        await source.send([b"one", b"two"])
        held, other = await received(source, 2)
        for reason in ("PERMANENT_FAILURE_INVALID_ACK_ID", "TRANSIENT_FAILURE_UNORDERED_ACK_ID"):
            detail = AnyMessage()
            detail.Pack(ErrorInfo(reason=reason, metadata={str(held.receipt): reason}))
            status = Status(code=StatusCode.FAILED_PRECONDITION.value[0], message="words", details=[detail])
            for method in ("Acknowledge", "ModifyAckDeadline"):
                proxy.refuse(method, StatusCode.FAILED_PRECONDITION, "words", status.SerializeToString())
            if reason.startswith("PERMANENT"):
                assert await source.extend([held, other], 60.0) == [held], "another consumer has it"
                await source.ack([held])
            else:
                for call in (source.extend([held], 60.0), source.ack([held])):
                    with pytest.raises(UnavailableError, match=f"failed on 1 messages: {reason}"):
                        await call
