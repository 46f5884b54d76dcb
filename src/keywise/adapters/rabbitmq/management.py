"""RabbitMQ's management API: limits, policies and message counts of queues, which AMQP does not report."""

import base64
import http.client
import re
import ssl
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.url import redacted

ANSWER_S = 10.0
ANSWER_MAX_BYTES = 10_000_000
PAGE_MAX = 500
FORBIDDEN, MISSING = (401, 403), 404
QUORUM_QUEUES = ("all", "queues", "quorum_queues")

T = TypeVar("T")


class QueueLimits(msgspec.Struct, frozen=True):
    """Limits after which the broker acts on the messages of a queue."""

    delivery_limit: int | None = None
    """How often a message may be redelivered before the queue discards it; None: unlimited, or unknown."""
    ack_timeout_s: float | None = None
    """How long a consumer may hold a message, if this queue has a limit of its own."""
    is_stream: bool = False


class QueueTotals(msgspec.Struct, frozen=True):
    """Message counts of some queues, from statistics of the broker that are some seconds old."""

    messages: int
    held: int
    is_all: bool
    """False if the statistics of a queue are missing, as after a restart of the broker."""


class _QueueCounts(msgspec.Struct):
    name: str
    messages: int | None = None
    messages_unacknowledged: int | None = None


class _QueuePage(msgspec.Struct):
    items: list[_QueueCounts]


class _Queue(msgspec.Struct):
    type: str = ""
    arguments: dict[str, Any] = {}
    effective_policy_definition: dict[str, Any] | list[Any] | None = None

    def limit(self, name: str) -> int | None:
        """Return the lower one of argument and policy, as the broker does; a negative value means no limit."""
        policy = self.effective_policy_definition
        limits = (self.arguments.get(f"x-{name}"), policy.get(name) if isinstance(policy, dict) else None)
        return min((one for one in limits if isinstance(one, int) and one >= 0), default=None)


class BrokerPolicy(msgspec.Struct, frozen=True, rename="kebab"):
    """A policy: settings for all queues whose names match a pattern."""

    name: str
    pattern: str
    apply_to: str = "all"
    priority: int = 0
    definition: dict[str, Any] = {}

    def matches(self, queue: str) -> bool:
        """Whether the policy applies to a quorum queue of this name; False for a pattern that Python cannot compile."""
        try:
            return self.apply_to in QUORUM_QUEUES and re.search(self.pattern, queue) is not None
        except re.error:
            return False


class ManagementApi:
    """The management API of a broker, with the credentials of the broker's URL. All methods block."""

    def __init__(self, url: str, broker: str, parameters: Any, context: ssl.SSLContext | None) -> None:
        self._name = redacted(url)
        self._url = urlsplit(url)
        self._broker = broker
        self._parameters = parameters
        self._context = context

    def limits_of(self, queue: str) -> QueueLimits:
        status, answer = self._get("queues", queue)
        if status in FORBIDDEN:
            raise self._not_allowed()
        if status == MISSING:
            vhost = self._parameters.virtual_host
            raise DatabaseError(f"{self._name}: no queue is called {queue!r} in the virtual host {vhost!r}")
        found = self._decoded(status, answer, _Queue)
        timeout_ms = found.limit("consumer-timeout")
        ack_timeout_s = timeout_ms / 1000 if timeout_ms is not None else None
        return QueueLimits(found.limit("delivery-limit"), ack_timeout_s, is_stream=found.type == "stream")

    def totals_of(self, queue: str, prefix: str) -> QueueTotals:
        """Count the messages of a queue, and of all queues whose names begin with a prefix."""
        names = f"^({re.escape(queue)}$|{re.escape(prefix)})"
        columns = "name,messages,messages_unacknowledged"
        query = urlencode(
            {"page": 1, "page_size": PAGE_MAX, "use_regex": "true", "name": names, "columns": columns}, quote_via=quote
        )
        status, answer = self._get("queues", query=query)
        if status in FORBIDDEN:
            raise self._not_allowed()
        counts = self._decoded(status, answer, _QueuePage).items
        return QueueTotals(
            messages=sum(one.messages or 0 for one in counts),
            held=sum(one.messages_unacknowledged or 0 for one in counts if one.name == queue),
            is_all=all(one.messages is not None for one in counts) and any(one.name == queue for one in counts),
        )

    def policies_for(self, queue: str) -> list[BrokerPolicy]:
        """Return the policies that a quorum queue of this name has or would have, as far as this user may see them."""
        found = []
        for kind in ("policies", "operator-policies"):
            status, answer = self._get(kind)
            if status in FORBIDDEN:
                continue
            # Only one policy of each kind applies: the one with the highest priority.
            matching = [one for one in self._decoded(status, answer, list[BrokerPolicy]) if one.matches(queue)]
            found += sorted(matching, key=lambda one: one.priority)[-1:]
        return found

    def _not_allowed(self) -> DatabaseError:
        return DatabaseError(f"{self._name}: the user of {self._broker} may not ask; give it the tag monitoring")

    def _decoded(self, status: int, answer: bytes, type: type[T]) -> T:
        if status != http.client.OK:
            raise UnavailableError(f"{self._name}: the management API answered with status {status}")
        try:
            return msgspec.json.decode(answer, type=type)
        except msgspec.MsgspecError as error:
            raise DatabaseError(f"{self._name} is no management API of RabbitMQ: {error}") from error

    def _get(self, kind: str, *names: str, query: str = "") -> tuple[int, bytes]:
        """Return status and body. Redirects are not followed, because the password would go with them."""
        quoted = (quote(one, safe="") for one in (self._parameters.virtual_host, *names))
        path = "/".join([self._url.path.rstrip("/"), "api", kind, *quoted]) + (f"?{query}" if query else "")
        user = self._parameters.credentials
        authorization = f"Basic {base64.b64encode(f'{user.username}:{user.password}'.encode()).decode()}"
        host, port = self._url.hostname or "", self._url.port
        connection = (
            http.client.HTTPSConnection(host, port or 15671, timeout=ANSWER_S, context=self._context)
            if self._url.scheme == "https"
            else http.client.HTTPConnection(host, port or 15672, timeout=ANSWER_S)
        )
        try:
            connection.request("GET", path, headers={"Authorization": authorization})
            answer = connection.getresponse()
            return answer.status, answer.read(ANSWER_MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._name}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
