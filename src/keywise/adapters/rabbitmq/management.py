"""What RabbitMQ's management API tells of queues: their limits, which nobody learns where messages are taken."""

import base64
import http.client
import re
import ssl
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.url import redacted

ANSWER_S = 10.0
ANSWER_MAX_BYTES = 10_000_000
FORBIDDEN, MISSING = (401, 403), 404
QUORUM_QUEUES = ("all", "queues", "quorum_queues")

T = TypeVar("T")


class QueueLimits(msgspec.Struct, frozen=True):
    """What the broker does on its own to messages of a queue."""

    delivery_limit: int | None = None
    """How often a message may come back from lost channels; None: as often as it has to, or nobody knows."""
    ack_timeout_s: float | None = None
    """How long a message may be held, if that is set for this queue."""


class _Queue(msgspec.Struct):
    arguments: dict[str, Any] = {}
    effective_policy_definition: dict[str, Any] | list[Any] | None = None


class BrokerPolicy(msgspec.Struct, frozen=True, rename="kebab"):
    """What an administrator has set for all queues whose names match."""

    name: str
    pattern: str
    apply_to: str = "all"
    priority: int = 0
    definition: dict[str, Any] = {}

    def matches(self, queue: str) -> bool:
        """Whether it is for a quorum queue of this name; a pattern that only the broker understands is not."""
        try:
            return self.apply_to in QUORUM_QUEUES and re.search(self.pattern, queue) is not None
        except re.error:
            return False


def queue_limits(management: str, broker: str, queue: str, context: ssl.SSLContext | None = None) -> QueueLimits:
    """Ask for one queue, as the user that the broker's URL names; it blocks."""
    vhost = _vhost(broker)
    status, answer = _get(management, broker, f"queues/{quote(vhost, safe='')}/{quote(queue, safe='')}", context)
    name = redacted(management)
    if status in FORBIDDEN:
        raise DatabaseError(f"{name}: the user of {redacted(broker)} may not ask; give it the tag monitoring")
    if status == MISSING:
        raise DatabaseError(f"{name}: no queue is called {queue!r} in the virtual host {vhost!r}")
    return _limits(_decoded(name, status, answer, _Queue))


def policies_for(management: str, broker: str, queue: str, context: ssl.SSLContext | None = None) -> list[BrokerPolicy]:
    """Those that a quorum queue of this name has or would have, as far as this user may see them; it blocks."""
    found = []
    for kind in ("policies", "operator-policies"):
        status, answer = _get(management, broker, f"{kind}/{quote(_vhost(broker), safe='')}", context)
        if status in FORBIDDEN:
            continue
        policies = _decoded(redacted(management), status, answer, list[BrokerPolicy])
        # Of each kind, one alone counts.
        matching = [one for one in policies if one.matches(queue)]
        found += sorted(matching, key=lambda one: one.priority)[-1:]
    return found


def _vhost(broker: str) -> str:
    return unquote(urlsplit(broker).path[1:]) or "/"


def _decoded(name: str, status: int, answer: bytes, type: type[T]) -> T:
    if status != http.client.OK:
        raise UnavailableError(f"{name}: the management API answered with status {status}")
    try:
        return msgspec.json.decode(answer, type=type)
    except msgspec.MsgspecError as error:
        raise DatabaseError(f"{name} is no management API of RabbitMQ: {error}") from error


def _get(management: str, broker: str, what: str, context: ssl.SSLContext | None) -> tuple[int, bytes]:
    """Status and body; redirects are not followed, because the password would go with them."""
    parts, user = urlsplit(management), urlsplit(broker)
    login = f"{unquote(user.username or 'guest')}:{unquote(user.password or 'guest')}"
    authorization = f"Basic {base64.b64encode(login.encode()).decode()}"
    host, port = parts.hostname or "", parts.port
    connection = (
        http.client.HTTPSConnection(host, port or 15671, timeout=ANSWER_S, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, port or 15672, timeout=ANSWER_S)
    )
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/api/{what}", headers={"Authorization": authorization})
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"{redacted(management)}: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()


def _limits(queue: _Queue) -> QueueLimits:
    policy = queue.effective_policy_definition
    settings = policy if isinstance(policy, dict) else {}
    deliveries = _lowest(queue.arguments.get("x-delivery-limit"), settings.get("delivery-limit"))
    timeout_ms = _lowest(queue.arguments.get("x-consumer-timeout"), settings.get("consumer-timeout"))
    return QueueLimits(deliveries, timeout_ms / 1000 if timeout_ms is not None else None)


def _lowest(*limits: Any) -> int | None:
    """Of an argument and a policy the lower one counts; a negative one is none."""
    return min((one for one in limits if isinstance(one, int) and one >= 0), default=None)
