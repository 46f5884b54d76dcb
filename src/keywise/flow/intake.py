"""From a delivery to a change: reads just what is needed to route it, and says what is wrong with the rest."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec

from keywise.core.bodies import decoder, first_parameter_type
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
from keywise.flow.lanes import Ticket

Read: TypeAlias = Callable[[Any], Put | Delete | Ignore]
Route: TypeAlias = tuple[str, Order, bool]
"""Key, order, deleted."""


class ReadBatch(msgspec.Struct):
    """What became of many deliveries."""

    tickets: list[Ticket] = []
    malformed: list[tuple[Delivery, str]] = []
    ignored: list[tuple[Delivery, str]] = []


class Fields(msgspec.Struct, frozen=True):
    """Where key, version and deletion stand in a JSON object."""

    key: str
    version: str | None = None
    deleted: Mapping[str, Sequence[Any]] = {}


class MessageReader:
    """Reads deliveries for one pipeline."""

    def __init__(
        self,
        route: "FieldRoute | FunctionRoute",
        *,
        body_max_bytes: int,
        decode: Callable[[bytes], Any] | None = None,
    ) -> None:
        self._route = route
        self._body_max_bytes = body_max_bytes
        self.decode = decode or route.decode
        """What `change.value` is made with."""

    def read(self, deliveries: Sequence[Delivery], source: int, now: float) -> ReadBatch:
        """Make tickets; one bad delivery never takes its neighbours with it."""
        read_batch = ReadBatch()
        route, decode, body_max = self._route, self.decode, self._body_max_bytes
        add = read_batch.tickets.append
        for delivery in deliveries:
            body = delivery.body
            try:
                if len(body) > body_max:
                    raise MalformedError(f"body of {len(body)} bytes is over the limit of {body_max}")
                key, order, deleted = route(body)
                if not (key.isascii() and 0 < len(key) <= KEY_MAX_BYTES and "\0" not in key):
                    check_key(key)
            except _Ignored as ignored:
                read_batch.ignored.append((delivery, str(ignored)))
            except (MalformedError, VersionError) as error:
                read_batch.malformed.append((delivery, str(error)))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                read_batch.malformed.append((delivery, f"body cannot be read: {error}"))
            except Exception as error:
                # User code and hostile bodies meet here; whatever they raise, even in their own texts, is theirs alone.
                read_batch.malformed.append((delivery, f"body cannot be read: {type(error).__name__}"))
            else:
                add(Ticket(Change(key, order, deleted, delivery.sent_at, body, decode), delivery, source, now))
        return read_batch

    def read_one(self, body: bytes) -> Change[Any]:
        """Read one body that is not from a source; raises `MalformedError` if it says nothing."""
        read_batch = self.read([Delivery("", "", body, float("inf"))], 0, 0.0)
        for _, cause in (*read_batch.malformed, *read_batch.ignored):
            raise MalformedError(cause or "the pipeline ignores this body")
        return read_batch.tickets[0].change


class FieldRoute:
    """Finds key, version and deletion by the names of fields."""

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
        self._versioned = fields.version is not None
        self._flags = [(f"flag{i}", tuple(values)) for i, values in enumerate(fields.deleted.values())]

    def __call__(self, body: bytes) -> Route:
        found: Any = self._decode(body)
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


class FunctionRoute:
    """Asks a function of the user's, who gets the body as the type that it is annotated with."""

    def __init__(self, read: Read) -> None:
        if inspect.iscoroutinefunction(read):
            raise SettingsError(f"{read!r} is async; a read function only looks at the message, so make it a plain def")
        self.read = read
        self.decode: Callable[[bytes], Any] | None = decoder(first_parameter_type(read))

    def __call__(self, body: bytes) -> Route:
        assert self.decode is not None
        try:
            value = self.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise
        except Exception as error:
            raise MalformedError(f"the body's type refused it: {type(error).__name__}: {error}") from error
        try:
            said = self.read(value)
        except Exception as error:
            raise MalformedError(f"read failed: {type(error).__name__}: {error}") from error
        match said:
            case Put() | Delete():
                if not isinstance(said.key, str):
                    raise MalformedError(f"read returned the key {said.key!r}; a key must be text")
                return said.key, order_of(said.version), isinstance(said, Delete)
            case Ignore():
                raise _Ignored(said.reason)
            case _:
                raise MalformedError(f"read returned {said!r}; return Put, Delete or Ignore")


class _Ignored(Exception):
    """The read function said Ignore."""


_VERSION = Annotated[int, msgspec.Meta(ge=VERSION_MIN, le=VERSION_MAX)] | datetime


def _check_fields(fields: Fields) -> None:
    """Refuse what would be read as something else than was meant."""
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
    """As `in`, but true is not 1 and false is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
