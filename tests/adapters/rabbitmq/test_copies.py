"""Lost connections do not multiply messages of RabbitMQ: of several copies, the newest one that is known is enough."""

import asyncio
import math
from contextlib import suppress
from pathlib import Path

import pika
import pytest
from msgspec.structs import replace

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import owner
from adapters.rabbitmq.test_pipeline import Shop
from adapters.rabbitmq.waiting import cut, left_in, opened, received, until
from keywise.adapters.rabbitmq import copies as rabbitmq_copies
from keywise.adapters.rabbitmq.copies import ORIGINAL, CopyLog
from keywise.adapters.rabbitmq.delay_queues import DelayQueues
from keywise.adapters.rabbitmq.messages import MessageIdentity, content_of, copied_properties, identity_of
from keywise.adapters.rabbitmq.publisher import Publisher
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.adapters.rabbitmq.subscription import Subscription
from keywise.core.change import Delivery
from keywise.core.controls import Pause
from keywise.core.errors import UnavailableError
from running import awaited, run
from servers import shared
from servers.rabbitmq import rabbit_server

pytestmark = pytest.mark.server("rabbitmq")

MESSAGES, KEYS, CUTS = 100, 10, 12
CUT_EVERY_S = 0.3
FRESH_S = 4.0
"""So long a new delay queue cannot be used: the first cuts come while messages wait for that, the others while they are
put off."""


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_cuts_make_at_most_two_of_a_message_and_lose_none(kind: str, tmp_path: Path, monkeypatch):
    """All keys are paused, so that a worker gives back whatever it gets."""
    monkeypatch.setattr(DelayQueues, "_fresh_s", FRESH_S)

    async def story(url: str, count) -> None:
        async with owner(url) as they:
            queue = await they.declare(fresh("cut"), queue_type=kind)
            await they.publish(
                queue, *(b'{"key": "k%d", "version": %d}' % (number % KEYS, number) for number in range(MESSAGES))
            )
        shop = Shop(tmp_path, queue, f"{url}?queue={queue}", prefetch=50, batch_max=50)
        async with shop.app, shop.app.open("stock", work=False) as pipeline:
            await pipeline.control_store.pause(Pause("k*", is_pattern=True))
            work = asyncio.create_task(shop.app.run(handle_signals=False))
            counts = []
            for _ in range(CUTS):
                await asyncio.wait([work], timeout=CUT_EVERY_S)
                await asyncio.to_thread(server.cut_connections)
                counts.append(await asyncio.to_thread(count, queue))
            assert max(counts) <= 2 * MESSAGES, counts
            await pipeline.control_store.resume("k*", True)
            await until(lambda: left_in(queue, 0, server))
            shop.app.stop()
            await work
        newest = {key: max(number for number in range(MESSAGES) if number % KEYS == key) for key in range(KEYS)}
        assert shop.content() == {f"k{key}": version for key, version in newest.items()}

    with rabbit_server() as server:
        run(story(server.url, server.left_in), limit_s=60)


@awaited
async def test_what_was_lost_while_its_delay_queue_was_new_is_not_copied(monkeypatch):
    """The broker hands it over again; a copy would be one more."""
    monkeypatch.setattr(DelayQueues, "_fresh_s", FRESH_S)
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("lost"))
        await they.publish(queue, b"one")
    async with opened(queue) as source:
        beside = len(source._background)
        assert await left_in(queue, 1)
        await source.release(await received(source, 1), 100.0)
        await asyncio.to_thread(shared.rabbitmq().cut_connections)
        assert len(source._background) == beside + 1
        await until(lambda: len(source._background) == beside)
        assert await left_in(queue, 1)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("is_ours", [False, True])
@awaited
async def test_an_original_that_comes_again_beside_its_copy_is_not_handed_over(kind: str, is_ours: bool, monkeypatch):
    """The connection was lost between the confirmation of the copy and the ack of the original."""
    monkeypatch.setattr(rabbitmq_copies, "ORIGINAL_REMEMBERED_S", math.inf)
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("beside"), queue_type=kind)
        async with opened(queue) as source:
            if is_ours:
                await source.send([b"one"])
            else:
                await they.publish(queue, b"one", headers={"tenant": 1})
            [original] = await received(source, 1)
            with monkeypatch.context() as patched:
                patched.setattr(Subscription, "ack", lambda *_: None)
                await source.release([original], 0.0)
            await until(lambda: left_in(queue, 2))
            await cut(source)
            [again] = await received(source, 1)
            assert again.id == original.id and again.count > original.count
            await until(lambda: left_in(queue, 1))
            await source.ack([again])
            await until(lambda: left_in(queue, 0))


@awaited
async def test_an_original_whose_copy_is_uncertain_keeps_its_id(monkeypatch):
    """So its next copy takes the place of the other one, wherever that is."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("uncertain"))
        await they.publish(queue, b"one")
        async with opened(queue) as source:
            [original] = await received(source, 1)
            with monkeypatch.context() as patched:
                patched.setattr(Publisher, "publish", _lost)
                with pytest.raises(UnavailableError):
                    await source.release([original], 0.0)
            await cut(source)
            [again] = await received(source, 1)
            assert again.id == original.id
            await _release_after_cut(source, again)
            async with owner(shared.rabbitmq().url) as later:
                await later.publish_as(queue, [b"one"], _numbered(str(original.id), 1))
            [copy] = await received(source, 1)
            await until(lambda: left_in(queue, 1))
            [(_, properties)] = source._subscription.unsettled([copy])
            identity = identity_of(properties.headers, b"one")
            assert identity.count > 1
            assert replace(identity, count=1) == MessageIdentity(str(original.id), 1, copy.sent_at)


async def _release_after_cut(source: RabbitSource, delivery: Delivery) -> None:
    """The connection that publishes may not have noticed yet that it was cut."""
    while True:
        with suppress(UnavailableError):
            return await source.release([delivery], 0.0)


async def _lost(*_: object) -> None:
    raise UnavailableError("the answer was lost")


def _numbered(id: str, number: int, **properties: object) -> pika.BasicProperties:
    """Properties of a copy."""
    return copied_properties(pika.BasicProperties(**properties), b"one", MessageIdentity(id, number, 1.5))


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (2, 2)])
@awaited
async def test_of_two_copies_that_are_here_the_newer_one_stays(numbers: tuple[int, int]):
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("two"))
        async with opened(queue) as source:
            came = []
            for number in numbers:
                await they.publish_as(queue, [b"one"], _numbered("id", number))
                came += await source.receive(2, 1.0)
            assert {one.id for one in came} == {"id"}
            await until(lambda: left_in(queue, 1))
            assert identity_of(source._subscription.unsettled(came)[0][1].headers, b"one").count == 2
            await source.ack(came)
            await until(lambda: left_in(queue, 0))


@awaited
async def test_messages_that_differ_are_handed_over_though_they_bear_one_id():
    """A program may pass our header on, and `read` may look at the other ones."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("passed"))
        async with opened(queue) as source:
            for tenant in range(3):
                await they.publish_as(queue, [b"one"], _numbered("id", 1, headers={"tenant": tenant}))
            came = await received(source, 3)
            assert {one.headers["tenant"] for one in came} == {"0", "1", "2"}
            assert len({one.id for one in came}) == 3
            await source.release(came, 0.0)
            assert {one.headers["tenant"] for one in await received(source, 3)} == {"0", "1", "2"}


@awaited
async def test_a_new_message_that_equals_one_that_was_copied_is_handed_over():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("equal"))
        async with opened(queue) as source:
            await they.publish(queue, b"one")
            [first] = await received(source, 1)
            await source.release([first], 0.0)
            [copy] = await received(source, 1)
            await source.ack([copy])
            await they.publish(queue, b"one")
            [second] = await received(source, 1)
            assert second.id != first.id


@awaited
async def test_a_message_that_differs_from_a_copied_one_only_by_its_routing_key_is_handed_over(monkeypatch):
    """`read` may take the key from there: these are changes of two keys."""
    monkeypatch.setattr(rabbitmq_copies, "ORIGINAL_REMEMBERED_S", math.inf)
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("routed"))
        await they.publish_through("amq.direct", queue, f"{queue}.lamp", b"{}")
        await they.publish_through("amq.direct", queue, f"{queue}.desk", b"{}")
        async with opened(queue) as source:
            lamp, desk = await received(source, 2)
            await source.release([lamp], 0.0)
            [copy] = await received(source, 1)
            await source.ack([copy])
            await until(lambda: left_in(queue, 1))
            await cut(source)
            [again] = await received(source, 1)
            assert (again.routing_key, again.count) == (desk.routing_key, 2)


@awaited
async def test_a_copy_of_a_message_without_a_routing_key_has_none():
    """A copy is published with the name of its queue, which is not what the producer gave."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("unrouted"))
        await they.publish_through("amq.direct", queue, "", b"{}")
        async with opened(queue) as source:
            [original] = await received(source, 1)
            await source.release([original], 0.0)
            [copy] = await received(source, 1)
            assert (original.routing_key, copy.routing_key) == ("", "")


def test_a_message_and_its_copies_have_the_same_content():
    original = pika.BasicProperties(
        headers={"a": 1, "CC": ["other"], "x-death": [{"queue": "q", "reason": "expired"}]},
        expiration="1000",
        message_id="m",
        user_id="guest",
    )
    first = copied_properties(original, b"one", MessageIdentity("id", 1, 1.5))
    second = copied_properties(first, b"one", MessageIdentity("id", 2, 1.5))
    assert content_of(original, b"one", "r") == content_of(first, b"one", "r") == content_of(second, b"one", "r")
    assert content_of(original, b"two", "r") != content_of(original, b"one", "r")
    assert content_of(original, b"one", "s") != content_of(original, b"one", "r")
    named, plain = pika.BasicProperties(message_id="n"), pika.BasicProperties()
    assert content_of(named, b"one", "r") != content_of(plain, b"one", "r")


def test_a_number_is_outdated_once_a_higher_one_is_confirmed(monkeypatch):
    log = CopyLog()
    assert log.begin("id", b"c", 1, is_original=True) == 1
    assert log.begin("id", b"c", 1, is_original=False) == 2
    assert not log.is_outdated("id", b"c", ORIGINAL), "nobody knows of any copy"
    log.confirm("id", b"c", 1)
    assert log.is_outdated("id", b"c", ORIGINAL) and log.is_outdated("id", b"c", 0)
    assert not log.is_outdated("id", b"c", 1)
    assert not log.is_outdated("id", b"other", 0)
    assert log.id_of_original(b"c") == "id" and log.id_of_original(b"other") is None
    monkeypatch.setattr(rabbitmq_copies, "REMEMBERED_S", 0.0)
    monkeypatch.setattr(rabbitmq_copies, "ORIGINAL_REMEMBERED_S", 0.0)
    assert not log.is_outdated("id", b"c", 0) and log.id_of_original(b"c") is None


def test_the_oldest_copies_are_forgotten(monkeypatch):
    monkeypatch.setattr(rabbitmq_copies, "REMEMBERED_MAX", 2)
    log = CopyLog()
    for number in range(3):
        log.begin(f"id{number}", b"%d" % number, 1, is_original=True)
    assert "id0" not in log and "id2" in log
    assert log.id_of_original(b"0") is None and log.id_of_original(b"2") == "id2"
    log.confirm("id0", b"0", 1)
    log.end("id0", b"0")
    assert not log.is_under_way("id0") and log.is_under_way("id2")
