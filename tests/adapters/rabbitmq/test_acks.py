"""Acks of RabbitMQ: one word for many, and never for one that is not finished."""

import random
from urllib.parse import urlsplit

import pytest
from pika.spec import Basic

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import bodies_of, owner
from adapters.rabbitmq.recording_proxy import listener
from adapters.rabbitmq.waiting import left_in, opened, received, until
from keywise.adapters.rabbitmq import subscription
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.errors import DatabaseError
from running import awaited
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")

KINDS = ("classic", "quorum")


@pytest.mark.parametrize("seed", range(4))
@awaited
async def test_an_ack_for_many_never_covers_one_that_is_not_finished(seed):
    """Whatever is acked, in whatever order and together with what: exactly the rest comes again."""
    rng = random.Random(seed)
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("acks"))
        bodies = [b"%d" % number for number in range(60)]
        await they.publish(queue, *bodies)
        async with opened(queue) as source:
            held = await received(source, 60)
            done = rng.sample(held, 45)
            while done:
                some, done = done[: rng.randrange(1, 12)], done[rng.randrange(1, 12) :]
                await source.ack(some)
                held = [one for one in held if one not in some]
            await until(lambda: left_in(queue, len(held)))
        async with opened(queue) as source:
            assert bodies_of(await received(source, len(held))) == bodies_of(held)
            assert await source.receive(10, 0.0) == []


@awaited
async def test_what_is_settled_in_its_order_costs_one_ack_for_each_batch_on_the_wire():
    broker = shared.rabbitmq()
    async with owner(broker.url) as they, listener(urlsplit(broker.url).port) as wire:
        queue = await they.declare(fresh("wire"))
        await they.publish(queue, *(b"%d" % number for number in range(300)))
        async with RabbitSource(Broker(url_at(wire.port)), queue) as source:
            held = await received(source, 300)
            for start in (0, 100, 200):
                await source.ack(held[start : start + 100])
            await until(lambda: left_in(queue, 0))
        assert [(ack.delivery_tag, ack.multiple) for ack in wire.said(Basic.Ack)] == [
            (100, True),
            (200, True),
            (300, True),
        ]


@awaited
async def test_a_straggler_costs_one_ack_for_each_that_is_settled_behind_it():
    """One word for those before it, then each for itself; the straggler alone comes again."""
    broker = shared.rabbitmq()
    async with owner(broker.url) as they, listener(urlsplit(broker.url).port) as wire:
        queue = await they.declare(fresh("straggler"))
        await they.publish(queue, *(b"%d" % number for number in range(20)))
        async with RabbitSource(Broker(url_at(wire.port)), queue) as source:
            held = await received(source, 20)
            await source.ack([*held[:10], *held[11:]])
            await until(lambda: left_in(queue, 1))
        acks = [(ack.delivery_tag, ack.multiple) for ack in wire.said(Basic.Ack)]
        assert acks == [(10, True), *((tag, False) for tag in range(12, 21))]
        async with opened(queue) as source:
            assert bodies_of(await received(source, 1)) == [b"10"]


@awaited
async def test_acks_wait_for_those_before_them_as_long_as_any_consumer_has_room():
    broker = shared.rabbitmq()
    async with owner(broker.url) as they, listener(urlsplit(broker.url).port) as wire:
        queue = await they.declare(fresh("room"))
        await they.publish(queue, *(b"%d" % number for number in range(12)))
        async with RabbitSource(Broker(url_at(wire.port)), queue, prefetch=8) as source:
            held = await received(source, 8)
            held += await received(source, 4)
            await source.ack(held[1:3])
            await source.ack(held[:1])
            await until(lambda: left_in(queue, 9))
        assert len(wire.said(Basic.Consume)) == 2
        assert [(ack.delivery_tag, ack.multiple) for ack in wire.said(Basic.Ack)] == [(3, True)]


def url_at(port: int) -> str:
    """The broker, reached by another port."""
    parts = urlsplit(shared.rabbitmq().url)
    return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}")).geturl()


@awaited
async def test_acks_out_of_order_are_told_in_time_and_at_the_end():
    """They wait for those before them, which may take long."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("untold"))
        await they.publish(queue, *(b"%d" % number for number in range(40)))
        async with opened(queue) as source:
            held = await received(source, 40)
            await source.ack(held[20:])
            await until(lambda: left_in(queue, 20))
            await source.ack(held[10:20])
        await until(lambda: left_in(queue, 10))
        async with opened(queue) as source:
            assert bodies_of(await received(source, 10)) == bodies_of(held[:10])


@pytest.mark.parametrize("kind", KINDS)
@awaited
async def test_what_goes_back_is_not_covered_by_acks_that_waited(kind):
    broker, user = shared.rabbitmq(), fresh("user")
    broker.add_user(user, "secret")
    async with owner(broker.url) as they:
        queue = await they.declare(fresh("back"), queue_type=kind)
        await they.publish(queue, b"a", b"b", b"c", b"d")
        async with RabbitSource(Broker(broker.url.replace("guest:guest", f"{user}:secret")), queue) as source:
            held = await received(source, 4)
            broker.permit(user, write="^$")
            await source.ack(held[1:])
            with pytest.raises(DatabaseError):
                await source.release(held[:1], 0.0)
            assert bodies_of(await received(source, 1)) == [b"a"]
            broker.permit(user)


@awaited
async def test_an_ack_does_not_wait_where_what_is_held_uses_up_the_prefetch():
    held_up, later_s = [], subscription.ACK_LATER_S
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("narrow"))
        await they.publish(queue, *(b"%d" % number for number in range(20)))
        async with opened(queue, prefetch=4) as source:
            held_up += await received(source, 3)
            subscription.ACK_LATER_S = 600.0
            try:
                for _ in range(17):
                    await source.ack(await received(source, 1))
            finally:
                subscription.ACK_LATER_S = later_s
