"""A queue of RabbitMQ counts as empty only when nothing can come any more, and what cannot be counted is unknown."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import Owner, owner
from adapters.rabbitmq.test_broker_limits import Place
from adapters.rabbitmq.waiting import left_in, opened, received, until
from keywise.adapters.rabbitmq import source as rabbitmq_source
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.errors import UnavailableError
from keywise.core.source import Backlog, backlog_of
from running import awaited, run
from servers import machine, shared
from servers.rabbitmq import rabbit_server

pytestmark = pytest.mark.server("rabbitmq")

SETTINGS = "management.tcp.port = {port}\nmanagement.tcp.ip = 127.0.0.1\n"
DEAD_LETTER_S = "5s"
"""What the brokers of tests are set to."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    port = machine.free_port()
    with rabbit_server(SETTINGS.format(port=port), "rabbitmq_management") as server:
        yield Place(server, f"http://127.0.0.1:{port}", "", Path(), Path())


@awaited
async def test_without_the_management_api_the_depth_is_unknown():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("unknown"))
        await they.publish(queue, b"one", b"two", b"three")
    async with opened(queue) as other, opened(queue) as source:
        await received(other, 1)
        await until(lambda: _sees(source, 2))
        backlog = await backlog_of(source)
        assert (backlog.depth, backlog.held, backlog.is_all) == (None, None, False)
        assert "management=" in backlog.advice


async def _sees(source: RabbitSource, count: int) -> bool:
    return (await source.backlog()).seen == count


@awaited
async def test_nothing_can_come_from_delay_queues_that_this_process_has_made():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("made"))
    broker = Broker(shared.rabbitmq().url)
    async with RabbitSource(broker, queue) as working, RabbitSource(broker, queue) as looking:
        assert (await looking.backlog()).unsure_s == 0, "there is no delay queue"
        await working.receive(1, 0.0)

        async def is_found() -> bool:
            """The first source makes its delay queues beside."""
            assert (await looking.backlog()).unsure_s == 0
            return bool(looking._delay_queues.found)

        await until(is_found)


@awaited
async def test_messages_may_come_from_older_delay_queues_and_after_a_lost_connection():
    """The broker may have been restarted: it tries to move what has expired again after its time limit."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("older"))
    async with opened(queue) as source:
        await source.receive(1, 0.0)
        assert (await source.backlog()).unsure_s == 0
        async with opened(queue, dead_letter_timeout_s=100.0) as other:
            assert 100.0 < (await other.backlog()).unsure_s <= 115.0
        async with opened(queue) as other:
            assert (await other.backlog()).unsure_s > 180.0
        await asyncio.to_thread(shared.rabbitmq().cut_connections)
        await until(lambda: _is_unsure(source))


async def _is_unsure(source: RabbitSource) -> bool:
    try:
        return (await source.backlog()).unsure_s > 180.0
    except UnavailableError:
        return False


@awaited
async def test_the_management_api_tells_what_other_consumers_hold(place: Place):
    async with owner(place.server.url) as they:
        queue = await they.declare(fresh("held"), queue_type="quorum")
        await they.publish(queue, b"one", b"two", b"three")
    async with (
        RabbitSource(Broker(place.server.url), queue) as other,
        place.source(queue, management=place.management) as source,
    ):
        held = await received(other, 3)
        await until(lambda: _tells(source, Backlog(3, held=3, unsure_s=rabbitmq_source.STATISTICS_S)))
        await other.ack(held)
        await until(lambda: _tells(source, Backlog(0, held=0)))


async def _tells(source: RabbitSource, expected: Backlog) -> bool:
    return await source.backlog() == expected


@pytest.mark.parametrize("is_managed", [True, False])
def test_what_the_broker_could_not_move_is_not_overlooked(place: Place, is_managed: bool):
    """As after a restart: its queue was not there when the delays ended, and the broker tries again only later."""
    options = {"management": place.management} if is_managed else {"dead_letter_timeout": DEAD_LETTER_S}
    bodies = [b"%d" % number for number in range(20)]

    async def story() -> None:
        async with owner(place.server.url) as they:
            queue = await they.declare(fresh("away"))
            async with RabbitSource(Broker(place.server.url), queue) as source:
                await source.send(bodies, delay_s=1.0)
                await they.delete(queue)
                [delay_queue] = source._broker.made
            await until(lambda: _is_ready(they, delay_queue, 0))
            assert await left_in(queue, len(bodies), place.server)
            await they.declare(queue)
        looks = []
        async with place.source(queue, **options) as source:
            while not looks or looks[-1].seen < len(bodies):
                looks.append(await source.backlog())
            assert [one for one in looks if not (one.seen or one.unsure_s)] == []
            await source.ack(await received(source, len(bodies)))
            await until(lambda: _is_empty(source))

    run(story(), limit_s=60)


async def _is_ready(they: Owner, queue: str, count: int) -> bool:
    return await they.ready(queue) == count


async def _is_empty(source: RabbitSource) -> bool:
    backlog = await source.backlog()
    return not (backlog.seen or backlog.unsure_s)
