"""A dialect of the user's own: a function that says which objects a message announces."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from keywise.core.bodies import decoder, parameter_types
from keywise.core.change import Delete, Delivery, Ignore, Put, version_of
from keywise.core.errors import MalformedError, SettingsError, VersionError
from keywise.core.failures import cause_of_error
from keywise.ingest.notification import (
    Announcement,
    ObjectEvent,
    Skipped,
    SkipReason,
    Unreadable,
    checked,
    split_uri,
)
from keywise.ingest.versions import VersionScale

Announced: TypeAlias = Put | Delete | Ignore
"""`Put` and `Delete` as a read function returns them; their key is the URI of an object."""


def function_dialect(read: Callable[..., Any]) -> Callable[[Delivery], list[Announcement]]:
    """Return the dialect of a function.

    It gets the body, decoded as the type of its first parameter (`bytes`: as it came), and the delivery if it asks
    for it by annotation. It returns `Put`, `Delete` or `Ignore`, or a list of them for a message with several objects.
    """
    if inspect.iscoroutinefunction(read):
        raise SettingsError(f"{read!r} is async; a dialect only looks at the message, so make it a plain def")
    (_, kind), *others = parameter_types(read)
    wants_delivery = bool(others) and others[0][1] is Delivery
    for parameter, _ in others[int(wants_delivery) :]:
        if parameter.default is parameter.empty and parameter.kind not in _OPTIONAL:
            raise SettingsError(
                f"{read!r} asks for {parameter.name!r}; after the message, a dialect may ask for a keywise.Delivery, "
                "by annotation"
            )
    decode = _unchanged if kind is bytes else decoder(kind)

    def dialect(delivery: Delivery) -> list[Announcement]:
        try:
            body = decode(delivery.body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise MalformedError(f"body cannot be read: {error}") from error
        except Exception as error:
            raise MalformedError(f"the body's type refused it: {cause_of_error(error)}") from error
        try:
            result = read(body, delivery) if wants_delivery else read(body)
        except Exception as error:
            raise MalformedError(f"the dialect failed: {cause_of_error(error)}") from error
        results = result if isinstance(result, list | tuple) else [result]
        return [_announced(one) for one in results] or [
            Skipped(SkipReason.BY_FUNCTION, "the dialect announced nothing")
        ]

    return dialect


_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _unchanged(body: bytes) -> bytes:
    return body


def _announced(result: Any) -> Announcement:
    match result:
        case Ignore():
            return Skipped(SkipReason.BY_FUNCTION, result.reason)
        case Put() | Delete():
            try:
                return _event(result)
            except (MalformedError, VersionError) as error:
                return Unreadable(str(error))
        case _:
            return Unreadable(f"the dialect returned {_shown(result)}; return Put, Delete or Ignore, or a list of them")


def _event(result: Put | Delete) -> ObjectEvent | Skipped:
    if not isinstance(result.key, str):
        raise MalformedError(f"the dialect returned the key {_shown(result.key)}; the key is the URI of an object")
    _, bucket, name = split_uri(result.key)
    version = None if result.version is None else version_of(result.version)
    scale = VersionScale.UNVERSIONED if version is None else VersionScale.FUNCTION
    return checked(ObjectEvent(result.key, bucket, name, isinstance(result, Delete), version, scale))


def _shown(value: Any) -> str:
    """Name the type only: the text of a user's value may be long, or raise."""
    return f"a {type(value).__name__}"
