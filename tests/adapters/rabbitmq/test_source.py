"""A queue of RabbitMQ is consumed as it is: acks, cut connections, dead workers, delays, limits of the broker."""

import asyncio
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pika
import pytest

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.fast_source import FastRabbitSource
from adapters.rabbitmq.queue_owner import bodies_of, owner
from adapters.rabbitmq.waiting import left_in, opened, received, until
from keywise.adapters.rabbitmq import broker as keywise_rabbitmq
from keywise.adapters.rabbitmq import source as rabbitmq_source
from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.messages import fresh_properties
from keywise.adapters.rabbitmq.publisher import Publisher
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.adapters.rabbitmq.subscription import COPY_AFTER_DELIVERIES
from keywise.core.errors import DatabaseError, UnavailableError
from running import awaited
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")

KINDS = ("classic", "quorum")


async def _is_settled(source: RabbitSource, left: int) -> bool:
    return await source.depth() == left


@awaited
async def test_after_a_cut_everything_comes_again_and_old_receipts_say_nothing():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("cut"))
        await they.publish(queue, b"one", b"two", b"three")
    async with opened(queue) as source:
        old = await received(source, 3)
        await source.ack(old[:1])
        await until(lambda: left_in(queue, 2))
        waiting = asyncio.create_task(source.receive(10, 20.0))
        await asyncio.to_thread(shared.rabbitmq().cut_connections)
        with pytest.raises(UnavailableError, match="cut by a test"):
            await waiting
        await source.ack(old)
        await source.release(old, 0.0)
        new = await received(source, 2)
        assert bodies_of(new) == bodies_of(old[1:])
        await source.ack(old)
        assert await left_in(queue, 2), "an ack of the lost channel has settled something"
        await source.ack(new)
        await until(lambda: left_in(queue, 0))


@awaited
async def test_two_consumers_share_a_queue_and_nothing_is_lost():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("shared"))
        bodies = [b"%d" % number for number in range(500)]
        seen: list[bytes] = []

        async def work(source: RabbitSource) -> None:
            while len(seen) < len(bodies):
                deliveries = await source.receive(20, 0.05)
                seen.extend(one.body for one in deliveries)
                await source.ack(deliveries)

        async with opened(queue, prefetch=20) as one, opened(queue, prefetch=20) as other:
            await asyncio.gather(work(one), work(other), they.publish(queue, *bodies))
        assert sorted(seen) == sorted(bodies)
        assert await they.ready(queue) == 0


@awaited
async def test_what_a_killed_worker_held_comes_again():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("killed"))
        await they.publish(queue, b"one", b"two")
    program = textwrap.dedent(f"""
        import asyncio
        from keywise.adapters.rabbitmq.broker import Broker
        from keywise.adapters.rabbitmq.source import RabbitSource

        async def main():
            async with RabbitSource(Broker({shared.rabbitmq().url!r}), {queue!r}) as source:
                held = []
                while len(held) < 2:
                    held += await source.receive(2, 5.0)
                print("held", flush=True)
                await asyncio.get_running_loop().create_future()

        asyncio.run(main())
    """)
    worker = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    with worker.stdout:
        assert await asyncio.to_thread(worker.stdout.readline) == b"held\n"
        async with opened(queue) as source:
            assert await source.receive(10, 0.0) == []
            worker.kill()
            worker.wait()
            assert bodies_of(await received(source, 2)) == [b"one", b"two"]


@awaited
async def test_who_stops_asking_gives_back_what_came_ahead():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("ahead"))
        await they.publish(queue, *(b"%d" % number for number in range(10)))
        async with opened(queue) as source, opened(queue) as another:
            [held] = await source.receive(1, 5.0)
            await until(lambda: they_have(they, queue, 9))
            assert len(await received(another, 9)) == 9
            await source.ack([held])
            await until(lambda: left_in(queue, 9))


async def they_have(they, queue: str, ready: int) -> bool:
    return await they.ready(queue) == ready


@awaited
async def test_a_blocked_prefetch_does_not_hold_up_who_asks_for_more():
    """Whatever is held, a receive gets what is there: it is the consumer who knows how much it can hold."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("more"))
        await they.publish(queue, *(b"%d" % number for number in range(50)))
        async with opened(queue, prefetch=5) as source:
            assert len(await received(source, 50)) == 50


@pytest.mark.parametrize("kind", KINDS)
@awaited
async def test_a_released_message_keeps_its_id_time_count_and_headers(kind):
    async with owner(shared.rabbitmq().url) as they:
        queue, other = await they.declare(fresh("kept"), queue_type=kind), await they.declare(fresh("other"))
        headers = {
            "number": 2**40,
            "deep": {"list": [1, "two", None]},
            "raw": b"\xff\xfe",
            "flag": True,
            "CC": [other],
            "x-death": [{"queue": queue, "reason": "expired", "count": 1}],
        }
        await they.publish(
            queue, b"body", headers=headers, message_id="m1", timestamp=1_700_000_000, expiration="60000"
        )
        copied = await they.ready(other)
        async with opened(queue, FastRabbitSource) as source:
            [first] = [held] = await received(source, 1)
            assert (first.count, first.sent_at) == (1, 1_700_000_000.0)
            for count, delay_s in ((2, 0.0), (3, 5.0), (4, 5.0)):
                await source.release([held], delay_s)
                [held] = await received(source, 1)
                assert (held.id, held.body, held.sent_at, held.count) == (first.id, b"body", first.sent_at, count)
                assert held.receipt != first.receipt
                assert held.headers is not None
                assert held.headers["number"] == str(2**40) and held.headers["flag"] == "True"
                assert held.headers["CC"] == str([other]) and "expired" in held.headers["x-death"]
            await source.ack([held])
            await until(lambda: left_in(queue, 0))
        assert await they.ready(other) == copied, "a copy went to another queue as well"


@awaited
async def test_nothing_runs_into_the_delivery_limit_because_its_key_was_busy():
    """Releases do not count for the queue, and lost channels do not add up to its limit."""
    async with owner(shared.rabbitmq().url) as they:
        graveyard = await they.declare(fresh("graveyard"))
        queue = await they.declare(
            fresh("limited"),
            queue_type="quorum",
            delivery_limit=5,
            dead_letter_exchange="",
            dead_letter_routing_key=graveyard,
        )
        await they.publish(queue, b"busy")
        async with opened(queue, FastRabbitSource) as source:
            for _ in range(8):
                await source.release(await received(source, 1), 1.0)
        for _ in range(12):
            async with opened(queue) as source:
                [held] = await received(source, 1)
        assert held.count > 16
        assert await they.ready(graveyard) == 0


@awaited
async def test_a_message_waits_for_its_own_delay_and_not_for_those_of_other_classes():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("classes"))
        async with opened(queue, FastRabbitSource) as source:
            await source.send([b"last"], delay_s=3000.0)
            await source.send([b"second"], delay_s=40.0)
            await source.send([b"first"], delay_s=10.0)
            await until(lambda: _is_settled(source, 3))
            assert [one.body for one in await received(source, 2)] == [b"first", b"second"]
            await until(lambda: _is_settled(source, 3))


@awaited
async def test_others_on_the_queue_and_its_settings_are_left_as_they_were():
    broker = shared.rabbitmq()
    async with owner(broker.url) as they:
        graveyard = await they.declare(fresh("graveyard"))
        policy = fresh("policy")
        queue = await they.declare(fresh("theirs"), max_priority=3)
        settings = f'{{"dead-letter-exchange": "", "dead-letter-routing-key": "{graveyard}"}}'
        await asyncio.to_thread(broker.control, "set_policy", "--apply-to", "queues", policy, f"^{queue}$", settings)
        looked = ("list_queues", "name", "durable", "auto_delete", "arguments", "policy")
        before = await asyncio.to_thread(broker.control, *looked)
        theirs = await they.consume(queue)
        async with opened(queue, FastRabbitSource) as source:
            await they.publish(queue, *(b"%d" % number for number in range(40)))
            ours: list[bytes] = []
            while len(theirs) + len(ours) < 40:
                deliveries = await source.receive(3, 0.05)
                await source.release(deliveries[:1], 1.0)
                await source.ack(deliveries[1:])
                ours += (one.body for one in deliveries[1:])
            assert theirs, "the other consumer was pushed aside"
        assert sorted([*theirs, *ours]) == sorted(b"%d" % number for number in range(40))
        after = await asyncio.to_thread(broker.control, *looked)
        assert _of(queue, after) == _of(queue, before)
        assert await they.ready(graveyard) == 0


def _of(queue: str, listed: str) -> Sequence[str]:
    return [line for line in listed.splitlines() if line.startswith(f"{queue}\t")]


@awaited
async def test_a_release_that_finds_no_room_is_told_and_the_message_comes_again():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("full"), max_length=1, overflow="reject-publish")
        await they.publish(queue, b"held")
        async with opened(queue) as source:
            [held] = await received(source, 1)
            source._subscription.stop_consuming()
            await they.publish(queue, b"waiting")
            with pytest.raises(UnavailableError, match="takes no more messages"):
                await source.release([held], 0.0)
            with pytest.raises(UnavailableError, match="takes no more messages"):
                await source.send([b"more"])
            assert bodies_of(await received(source, 2)) == [b"held", b"waiting"]


@awaited
async def test_a_worn_message_is_handed_over_all_the_same_if_it_cannot_be_made_anew():
    broker, user = shared.rabbitmq(), fresh("user")
    broker.add_user(user, "secret")
    async with owner(broker.url) as they:
        queue = await they.declare(fresh("worn"), queue_type="quorum")
        await they.publish(queue, b"worn")
    for _ in range(COPY_AFTER_DELIVERIES):
        async with opened(queue) as source:
            await received(source, 1)
    url = broker.url.replace("guest:guest", f"{user}:secret")
    async with RabbitSource(Broker(url), queue) as source:
        assert await source.receive(0, 0.0) == []
        broker.permit(user, write="^$")
        [held] = await received(source, 1)
        assert (held.body, held.count) == (b"worn", COPY_AFTER_DELIVERIES + 1)
        with pytest.raises(DatabaseError, match="give this user the right"):
            await source.release([held], 0.0)
        assert bodies_of(await received(source, 1)) == [b"worn"]


@awaited
async def test_a_broker_without_memory_takes_nothing_and_acks_go_on(monkeypatch):
    monkeypatch.setattr(keywise_rabbitmq, "BLOCKED_S", 0.2)
    broker = shared.rabbitmq()

    def allow(part: float) -> None:
        broker.ask(f"rpc:call('{broker.node}', vm_memory_monitor, set_vm_memory_high_watermark, [{part:.4f}])")

    async with owner(broker.url) as they:
        queue = await they.declare(fresh("alarm"))
        await they.publish(queue, b"one", b"two")
        async with opened(queue) as source:
            held = await received(source, 2)
            allow(0.0001)
            try:
                with pytest.raises(UnavailableError, match="short of memory or disk"):
                    await source.send([b"three"])
                await source.ack(held)
                await until(lambda: they_have(they, queue, 0))
            finally:
                allow(0.9)
            await source.send([b"four"])
            # Nothing is known of the other one: it may have been on its way.
            while b"four" not in bodies_of(await received(source, 1)):
                pass


@awaited
async def test_a_copy_that_came_beside_its_original_is_settled_with_it():
    """A worker may die between the copy and the ack: both are there with one id, and one of them is enough."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("twice"))
        await they.publish_as(queue, [b"body", b"body"], fresh_properties(b"body", "one", 1.0))
        async with opened(queue) as source:
            held = await received(source, 1)
            assert [one.id for one in held] == ["one"]
            await until(lambda: left_in(queue, 1))
            await source.ack(held)
            await until(lambda: left_in(queue, 0))


@awaited
async def test_what_cannot_even_be_sent_spoils_no_confirmation():
    """Numbers of messages are those of the channel, so that one is given up."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("unsent"))
        publisher = Publisher(Broker(shared.rabbitmq().url))
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await publisher.publish(queue, [(b"one", None), (b"two", pika.BasicProperties(type="x" * 300))])
            await publisher.publish(queue, [(b"three", None)])
        await publisher.close()
        await publisher.close()
        assert await they.ready(queue) >= 2


@awaited
async def test_a_channel_that_is_over_answers_with_its_end():
    link = BrokerLink(Broker(shared.rabbitmq().url), "testing")
    channel = await link.channel()
    with pytest.raises(DatabaseError, match="declare it first"):
        await channel.ask("queue_declare", queue=fresh("nowhere"), passive=True)
    with pytest.raises(DatabaseError, match="declare it first"):
        await channel.ask("basic_qos", prefetch_count=1)
    channel.close()
    await asyncio.gather(link.close(), link.close())


@awaited
async def test_whoever_gives_up_connecting_leaves_nothing_behind():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        connecting = asyncio.create_task(BrokerLink(Broker(f"amqp://127.0.0.1:{port}/"), "testing").channel())
        await asyncio.wait([connecting], timeout=0.2)
        connecting.cancel()
        await asyncio.wait([connecting], timeout=10.0)
        assert connecting.cancelled()


@awaited
async def test_a_queue_that_messages_go_through_all_the_time_is_never_told_as_empty(monkeypatch):
    """However often it is found empty: one that counts it as empty would stop in the midst of them."""
    monkeypatch.setattr(rabbitmq_source, "TRANSIT_S", 1.0)
    monkeypatch.setattr(rabbitmq_source, "COUNTS_MAX", 2)
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("passing"))
    async with opened(queue) as source:
        counting = asyncio.create_task(source.depth())
        while not counting.done():
            await source.send([b"one"])
            await source.ack(await received(source, 1))
            # Nearly all of the time there is none.
            await asyncio.wait([counting], timeout=0.1)
        assert counting.result() == 1
        await until(lambda: _is_settled(source, 0))


@awaited
async def test_what_waits_for_a_new_delay_queue_is_bounded(monkeypatch):
    """Each release would be a task of its own; whoever releases more waits too, and nothing is lost."""
    monkeypatch.setattr(rabbitmq_source, "BACKGROUND_MAX", 3)
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("many"))
        await they.publish(queue, *(b"%d" % number for number in range(10)))
    async with opened(queue, FastRabbitSource, second_s=0.1) as source:
        beside = []
        for one in await received(source, 10):
            await source.release([one], 15.0)
            beside.append(len(source._background))
        assert max(beside) == 3
        assert bodies_of(await received(source, 10)) == [b"%d" % number for number in range(10)]
