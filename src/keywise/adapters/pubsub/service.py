"""The Pub/Sub service: where it is, as whom it is asked, and how long an answer may take."""

import asyncio
import os
import re
from typing import Any
from urllib.parse import quote, urlsplit

import google.auth
import grpc
from google.api_core import grpc_helpers_async
from google.pubsub_v1 import types

from keywise.adapters.pubsub.errors import pubsub_errors
from keywise.core.errors import AddressError
from keywise.core.url import Address, redacted

ENDPOINT = "pubsub.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/pubsub"
EMULATOR_HOST = "PUBSUB_EMULATOR_HOST"
ANSWER_S = 20.0
"""How long an answer may take before the service counts as unreachable."""
OPTIONS = ("emulator", "endpoint")
"""What a URL may say about the connection."""

SUBSCRIBER, PUBLISHER = "/google.pubsub.v1.Subscriber/", "/google.pubsub.v1.Publisher/"

_PROJECT = re.compile(r"(?:[A-Za-z0-9.-]+:)?[A-Za-z0-9][A-Za-z0-9_-]*")
_CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The flow retries after a back-off of its own; by default, gRPC would not try to connect for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, this is how long an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", int(ANSWER_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
]
# Finds a connection that is silently gone. An emulator may take such pings for an attack.
_KEEPALIVE = [("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 15_000)]


class PubSubService:
    """One project at one endpoint. Each source has a connection of its own."""

    def __init__(self, name: str, project: str, *, endpoint: str = ENDPOINT, emulator: str = "") -> None:
        self.name = name
        """The URL of the source, for messages."""
        self.project = project
        self._endpoint = endpoint
        self.emulator = emulator
        """The host of an emulator, which knows no TLS and no credentials; empty: the real service."""
        self._channel: Any = None
        self._calls: dict[str, Any] = {}
        self._is_started = False

    async def open(self) -> None:
        """Make the channel; nothing is asked yet."""
        if self.emulator:
            self._channel = grpc.aio.insecure_channel(self.emulator, options=_CHANNEL)
            return
        with pubsub_errors(self.name, at_start=True):
            # It reads files, and may ask the metadata server of the machine.
            credentials, _ = await asyncio.to_thread(google.auth.default, scopes=[SCOPE])
            self._channel = grpc_helpers_async.create_channel(
                self._endpoint, credentials=credentials, options=[*_CHANNEL, *_KEEPALIVE]
            )

    async def close(self) -> None:
        self._is_started = False
        self._calls.clear()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def started(self) -> None:
        """From now on, a missing subscription is an outage and not a mistake."""
        self._is_started = True

    async def pull(self, subscription: str, limit: int, *, wait_s: float = 0.0) -> list[Any]:
        """Return received messages. Without a wait, the service answers at once."""
        request = types.PullRequest.pb()(subscription=subscription, max_messages=limit, return_immediately=not wait_s)
        with pubsub_errors(self.name, at_start=not self._is_started):
            try:
                answer = await self._call(SUBSCRIBER + "Pull", types.PullResponse, request, ANSWER_S + wait_s)
            except grpc.aio.AioRpcError as error:
                # So many services say that no message came while they waited.
                if wait_s and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return []
                raise
        return list(answer.received_messages)

    async def ask(self, method: str, answer: Any, request: Any) -> Any:
        """Return the answer to a request, as a message of the protocol. `answer` is its type; None if it is empty."""
        with pubsub_errors(self.name, at_start=not self._is_started):
            return await self._call(method, answer, request, ANSWER_S)

    async def change(self, method: str, request: Any) -> None:
        """Carry out a request about receipts; the caller reads from a raw error which of them were refused."""
        await self._call(method, None, request, ANSWER_S)

    async def _call(self, method: str, answer: Any, request: Any, timeout_s: float) -> Any:
        if (call := self._calls.get(method)) is None:
            call = self._calls[method] = self._channel.unary_unary(
                method,
                request_serializer=type(request).SerializeToString,
                response_deserializer=bytes if answer is None else answer.pb().FromString,
            )
        return await call(request, timeout=timeout_s, metadata=_routed(request))


def service_at(address: Address, options: dict[str, str]) -> PubSubService:
    """The service of a URL. Credentials come from the environment or the machine, never from the URL."""
    url, project = redacted(address.url), address.host
    if "@" in project:
        raise AddressError(
            f"{url} has a user; credentials never belong into the URL: set GOOGLE_APPLICATION_CREDENTIALS, or give the "
            "machine a service account"
        )
    if not _PROJECT.fullmatch(project):
        raise AddressError(f"{url} names no project; write for example pubsub://my-project/my-subscription")
    emulator = options.get("emulator") or os.environ.get(EMULATOR_HOST, "")
    endpoint = options.get("endpoint", ENDPOINT)
    if "emulator" in options and "endpoint" in options:
        raise AddressError(f"{url}: emulator= and endpoint= exclude each other")
    for option, host in (("emulator", emulator), ("endpoint", endpoint)):
        if host and not _is_host(host):
            raise AddressError(f"{url}: {option}={host} has to be a host with a port, for example 127.0.0.1:8085")
    if "endpoint" in options:
        emulator = ""
    return PubSubService(url, project, endpoint=endpoint, emulator=emulator)


def _is_host(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and parts.netloc == text and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _routed(request: Any) -> tuple[tuple[str, str], ...]:
    """The service routes a request by the name in it, which it wants in a header too."""
    fields = {field.name: value for field, value in request.ListFields()}
    for name in ("subscription", "name", "topic"):
        if name in fields:
            return (("x-goog-request-params", f"{name}={quote(fields[name], safe='')}"),)
    return ()
