"""What a broker limits by itself is checked at start where it can be known, and survived; TLS is checked."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import keywise
from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import bodies_of, owner
from adapters.rabbitmq.waiting import left_in, until
from keywise.adapters.rabbitmq import source as rabbitmq
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.source import RabbitSource
from keywise.core.errors import AddressError, DatabaseError, SettingsError, UnavailableError
from keywise.core.url import Address
from running import awaited, run
from servers import machine
from servers.http import make_certificate
from servers.rabbitmq import RabbitServer, rabbit_server

pytestmark = [pytest.mark.server("rabbitmq"), pytest.mark.server("http")]

SETTINGS = """
listeners.ssl.1 = 127.0.0.1:{tls_port}
ssl_options.cacertfile = {certificate}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
management.tcp.port = {management_port}
management.tcp.ip = 127.0.0.1
consumer_timeout = 1000
max_message_size = 1000000
"""


@dataclass(frozen=True)
class Place:
    """A broker with certificates and a management API, and with little patience."""

    server: RabbitServer
    management: str
    encrypted: str
    certificate: Path
    key: Path

    def source(self, queue: str, **options: str) -> RabbitSource:
        """As an app makes it."""
        written = "&".join(f"{name}={value}" for name, value in {"queue": queue, **options}.items())
        return rabbitmq.connect(Address(f"{self.server.url}?{written}", "pages", {}))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=machine.IN_MEMORY) as folder:
        certificate, key = Path(folder) / "certificate.pem", Path(folder) / "key.pem"
        make_certificate(certificate, key)
        tls_port, management_port = machine.free_port(), machine.free_port()
        settings = SETTINGS.format(tls_port=tls_port, management_port=management_port, certificate=certificate, key=key)
        with rabbit_server(settings, "rabbitmq_management") as server:
            encrypted = f"amqps://guest:guest@127.0.0.1:{tls_port}/%2F"
            yield Place(server, f"http://127.0.0.1:{management_port}", encrypted, certificate, key)


@awaited
async def test_limits_of_a_queue_are_learned_from_the_management_api(place: Place):
    async with owner(place.server.url) as they:
        plain = await they.declare(fresh("plain"))
        generous = await they.declare(fresh("generous"), queue_type="quorum", delivery_limit=20)
        hasty = await they.declare(fresh("hasty"), queue_type="quorum", delivery_limit=2)
        patient = await they.declare(fresh("patient"), consumer_timeout=7_200_000)
    async with (
        place.source(plain, management=place.management) as one,
        place.source(generous, management=place.management),
        place.source(patient, management=place.management) as other,
    ):
        assert (one.ack_timeout_s, other.ack_timeout_s) == (1800.0, 7200.0)
    with pytest.raises(DatabaseError, match=r"has the delivery limit 2, .* raise it to 5 or more"):
        async with place.source(hasty, management=place.management):
            pass


@awaited
async def test_a_stream_is_refused_at_the_start(place: Place):
    async with owner(place.server.url) as they:
        stream = await they.declare(fresh("stream"), queue_type="stream")
    with pytest.raises(DatabaseError, match="is a stream"):
        async with place.source(stream, management=place.management):
            pass


@awaited
async def test_a_management_api_that_cannot_be_asked_is_told(place: Place):
    async with owner(place.server.url) as they:
        queue = await they.declare(fresh("asked"))
    closed = f"http://127.0.0.1:{machine.free_port()}"
    with pytest.raises(UnavailableError, match="refused"):
        async with place.source(queue, management=closed):
            pass
    with pytest.raises(DatabaseError, match="no queue is called 'nowhere'"):
        await asyncio.to_thread(Broker(place.server.url).management(place.management).limits_of, "nowhere")
    with pytest.raises(DatabaseError, match="may not ask"):
        stranger = Broker(place.server.url.replace("guest:guest", "guest:wrong"))
        await asyncio.to_thread(stranger.management(place.management).limits_of, queue)


POLICIES = {"expires": 60_000, "message-ttl": 3_600_000, "max-length": 100}


@pytest.mark.parametrize("limit", POLICIES)
@awaited
async def test_a_policy_that_would_cut_short_what_waits_is_told(place: Place, limit: str):
    async with owner(place.server.url) as they:
        queue = await they.declare(fresh("policed"))

    async def set_policy(pattern: str, value: int) -> None:
        words = ("set_policy", "--apply-to", "queues", "broad", pattern, f'{{"{limit}": {value}}}')
        await asyncio.to_thread(place.server.control, *words)

    await set_policy(".*", POLICIES[limit])
    try:
        with pytest.raises(
            DatabaseError, match=rf"the policy 'broad' sets {limit} for 'keywise\.delay\..*exclude"
        ) as error:
            async with place.source(queue, management=place.management):
                pass
        assert r"^(?!keywise\.delay\.)" in str(error.value)
        await set_policy(r"^(?!keywise\.delay\.)", POLICIES[limit])
        async with place.source(queue, management=place.management):
            pass
    finally:
        await asyncio.to_thread(place.server.control, "clear_policy", "broad")


@pytest.mark.parametrize(
    ("status", "told", "error"),
    [
        (200, "is no management API of RabbitMQ", DatabaseError),
        (302, "answered with status 302", UnavailableError),
        (503, "answered with status 503", UnavailableError),
    ],
)
def test_whatever_else_answers_is_told(status: int, told: str, error: type[Exception]):
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        asking = threading.Thread(target=server.handle_request)
        asking.start()
        with pytest.raises(error, match=told):
            Broker("amqp://guest:guest@127.0.0.1/").management(f"http://127.0.0.1:{server.server_port}/").limits_of(
                "pages"
            )
        asking.join()


def test_an_acknowledgement_timeout_below_the_longest_handler_is_refused(place: Place):
    async def opened(ack_timeout: str) -> None:
        async with owner(place.server.url) as they:
            queue = await they.declare(fresh("short"))
        app = keywise.App("memory://")
        url = f"{place.server.url}?queue={queue}&ack_timeout={ack_timeout}"
        app.pipeline("pages", key="key").source(url).sink("memory://?grade=plain")
        async with app.open("pages"):
            pass

    run(opened("11m"))
    with pytest.raises(SettingsError, match="runtime_max=600 is not below the acknowledgement timeout"):
        run(opened("10m"))


@awaited
async def test_a_message_that_is_held_for_too_long_comes_again_and_the_limit_is_told(place: Place):
    async with owner(place.server.url) as they:
        queue = await they.declare(fresh("held"))
        await they.publish(queue, b"one")
    async with RabbitSource(Broker(place.server.url), queue) as source:
        [held] = await source.receive(1, 5.0)
        with pytest.raises(UnavailableError, match="raise its consumer_timeout"):
            await source.receive(1, 20.0)
        [again] = await source.receive(1, 5.0)
        assert (again.body, again.count) == (b"one", 2)
        await source.ack([held])
        assert await left_in(queue, 1, place.server)
        await source.ack([again])


@awaited
async def test_a_certificate_that_is_not_trusted_is_refused(place: Place):
    async with owner(place.server.url) as they:
        queue = await they.declare(fresh("encrypted"))
    files = {"ssl_ca_certs": place.certificate, "ssl_certfile": place.certificate, "ssl_keyfile": place.key}
    trusting = Broker(place.encrypted, tuple((name, str(path)) for name, path in files.items()))
    async with RabbitSource(trusting, queue) as source:
        await source.send([b"secret"])
        assert bodies_of(await source.receive(1, 5.0)) == [b"secret"]
    with pytest.raises(DatabaseError, match=r"its certificate is not trusted.*ssl_ca_certs="):
        async with RabbitSource(Broker(place.encrypted), queue):
            pass
    elsewhere = Broker(place.encrypted.replace("127.0.0.1", "localhost"), (("ssl_ca_certs", str(place.certificate)),))
    with pytest.raises(DatabaseError, match="its certificate is not trusted"):
        async with RabbitSource(elsewhere, queue):
            pass


@awaited
async def test_a_body_that_is_larger_than_the_broker_takes_is_told(place: Place):
    async with owner(place.server.url) as they:
        queue = await they.declare(fresh("large"))
    async with RabbitSource(Broker(place.server.url), queue) as source:
        with pytest.raises(DatabaseError, match="max"):
            await source.send([b"x" * 1_100_000])
        await source.send([b"small"])
        assert bodies_of(await source.receive(2, 5.0)) == [b"small"]


@pytest.mark.parametrize(
    "management", ["ftp://host", "http://", "localhost:15672", "http://host:port", "http://host:70000", "http://[::1"]
)
def test_an_address_that_is_no_management_api_is_refused(management: str):
    with pytest.raises(AddressError, match="is no address of an API"):
        rabbitmq.connect(Address(f"amqp://host/?management={management}", "pages", {}))


@pytest.mark.parametrize("queue", ["", "x" * 256])
def test_a_name_that_no_queue_can_have_is_refused(queue: str):
    with pytest.raises(AddressError, match="from 1 to 255 bytes"):
        rabbitmq.connect(Address(f"amqp://host/?queue={queue}", "pages", {}))


def test_after_a_crash_of_the_broker_everything_comes_that_was_not_acked(place: Place):
    """What was ready, what was held, and what waited for its delay; this test is the last one on its broker."""
    bodies = {b"%d" % number for number in range(60)}

    async def story() -> None:
        async with owner(place.server.url) as they:
            queue = await they.declare(fresh("crash"))
        async with RabbitSource(Broker(place.server.url), queue) as source:
            await source.send(sorted(bodies)[:50])
            await source.send(sorted(bodies)[50:], delay_s=1.0)
            held = await source.receive(20, 5.0)
            await source.ack(held[:5])
            await source.release(held[5:10], 1.0)
            settled = {one.body for one in held[:5]}
            # Acks are not answered, and what is held for a second comes back.
            await until(lambda: left_in(queue, len(bodies) - len(settled), place.server))
            await asyncio.to_thread(place.server.restart)
            came: set[bytes] = set()
            while came | settled != bodies:
                try:
                    deliveries = await source.receive(100, 1.0)
                except UnavailableError:
                    continue
                came |= {one.body for one in deliveries}
                await source.ack(deliveries)

    run(story(), limit_s=60)
