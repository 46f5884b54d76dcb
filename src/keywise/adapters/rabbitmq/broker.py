"""One RabbitMQ broker: how to connect to it, channels whose replies can be awaited, and its errors as ours."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import msgspec
import pika
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ConnectionBlockedTimeout,
    ConnectionClosedByBroker,
    ConnectionOpenAborted,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from keywise.adapters.rabbitmq.connection import Connection, DeliveryHandler
from keywise.adapters.rabbitmq.frames import settlement
from keywise.adapters.rabbitmq.heartbeat import BrokerHeartbeat
from keywise.adapters.rabbitmq.management import ManagementApi
from keywise.core.errors import AddressError, DatabaseError, KeywiseError, UnavailableError
from keywise.core.settings import seconds
from keywise.core.url import Address, redacted

CONNECT_S = 10.0
ANSWER_S = 60.0
"""How long a reply may take before the broker counts as unreachable."""
BLOCKED_S = 30.0
"""How long a broker that is short of memory or disk may block a connection before it counts as unreachable."""
CLOSE_S = 5.0
OLDEST = (3, 10)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OPTIONS = ("heartbeat", *TLS_OPTIONS)
"""Options of a URL that concern the connection."""
HEARTBEAT_MAX_S = 65_535
HEARTBEATS_PER_LEASE = 3
"""Heartbeat intervals per lease. A broker drops a connection after one to two silent intervals, so within a lease."""
HEARTBEAT_MIN_S = 2
"""The shortest interval that is derived from a lease: with less, a machine that is busy for a moment would lose its
connections."""
REFUSED, NOT_FOUND, LOCKED, PRECONDITION, NOT_ALLOWED, NOT_IMPLEMENTED = 403, 404, 405, 406, 530, 540
"""Reply codes of AMQP with which a broker refuses a request."""

# keywise reports failures by its own errors and events, so the client library's log is off unless a level is set.
if (_log := logging.getLogger("pika")).level == logging.NOTSET:
    _log.setLevel(logging.CRITICAL)


class Liveness(msgspec.Struct, frozen=True):
    """How soon a broker should notice that a consumer is dead or hung."""

    lease_s: float
    runtime_max_s: float

    @property
    def heartbeat_s(self) -> int:
        """The longest heartbeat interval that follows the lease."""
        return min(HEARTBEAT_MAX_S, max(HEARTBEAT_MIN_S, int(self.lease_s / HEARTBEATS_PER_LEASE)))


class Broker:
    """One broker; the sources of an app share this object, and each source has connections of its own."""

    def __init__(self, url: str, options: tuple[tuple[str, str], ...] = ()) -> None:
        self.name = redacted(url)
        self.subscriptions: set[Any] = set()
        """The subscriptions of this process. A broker does not report what a consumer holds, so `depth`
        counts it here."""
        self.made: set[str] = set()
        """Delay queues that this process has declared and that did not exist before."""
        self._url = url
        self._options = dict(options)

    def parameters(self, purpose: str, liveness: Liveness | None = None) -> Any:
        """Return the parameters of a connection; reads the certificate files now."""
        parts = urlsplit(self._url)
        is_encrypted = parts.scheme == "amqps"
        user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        return pika.ConnectionParameters(
            host=parts.hostname,
            port=parts.port or (5671 if is_encrypted else 5672),
            virtual_host=unquote(parts.path[1:]) or "/",
            credentials=pika.PlainCredentials(user, password, erase_on_connect=True),
            connection_attempts=1,
            socket_timeout=CONNECT_S,
            stack_timeout=CONNECT_S,
            blocked_connection_timeout=BLOCKED_S,
            client_properties={"connection_name": f"keywise, {purpose}"},
            heartbeat=self._heartbeat_s(liveness),
            ssl_options=pika.SSLOptions(self._tls(), parts.hostname) if is_encrypted else None,
        )

    def management(self, url: str) -> ManagementApi:
        """The management API at a URL, with the credentials of the broker's URL."""
        context = self._tls() if url.startswith("https:") else None
        return ManagementApi(url, self.name, self.parameters("managing"), context)

    def _heartbeat_s(self, liveness: Liveness | None) -> int | None:
        """The heartbeat interval that the client proposes; None: the broker decides."""
        given = self._options.get("heartbeat")
        limits = [int(seconds(given))] if given else []
        limits += [liveness.heartbeat_s] if liveness is not None else []
        return min(limits, default=None)

    def _tls(self) -> ssl.SSLContext:
        """A TLS context that requires a trusted certificate for the broker's host name."""
        try:
            context = ssl.create_default_context(cafile=self._options.get("ssl_ca_certs"))
            if "ssl_certfile" in self._options:
                context.load_cert_chain(self._options["ssl_certfile"], self._options.get("ssl_keyfile"))
        except OSError as error:
            raise AddressError(f"{self.name}: the files of certificates cannot be read: {error}") from error
        return context


class BrokerLink:
    """One connection, opened by the first call that needs it, and again by the next call after it was lost."""

    def __init__(self, broker: Broker, purpose: str) -> None:
        self.name = broker.name
        self.liveness: Liveness | None = None
        """What the heartbeat interval follows; None: the broker decides."""
        self.connected_at = 0.0
        """When the current connection was opened, by the event loop's clock."""
        self.connections = 0
        """How many connections were opened so far."""
        self._broker = broker
        self._purpose = purpose
        self._connection: Any = None
        self._opening = asyncio.Lock()

    async def channel(self) -> "Channel":
        """Open a channel, and the connection if there is none."""
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self._connect()
                self.connected_at = asyncio.get_running_loop().time()
                self.connections += 1
            connection = self._connection
        return await Channel(self.name).opened(connection)

    async def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method on a channel of its own, because a refusal closes the channel; return the broker's reply."""
        channel = await self.channel()
        try:
            return await channel.ask(method, **arguments)
        finally:
            channel.close()

    async def ready(self, queue: str) -> int:
        """Count the ready messages of a queue; raises `DatabaseError` if it does not exist."""
        answer = await self.ask("queue_declare", queue=queue, passive=True)
        return int(answer.method.message_count)

    async def close(self) -> None:
        """Close the connection, and wait a while for the broker to agree; it delivers all unacked messages again."""
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed:
            return
        gone = asyncio.get_running_loop().create_future()
        connection.add_on_close_callback(lambda *_: resolve(gone, None))
        with suppress(AMQPError, TimeoutError):
            if not connection.is_closing:
                connection.close()
            async with asyncio.timeout(CLOSE_S):
                await gone

    async def _connect(self) -> Any:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with rabbit_errors(self.name):
            connection = Connection(
                self._broker.parameters(self._purpose, self.liveness),
                on_open_callback=lambda one: resolve(opened, one),
                on_open_error_callback=lambda _, error: resolve(opened, error),
                on_close_callback=lambda _, error: resolve(opened, error),
                custom_ioloop=asyncio.get_running_loop(),
                heartbeat_thread=BrokerHeartbeat(self.liveness.runtime_max_s) if self.liveness is not None else None,
            )
            try:
                async with asyncio.timeout(2 * CONNECT_S):
                    await opened
            except BaseException:
                if not (connection.is_closed or connection.is_closing):
                    connection.close()
                raise
        self._check(connection)
        return connection

    def _check(self, connection: Any) -> None:
        properties = connection.server_properties or {}
        version = str(properties.get("version", ""))
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if properties.get("product") == "RabbitMQ" and numbers < OLDEST:
            connection.close()
            raise DatabaseError(f"{self.name} runs RabbitMQ {version}; keywise needs RabbitMQ 3.10 or newer")


class Channel:
    """A channel of the client library whose replies can be awaited; when it closes, all that wait get the reason."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.raw: Any = None
        self.ended: BaseException | None = None
        """Why the channel was closed; None while it is open."""
        self.on_end: Callable[[], None] = lambda: None
        self._asked: set[asyncio.Future[Any]] = set()

    @property
    def is_open(self) -> bool:
        return self.ended is None and bool(self.raw.is_open)

    async def opened(self, connection: Any) -> Self:
        await self.answered(lambda done: self._watch(connection.channel(on_open_callback=done)))
        return self

    async def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method, and return the broker's reply."""
        return await self.answered(lambda done: getattr(self.raw, method)(callback=done, **arguments))

    async def answered(self, call: Callable[[Callable[[Any], None]], None]) -> Any:
        """Run a call that takes a callback, and return what the callback gets."""
        with rabbit_errors(self.name):
            if self.ended is not None:
                raise self.ended
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._asked.add(answer)
            try:
                call(lambda frame: resolve(answer, frame))
                async with asyncio.timeout(ANSWER_S):
                    return await answer
            finally:
                self._asked.discard(answer)

    def handle_deliveries(self, consumer: str, take: DeliveryHandler) -> None:
        """Set who gets a consumer's plain deliveries; the client library gets all other frames."""
        self.raw.connection.delivery_handlers[self.raw.channel_number, consumer.encode()] = take

    def drop_handlers(self) -> None:
        """Give the deliveries of all consumers of this channel to the client library again."""
        delivery_handlers, number = self.raw.connection.delivery_handlers, self.raw.channel_number
        for place in [place for place in delivery_handlers if place[0] == number]:
            del delivery_handlers[place]

    def settle(self, method: int, tags: Sequence[int], cumulative: int) -> None:
        """Ack or nack deliveries in one write, the first `cumulative` of them by one `multiple` frame.

        Does nothing on a closed channel: the broker delivers its messages again anyway.
        """
        if self.is_open and tags:
            with rabbit_errors(self.name):
                self.raw.connection.write(settlement(self.raw.channel_number, method, tags, cumulative))

    def close(self) -> None:
        if self.is_open:
            self.drop_handlers()
            self.raw.close()

    def _watch(self, raw: Any) -> None:
        self.raw = raw
        raw.add_on_close_callback(self._end)

    def _end(self, _: Any, reason: BaseException) -> None:
        self.ended = reason
        self.drop_handlers()
        for answer in self._asked:
            resolve(answer, reason)
        self.on_end()


class rabbit_errors:
    """Turns errors of the client library into ours; an error that may pass becomes `UnavailableError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and (found := translated(error, self._name)) is not error:
            raise found from error


def translated(error: Exception, name: str) -> Exception:
    """Return our error for one of the client library; other errors are returned as they are."""
    if isinstance(error, KeywiseError):
        return error
    cause = _root_cause(error)
    code = refusal_code(cause)
    if isinstance(cause, ProbableAuthenticationError | ProbableAccessDeniedError):
        return _login_error(cause, name)
    if isinstance(cause, ConnectionClosedByBroker) and code in _CONNECTION_ADVICE:
        return DatabaseError(f"{name}: {cause.reply_text}; {_CONNECTION_ADVICE[code]}")
    if isinstance(cause, ssl.SSLCertVerificationError):
        return DatabaseError(
            f"{name}: its certificate is not trusted: {cause.verify_message}; name its authority's file with "
            "ssl_ca_certs=, and the host as the certificate does"
        )
    if (
        isinstance(cause, ChannelClosedByBroker)
        and code in _CHANNEL_ADVICE
        and not _is_transient(code, cause.reply_text)
    ):
        return DatabaseError(f"{name}: {cause.reply_text}; {_CHANNEL_ADVICE[code]}")
    if isinstance(cause, ConnectionBlockedTimeout):
        return UnavailableError(f"{name}: the broker takes no messages now, because it is short of memory or disk")
    if isinstance(cause, ConnectionOpenAborted):
        return UnavailableError(
            f"{name}: takes the connection, but does not answer; check that host and port are those of a broker, and "
            "that it is not overloaded"
        )
    if isinstance(error, AMQPError | OSError) or cause is not error:
        return UnavailableError(f"{name}: {str(cause) or type(cause).__name__}")
    return error


def _login_error(cause: AMQPError, name: str) -> Exception:
    """Distinguish a refused login from a lost connection: pika reports both as a refusal."""
    if "ConnectionClosedByBroker" not in str(cause):
        return UnavailableError(f"{name}: the connection ended at the login; the broker may be starting or stopping")
    if isinstance(cause, ProbableAuthenticationError):
        return DatabaseError(f"{name}: the broker refused this user; {_CONNECTION_ADVICE[REFUSED]}")
    return DatabaseError(f"{name}: the broker refused the virtual host; {_CONNECTION_ADVICE[NOT_ALLOWED]}")


def _is_transient(code: int, text: str) -> bool:
    """Whether a refusal may pass: the leader of the queue is down, or another consumer has exclusive use of it."""
    return (code == NOT_FOUND and "no queue" not in text) or (code == REFUSED and "exclusive use" in text)


def refusal_code(error: BaseException | None) -> int:
    """Return the broker's reply code behind an error of the client library or of ours; 0 if there is none."""
    return int(getattr(_root_cause(error), "reply_code", 0) or 0) if error is not None else 0


def broker_at(address: Address, options: dict[str, str]) -> Broker:
    """Return the broker of an address, shared by all sources of an app; removes the broker's options from `options`."""
    url, parts = redacted(address.url), urlsplit(address.url)
    address.check_ports()
    if not parts.hostname or "," in parts.netloc:
        raise AddressError(
            f"{url} names no broker; write for example {address.scheme}://localhost:5672/%2F?queue=pages"
        )
    if "/" in parts.path[1:]:
        raise AddressError(
            f"{url} has a / in the name of its virtual host; write %2F there, and name the queue with queue="
        )
    if (beat := options.get("heartbeat")) is not None and not 1 <= seconds(beat) <= HEARTBEAT_MAX_S:
        raise AddressError(f"{url}: heartbeat={beat} has to be from 1s to {HEARTBEAT_MAX_S}s")
    given = tuple(sorted((name, options.pop(name)) for name in OPTIONS if name in options))
    if address.scheme != "amqps" and (tls := [name for name, _ in given if name in TLS_OPTIONS]):
        raise AddressError(f"{url}: {tls[0]} is for amqps://, which is encrypted")
    return address.shared(Broker, f"{parts.scheme}://{parts.netloc}{parts.path}", given)


_CONNECTION_ADVICE = {
    REFUSED: "check user and password, and that this user may log in from here",
    NOT_ALLOWED: "check the virtual host in the path of the URL, and that this user may use it",
    NOT_IMPLEMENTED: "consume from a classic or a quorum queue",
}
_CHANNEL_ADVICE = {
    REFUSED: "give this user the right to do so",
    NOT_FOUND: "declare it first: keywise consumes queues as they are",
    LOCKED: "another connection has it for itself",
    PRECONDITION: "the broker's log may say more",
}


def resolve(waiting: asyncio.Future[Any], outcome: Any) -> None:
    """Set the result of a future, or its exception if the outcome is an error; one that is done is left alone."""
    if waiting.done():
        return
    if isinstance(outcome, BaseException):
        waiting.set_exception(outcome)
    else:
        waiting.set_result(outcome)


def _root_cause(error: BaseException) -> BaseException:
    """The error at the root: the client library wraps errors several times, in attributes, arguments and causes."""
    while True:
        inner = getattr(error, "exceptions", None) or [getattr(error, "exception", None)]
        inner = [one for one in (*inner, *error.args, error.__cause__) if isinstance(one, BaseException)]
        if not inner or inner[-1] is error:
            return error
        error = inner[-1]
