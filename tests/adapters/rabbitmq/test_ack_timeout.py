"""A broker that has little patience: whatever is held for long stays where it belongs, and no channel is lost."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.fast_source import SECOND_S, FastRabbitSource
from adapters.rabbitmq.queue_owner import owner
from adapters.rabbitmq.test_pipeline import Shop
from adapters.rabbitmq.waiting import left_in, opened, until
from keywise.adapters.rabbitmq import source as rabbitmq_source
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.delay_queues import DelayQueues
from keywise.adapters.rabbitmq.messages import DELAYS, fresh_properties
from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.controls import Pause
from running import awaited, run
from servers import shared
from servers.rabbitmq import RabbitServer, rabbit_server

pytestmark = pytest.mark.server("rabbitmq")

PATIENCE_S = 2.0
ROUNDS = 4
"""So often a message comes again, each time after half of the patience or more."""


@pytest.fixture(scope="module")
def hasty() -> Iterator[RabbitServer]:
    with rabbit_server(f"consumer_timeout = {PATIENCE_S * 1000:.0f}\n") as server:
        yield server


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@awaited
async def test_what_is_held_for_long_comes_again_and_no_channel_is_lost(hasty: RabbitServer, kind: str, monkeypatch):
    monkeypatch.setattr(rabbitmq_source, "RENEWED_S", SECOND_S)
    async with owner(hasty.url) as they:
        queue = await they.declare(fresh("held"), queue_type=kind)
        await they.publish(queue, b"one")
    async with FastRabbitSource(Broker(hasty.url), queue, ack_timeout_s=PATIENCE_S) as source:
        [first] = [held] = await source.receive(1, 5.0)
        for count in range(2, ROUNDS + 2):
            [again] = await source.receive(1, 5.0)
            assert (again.id, again.body, again.count) == (first.id, b"one", count)
            assert again.receipt != held.receipt
            await source.ack([held])
            # The delay queue forgets it a moment later; an old receipt that settled it would leave none.
            await until(lambda: left_in(queue, 1, hasty))
            held = again
        await source.ack([held])
        await until(lambda: left_in(queue, 0, hasty))


HOUR_S = 3600


async def waits_for_an_hour(queue: str) -> bool:
    """Whether the one message of a queue does."""
    delayed = await asyncio.to_thread(shared.rabbitmq().messages, f"{DELAYS}{queue}.{HOUR_S}s.")
    return delayed == 1 and await left_in(queue, 1)


@awaited
async def test_what_came_too_early_and_is_held_for_long_still_waits_for_its_time():
    """It is here because it came ahead, and nobody has asked for more since."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("early"))
        async with opened(queue, FastRabbitSource, ack_timeout_s=PATIENCE_S) as source:
            await they.publish(queue, b"now")
            [now] = await source.receive(1, 5.0)
            due = time.time() + HOUR_S
            await they.publish_as(queue, [b"later"], fresh_properties(b"later", "id", time.time(), due))
            await source.ack([now])
            await until(lambda: waits_for_an_hour(queue))


@awaited
async def test_what_is_put_off_waits_for_its_time_though_it_was_held_for_long_before():
    """Its delay queue is new, so it is here for a while longer."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("snoozed"))
        await they.publish(queue, b"one")
    async with opened(queue, ack_timeout_s=PATIENCE_S) as source:
        [one] = await source.receive(1, 5.0)
        await source.release([one], HOUR_S)
        await until(lambda: waits_for_an_hour(queue))


def test_a_key_that_is_paused_for_long_costs_no_channel_and_is_applied_once(hasty: RabbitServer, tmp_path, monkeypatch):
    monkeypatch.setattr(DelayQueues, "_fresh_s", 0.1)

    async def story() -> None:
        async with owner(hasty.url) as they:
            queue = await they.declare(fresh("paused"))
            shop = Shop(
                tmp_path,
                queue,
                url=f"{hasty.url}?queue={queue}&ack_timeout={PATIENCE_S}s",
                lease="1s",
                margin="100ms",
                runtime_max="1s",
            )
            async with shop.app, shop.app.open("stock", work=False) as pipeline:
                await pipeline.control_store.pause(Pause("k1"))
                await they.publish(queue, *(b'{"key": "k%d", "version": 1}' % number for number in range(3)))
                work = asyncio.create_task(shop.app.run(handle_signals=False))
                await until(lambda: shop.file.exists() and set(shop.content()) == {"k0", "k2"})
                over_at = time.monotonic() + 3 * PATIENCE_S
                await until(lambda: time.monotonic() > over_at)
                await until(lambda: left_in(queue, 1, hasty))
                await pipeline.control_store.resume("k1", False)
                await until(lambda: "k1" in shop.content())
                await until(lambda: left_in(queue, 0, hasty))
                shop.app.stop()
                await work
        assert shop.content() == {"k0": 1, "k1": 1, "k2": 1}
        assert [one for one in shop.events if isinstance(one, events.Unavailable)] == []
        applied = [one for one in shop.events if isinstance(one, events.Settled) and one.outcome is Outcome.APPLIED]
        assert sum(one.changes for one in applied) == 3

    run(story(), limit_s=60)
