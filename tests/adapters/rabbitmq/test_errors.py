"""What can be wrong with a broker, a queue or a URL is told with what to do, and never with a password."""

import asyncio
import struct
import time

import pika
import pytest

import keywise
from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.fast_source import SECOND_S, FastRabbitSource
from adapters.rabbitmq.queue_owner import bodies_of, owner
from adapters.rabbitmq.waiting import left_in, opened, received, until
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.delay_classes import wait_of
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.errors import AddressError, DatabaseError, UnavailableError
from running import awaited, run
from servers import machine, shared

pytestmark = pytest.mark.server("rabbitmq")

SECRET = "s3cret"
BAD_URLS = {
    "amqp://": "names no broker",
    "amqp://one,two/": "names no broker",
    "amqp://host:port/": "has an invalid port",
    "amqp://host/a/b": "write %2F there",
    "amqp://host/?queue=q&prefetch=0": "from 1 to 65535",
    "amqp://host/?prefetch=many": "from 1 to 65535",
    "amqp://host/?heartbeat=0s": "has to be from 1s",
    "amqp://host/?heartbeat=often": "write for example 500ms",
    "amqp://host/?ssl_ca_certs=a.pem": "is for amqps://",
    "amqp://host/?que=q": "did you mean queue",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_work_is_refused_with_the_fix(url):
    app = keywise.App("memory://")
    with pytest.raises(keywise.core.errors.SettingsError, match=BAD_URLS[url]):
        app.pipeline("shop", key="key").source(url).sink("memory://")
        run(app.run(handle_signals=False))


def url_of(*, user: str = "guest", password: str = "guest", vhost: str = "%2F", port: int = 0) -> str:
    return f"amqp://{user}:{password}@127.0.0.1:{port or shared.rabbitmq().port}/{vhost}"


async def failure(url: str, queue: str = "pages") -> Exception:
    with pytest.raises((DatabaseError, UnavailableError)) as error:
        async with RabbitSource(Broker(url), queue):
            pass
    assert SECRET not in str(error.value)
    return error.value


@awaited
async def test_what_is_wrong_at_the_start_is_told():
    wrong_password = await failure(url_of(password=SECRET))
    assert isinstance(wrong_password, DatabaseError) and "check user and password" in str(wrong_password)
    wrong_host = await failure(url_of(vhost="nowhere"))
    assert isinstance(wrong_host, DatabaseError) and "check the virtual host" in str(wrong_host)
    missing = await failure(url_of())
    assert isinstance(missing, DatabaseError) and "declare it first" in str(missing) and "pages" in str(missing)
    away = await failure(url_of(port=machine.free_port()))
    assert isinstance(away, UnavailableError) and "refused" in str(away).lower()
    nobody = await failure(f"amqp://user:{SECRET}@no-such-host.invalid/")
    assert isinstance(nobody, UnavailableError)
    unencrypted = await failure(url_of().replace("amqp:", "amqps:", 1))
    assert isinstance(unencrypted, UnavailableError)


def test_files_of_certificates_that_are_missing_are_told():
    broker = Broker("amqps://host/", (("ssl_ca_certs", "/nowhere.pem"),))
    with pytest.raises(AddressError, match="cannot be read"):
        broker.parameters("testing")


@awaited
async def test_a_queue_that_vanishes_is_told_and_goes_on_when_it_is_back():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("vanishing"))
        await they.publish(queue, b"one")
        async with opened(queue) as source:
            [held] = await received(source, 1)
            waiting = asyncio.create_task(source.receive(1, 20.0))
            await they.delete(queue)
            with pytest.raises(UnavailableError, match="declare it again"):
                await waiting
            with pytest.raises(UnavailableError, match="declare it first"):
                await source.receive(1, 5.0)
            with pytest.raises(DatabaseError, match="no queue is called"):
                await source.send([b"two"])
            with pytest.raises(DatabaseError, match="declare it first"):
                await source.depth()
            await source.ack([held])
            await they.declare(queue)
            await source.send([b"three"])
            assert bodies_of(await received(source, 1)) == [b"three"]


@awaited
async def test_a_release_into_a_queue_that_vanished_is_told():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("vanishing"))
        await they.publish(queue, b"one")
        async with opened(queue) as source:
            held = await source.receive(1, 0.0)
            await they.delete(queue)
            with pytest.raises(UnavailableError, match="no queue is called"):
                await source.release(held, 0.0)


@awaited
async def test_a_delay_queue_that_somebody_deletes_is_made_anew():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("anew"))
        async with opened(queue, FastRabbitSource) as source:
            await source.send([b"one"], delay_s=100.0)
            await they.delete(wait_of(queue, 100.0 * SECOND_S, time.time()).queue)
            with pytest.raises(UnavailableError, match="was deleted"):
                await source.send([b"two"], delay_s=100.0)
            await source.send([b"three"], delay_s=40.0)
            assert bodies_of(await received(source, 1)) == [b"three"]


OTHER_ARGUMENTS = {
    "another way back": {"queue_type": "quorum", "dead_letter_exchange": "", "dead_letter_routing_key": "elsewhere"},
    "no way back": {},
}


@pytest.mark.parametrize("given", OTHER_ARGUMENTS)
@awaited
async def test_a_delay_queue_with_other_arguments_is_refused(given: str):
    """Messages would wait there for another time, or never come back."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("others"))
        delay_queue = wait_of(queue, 1.0, time.time()).queue
        await they.declare(delay_queue, **OTHER_ARGUMENTS[given])
        await they.publish(queue, b"one")
        async with opened(queue) as source:
            with pytest.raises(DatabaseError, match=r"exists with other arguments.*delete it") as error:
                await source.receive(1, 5.0)
            assert delay_queue in str(error.value) and "inequivalent arg" in str(error.value)
            with pytest.raises(DatabaseError, match="exists with other arguments"):
                await source.send([b"two"], delay_s=1.0)
            await they.delete(delay_queue)
            assert bodies_of(await received(source, 1)) == [b"one"]


@awaited
async def test_a_stream_is_refused():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("stream"), queue_type="stream")
        await they.publish(queue, b"one")
        for wait_s in (0.0, 5.0):
            async with opened(queue) as source:
                with pytest.raises(DatabaseError, match=r"is a stream.*classic or a quorum queue"):
                    await source.receive(1, wait_s)


@awaited
async def test_a_stream_that_messages_come_from_is_refused():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("stream"), queue_type="stream")
        async with opened(queue) as source:
            receiving = asyncio.create_task(source.receive(1, 20.0))
            while not receiving.done():
                await they.publish(queue, b"one")
                await asyncio.wait([receiving], timeout=0.05)
            with pytest.raises(DatabaseError, match="is a stream"):
                await receiving


@awaited
async def test_a_queue_with_a_single_active_consumer_is_consumed():
    """It refuses to be pulled from, which is no sign of a stream."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("single"), single_active_consumer=True)
        await they.publish(queue, b"one", b"two")
        async with opened(queue) as source:
            assert bodies_of(await received(source, 2)) == [b"one", b"two"]


@awaited
async def test_a_user_without_the_right_to_make_delay_queues_finds_out_at_the_start():
    broker, user = shared.rabbitmq(), fresh("user")
    broker.add_user(user, SECRET)
    broker.permit(user, configure="^$")
    async with owner(broker.url) as they:
        queue = await they.declare(fresh("forbidden"))
    async with RabbitSource(Broker(url_of(user=user, password=SECRET)), queue) as source:
        with pytest.raises(DatabaseError, match="give this user the right") as error:
            await source.receive(1, 0.0)
    assert "keywise.delay." in str(error.value) and SECRET not in str(error.value)


@awaited
async def test_a_message_with_a_header_that_nobody_can_read_holds_up_nothing():
    """Times far outside of any calendar, numbers of any size: the message is handed over, and can be released."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("odd"))
        await they.publish_as(queue, [b"odd"], Hostile())
        await they.publish(queue, b"counted", headers={"x-delivery-count": "5"})
        await they.publish(queue, b"plain", timestamp=1_700_000_000_000)
        async with opened(queue) as source:
            held = await received(source, 3)
            assert bodies_of(held) == [b"counted", b"odd", b"plain"]
            assert 1_700_000_000.0 in [one.sent_at for one in held]
            await source.release(held, 0.0)
            again = await received(source, 3)
            assert bodies_of(again) == [b"counted", b"odd", b"plain"]
            await source.ack(again)
            await until(lambda: left_in(queue, 0))


class Hostile(pika.BasicProperties):
    """A header with a time in the year 584 billion or so, and one with tables in tables in tables."""

    def encode(self) -> list[bytes]:
        deep = b""
        for _ in range(2000):
            deep = b"\x01aF" + struct.pack(">I", len(deep)) + deep
        table = b"\x04whenT" + b"\xff" * 8 + deep
        return [struct.pack(">H", 1 << 13), struct.pack(">I", len(table)), table]
