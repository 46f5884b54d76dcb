"""Messages of RabbitMQ that are on their way, between two queues or between the broker and here, are not forgotten."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.fast_source import FastRabbitSource
from adapters.rabbitmq.queue_owner import bodies_of, owner
from adapters.rabbitmq.waiting import left_in, opened, received, until
from keywise.adapters.rabbitmq import delay_classes as rabbitmq_delays
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.messages import DELAYS
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.errors import DatabaseError
from running import awaited, run
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")

HOPS = 60
"""How often a message is put off while somebody counts it."""


@awaited
async def test_what_somebody_else_puts_off_is_counted_at_once():
    """Nobody believes for long that a delay queue is not there."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("counted"))
        async with opened(queue, FastRabbitSource) as looking, opened(queue, FastRabbitSource) as other:
            for number, delay_s in enumerate((1000.0, 10_000.0, 100_000.0)):
                assert await looking.depth() == number
                await other.send([b"later"], delay_s=delay_s)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_message_that_goes_round_is_never_overlooked(kind):
    async def story() -> None:
        async with owner(shared.rabbitmq().url) as they:
            queue = await they.declare(fresh("round"), queue_type=kind)
        broker = Broker(shared.rabbitmq().url)
        source, looking = (FastRabbitSource(broker, queue) for _ in range(2))
        async with source, looking:
            await source.send([b"round"])
            counted: list[int] = []

            async def count() -> None:
                while True:
                    counted.append(await looking.depth())

            counting = asyncio.create_task(count())
            for number in range(HOPS):
                await source.release(await received(source, 1), number % 5)
            counting.cancel()
        assert len(counted) > HOPS / 10 and counted.count(0) == 0

    run(story(), limit_s=60)


@awaited
async def test_the_first_wait_of_its_class_holds_up_nobody():
    """A new delay queue is not used at once; who releases does not wait for that."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("first"))
        await they.publish(queue, b"one", b"two")
        async with opened(queue) as source:
            held = await received(source, 2)
            async with asyncio.timeout(1.0):
                await source.release(held, 100.0)
            assert await source.depth() == 2
            await until(lambda: _delayed(queue, 2))
            await until(lambda: left_in(queue, 2))


async def _delayed(queue: str, count: int) -> bool:
    return await asyncio.to_thread(shared.rabbitmq().messages, f"{DELAYS}{queue}.") == count


@awaited
async def test_what_waits_for_a_new_delay_queue_comes_again_if_its_worker_ends():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("ended"))
        await they.publish(queue, b"one")
        async with opened(queue) as source:
            await source.release(await received(source, 1), 100.0)
        async with opened(queue) as source:
            assert bodies_of(await received(source, 1)) == [b"one"]
        assert await left_in(queue, 1)


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
@awaited
async def test_a_delay_that_is_longer_than_any_class_is_kept_in_several_steps(monkeypatch, wait_s):
    monkeypatch.setattr(rabbitmq_delays, "CLASSES_S", (1,))
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("long"), queue_type="quorum")
        await they.publish(queue, b"released")
        async with opened(queue, FastRabbitSource, second_s=0.1) as source:
            begun = time.monotonic()
            await source.release(await received(source, 1), 30.0)
            await source.send([b"sent"], delay_s=25.0)
            came: dict[bytes, float] = {}
            while len(came) < 2:
                came |= {one.body: time.monotonic() - begun for one in await source.receive(10, wait_s)}
            assert came[b"sent"] >= 2.5 and came[b"released"] >= 3.0
            assert await source.depth() == 2


@awaited
async def test_a_channel_whose_queue_was_deleted_is_closed():
    broker = shared.rabbitmq()

    async def channels() -> int:
        return int(await asyncio.to_thread(broker.ask, f"length(rpc:call('{broker.node}', rabbit_channel, list, []))"))

    async with owner(broker.url) as they:
        queue = await they.declare(fresh("deleted"))
        async with opened(queue) as source:
            await source.send([b"0"])
            before = 0
            for number in range(1, 6):
                await received(source, 1)
                before = before or await channels()
                await they.delete(queue)
                await until(lambda: source._subscription.is_over)
                await they.declare(queue)
                await source.send([b"%d" % number])
            await received(source, 1)
            await until(lambda: _at_most(channels, before))


async def _at_most(count: Callable[[], Awaitable[int]], limit: int) -> bool:
    return await count() <= limit


@awaited
async def test_what_cannot_be_put_off_is_given_back_only_as_often_as_its_queue_bears():
    """A broker that takes no messages for a while must not make a queue throw away what nobody could copy."""
    broker, user = shared.rabbitmq(), fresh("user")
    broker.add_user(user, "secret")
    async with owner(broker.url) as they:
        graveyard = await they.declare(fresh("graveyard"))
        queue = await they.declare(
            fresh("given"),
            queue_type="quorum",
            delivery_limit=5,
            dead_letter_exchange="",
            dead_letter_routing_key=graveyard,
        )
        await they.publish(queue, b"one")
        async with RabbitSource(Broker(broker.url.replace("guest:guest", f"{user}:secret")), queue) as source:
            assert await source.receive(0, 0.0) == []
            broker.permit(user, write="^$")
            for _ in range(12):
                [held] = await source.receive(1, 5.0)
                with pytest.raises(DatabaseError, match="give this user the right"):
                    await source.release([held], 0.0)
            broker.permit(user)
            [held] = await received(source, 1)
            assert held.body == b"one"
            await source.ack([held])
        await until(lambda: left_in(queue, 0))
        assert await they.ready(graveyard) == 0
