"""Intake: it reads deliveries as changes, and decodes no more of a body than routing needs."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from keywise.core.bodies import decoder, parameter_types
from keywise.core.change import (
    KEY_MAX_BYTES,
    VERSION_MAX,
    VERSION_MIN,
    Change,
    Delete,
    Delivery,
    Ignore,
    Order,
    Put,
    check_key,
    order_of,
)
from keywise.core.errors import MalformedError, SettingsError, VersionError
from keywise.core.failures import cause_of_error
from keywise.core.tracebacks import traceback_of
from keywise.flow.lanes import Ticket

Read: TypeAlias = Callable[[Any], Put | Delete | Ignore] | Callable[[Any, Delivery], Put | Delete | Ignore]
"""It gets the body, and if it asks for it by annotation, the delivery too."""
Route: TypeAlias = tuple[str, Order, bool]
"""The key, the order, and whether the key is deleted."""


class Malformed(NamedTuple):
    """A delivery that is no change, with the cause, and the traceback if the read function raised."""

    delivery: Delivery
    cause: str
    traceback: str = ""
    key: str = ""
    """Empty if the key cannot be read either."""


class ReadBatch(msgspec.Struct):
    """The result of reading a batch of deliveries; those that are not processed come with the reason."""

    tickets: list[Ticket] = []
    malformed: list[Malformed] = []
    ignored: list[tuple[Delivery, str]] = []
    last: list[tuple[Ticket, str]] = []
    """Changes that their source cannot deliver again; the consumer takes them from the tickets."""
    misdirected: tuple[str, str] | None = None
    """Why one of the ignored deliveries should not have come to this pipeline, and what to do; set at most once."""

    @property
    def unread(self) -> list[Delivery]:
        """The deliveries that are not processed: malformed, last and ignored ones."""
        return [*self.dead, *(delivery for delivery, _ in self.ignored)]

    @property
    def dead(self) -> list[Delivery]:
        """The deliveries that become dead letters without being processed: malformed and last ones."""
        return [*(bad.delivery for bad in self.malformed), *(ticket.delivery for ticket, _ in self.last)]


class Intake(Protocol):
    """Reads the deliveries of one pipeline as changes."""

    def read(self, deliveries: Sequence[Delivery], source: int, now: float) -> ReadBatch:
        """Make a ticket of each delivery. A bad delivery is reported in the result and does not affect the others."""

    def read_one(self, body: bytes, delivery: Delivery | None = None) -> Change[Any]:
        """Read one body that did not come from a source; raises `MalformedError` if it is malformed or ignored."""


class Fields(msgspec.Struct, frozen=True):
    """The fields of a JSON object that hold the key, the version and the deletion flags."""

    key: str
    version: str | None = None
    deleted: Mapping[str, Sequence[Any]] = {}


class MessageReader:
    """Reads the deliveries of one pipeline as changes."""

    def __init__(
        self,
        route: "FieldRoute | FunctionRoute",
        *,
        body_max_bytes: int,
        decode: Callable[[bytes], Any] | None = None,
    ) -> None:
        self._route = route
        self._wants_delivery = isinstance(route, FunctionRoute) and route.wants_delivery
        self._body_max_bytes = body_max_bytes
        self.decode = decode or route.decode
        """Decodes the body for `change.value`."""

    def read(self, deliveries: Sequence[Delivery], source: int, now: float) -> ReadBatch:
        """Make a ticket of each delivery. A bad delivery is reported in the result and does not affect the others."""
        read_batch = ReadBatch()
        route: Any = self._route
        wants_delivery, decode, body_max = self._wants_delivery, self.decode, self._body_max_bytes
        add = read_batch.tickets.append
        for delivery in deliveries:
            body = delivery.body
            try:
                if len(body) > body_max:
                    raise MalformedError(f"body of {len(body)} bytes is over the limit of {body_max}")
                key, order, deleted = route(body, delivery) if wants_delivery else route(body)
                if not (key.isascii() and 0 < len(key) <= KEY_MAX_BYTES and "\0" not in key):
                    check_key(key)
            except _Ignored as ignored:
                read_batch.ignored.append((delivery, str(ignored)))
            except _ReadFailedError as error:
                read_batch.malformed.append(Malformed(delivery, str(error), traceback_of(error.raised)))
            except (MalformedError, VersionError) as error:
                read_batch.malformed.append(Malformed(delivery, str(error)))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                read_batch.malformed.append(Malformed(delivery, f"body cannot be read: {error}"))
            except Exception as error:
                # User code runs here on untrusted bodies and may raise anything. Only the name of the class is
                # kept: the text may quote the body, and a __str__ of the user's may raise as well.
                read_batch.malformed.append(Malformed(delivery, f"body cannot be read: {type(error).__name__}"))
            else:
                # Not `Change[Any](...)`: a call of the generic alias costs as much as all the rest of this loop.
                change: Change[Any] = Change(
                    key, order, deleted, delivery.sent_at, body=body, decode=decode, headers=delivery.headers
                )
                add(Ticket(change, delivery, source, now))
        return read_batch

    def key_of(self, body: bytes) -> str:
        """Return the key of a body that is no change, so that it can be found; empty if it names none."""
        return self._route.key_of(body) if isinstance(self._route, FieldRoute) else ""

    def read_one(self, body: bytes, delivery: Delivery | None = None) -> Change[Any]:
        """Read one body that did not come from a source; raises `MalformedError` if it is malformed or ignored.

        `delivery` is what a read function sees of it; without one, it has no headers.
        """
        read_batch = self.read([delivery or Delivery("", "", body, float("inf"))], 0, 0.0)
        for _, cause, *_ in (*read_batch.malformed, *read_batch.ignored):
            raise MalformedError(cause or "the pipeline ignores this body")
        return read_batch.tickets[0].change


_NO_VERSION = (
    "Invalid RFC3339 encoded datetime",
    "a version is an integer, or an RFC3339 time such as 2026-11-16T12:00:00Z",
)
"""What msgspec says of a text that is neither, and what helps more."""


class FieldRoute:
    """Reads the key, the version and the deletion from named fields."""

    decode: Callable[[bytes], Any] | None = None

    def __init__(self, fields: Fields) -> None:
        _check_fields(fields)
        self.fields = fields
        names = {"key": fields.key}
        types: list[tuple[str, Any]] = [("key", str)]
        if fields.version is not None:
            names["version"] = fields.version
            types.append(("version", _VERSION))
        flags: list[tuple[str, Any, Any]] = []
        for index, name in enumerate(fields.deleted):
            names[f"flag{index}"] = name
            flags.append((f"flag{index}", Any, msgspec.UNSET))
        try:
            shape = msgspec.defstruct("Route", [*types, *flags], rename=names)
        except ValueError as error:
            raise SettingsError(f"key=, version= and deleted= name fields of JSON objects: {error}") from error
        self._decode = msgspec.json.Decoder(shape).decode
        self._decode_key = msgspec.json.Decoder(msgspec.defstruct("Key", types[:1], rename={"key": fields.key})).decode
        self._versioned = fields.version is not None
        self._flags = [(f"flag{i}", tuple(values)) for i, values in enumerate(fields.deleted.values())]

    def __call__(self, body: bytes) -> Route:
        try:
            found: Any = self._decode(body)
        except msgspec.ValidationError as error:
            raise MalformedError(f"body cannot be read: {str(error).replace(*_NO_VERSION)}") from error
        if not self._versioned:
            order = order_of(None)
        elif type(found.version) is int:
            order = (0, found.version, 0)
        else:
            order = order_of(found.version)
        deleted = False
        for flag, values in self._flags:
            value = getattr(found, flag)
            if value in values and _is_among(value, values):
                deleted = True
        return found.key, order, deleted

    def key_of(self, body: bytes) -> str:
        """Return the key of a body whose other fields may be bad; empty if it has none."""
        try:
            found: Any = self._decode_key(body)
            check_key(found.key)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MalformedError):
            return ""
        return str(found.key)


class FunctionRoute:
    """Reads the key, the version and the deletion with the user's read function.

    The function gets the body decoded as the type of its first parameter.
    """

    def __init__(self, read: Read) -> None:
        if inspect.iscoroutinefunction(read):
            raise SettingsError(f"{read!r} is async; a read function only looks at the message, so make it a plain def")
        (_, kind), *others = parameter_types(read)
        self.read: Callable[..., Any] = read
        self.wants_delivery = bool(others) and others[0][1] is Delivery
        for parameter, _ in others[int(self.wants_delivery) :]:
            if parameter.default is parameter.empty and parameter.kind not in _OPTIONAL:
                raise SettingsError(
                    f"{read!r} asks for {parameter.name!r}; after the message, a read function may ask for "
                    "a keywise.Delivery, by annotation"
                )
        self.decode: Callable[[bytes], Any] | None = decoder(kind)

    def __call__(self, body: bytes, *delivery: Delivery) -> Route:
        assert self.decode is not None
        try:
            value = self.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise
        except Exception as error:
            raise MalformedError(f"the body's type refused it: {type(error).__name__}: {error}") from error
        try:
            result = self.read(value, *delivery)
        except Exception as error:
            raise _ReadFailedError(error) from error
        match result:
            case Put() | Delete():
                if not isinstance(result.key, str):
                    raise MalformedError(f"read returned the key {result.key!r}; a key must be text")
                return result.key, order_of(result.version), isinstance(result, Delete)
            case Ignore():
                raise _Ignored(result.reason)
            case _:
                raise MalformedError(f"read returned {result!r}; return Put, Delete or Ignore")


_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _ReadFailedError(MalformedError):
    """The read function raised."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(f"read failed: {cause_of_error(raised)}")
        self.raised = raised


class _Ignored(Exception):
    """The read function returned `Ignore`."""


_VERSION = Annotated[int, msgspec.Meta(ge=VERSION_MIN, le=VERSION_MAX)] | datetime


def _check_fields(fields: Fields) -> None:
    """Raise `SettingsError` for field names and values that would silently be read differently than meant."""
    names = [fields.key, *([] if fields.version is None else [fields.version]), *fields.deleted]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(
                f"key=, version= and deleted= name the field {name!r} twice; each of them needs a field of its own"
            )
    for name, values in dict[Any, Any](fields.deleted).items():
        if not isinstance(name, str) or isinstance(values, str | bytes) or not isinstance(values, Collection):
            raise SettingsError(
                f"deleted= maps a field to a list of values, not {name!r} to {values!r}; "
                'write for example {"state": ["gone"]}'
            )


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    """Like `in`, but true does not equal 1, and false does not equal 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
