"""Dialects: how each kind of store writes its notifications, read by pure functions.

One file per dialect; each decodes the names of objects exactly once, in the way of its store.
What an announcement is, and which objects a pipeline wants, is in `notification.py` of `ingest/`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from keywise.core.change import Delivery
from keywise.core.errors import SettingsError
from keywise.ingest.dialects.function import function_dialect
from keywise.ingest.dialects.gcs import read_gcs
from keywise.ingest.dialects.s3 import read_s3
from keywise.ingest.dialects.uri import read_uri
from keywise.ingest.notification import Announcement, ObjectSelection

__all__ = [
    "Dialect",
    "check_store",
    "dialect_of",
    "function_dialect",
    "has_versions",
    "read_gcs",
    "read_notification",
    "read_s3",
    "read_uri",
]

Dialect: TypeAlias = Callable[[Delivery], list[Announcement]]
"""Reads one message, which may announce several objects. Raises `MalformedError` if the message as a whole is bad."""

_DIALECTS: dict[str, Dialect] = {
    "s3": lambda delivery: read_s3(delivery.body),
    "gcs": lambda delivery: read_gcs(delivery.body, delivery.headers),
    "uri": lambda delivery: read_uri(delivery.body),
}

_SCHEMES = {"s3": "s3", "gcs": "gs"}
"""The scheme of the URIs that a dialect makes."""


def dialect_of(choice: str | Callable[..., Any]) -> Dialect:
    """Return the dialect of this name, or that of a user's function. Raises `SettingsError` for any other choice."""
    if isinstance(choice, str) and choice in _DIALECTS:
        return _DIALECTS[choice]
    if not callable(choice):
        raise SettingsError(f"dialect={choice!r} is unknown; write one of {', '.join(_DIALECTS)}, or give a function")
    return function_dialect(choice)


def has_versions(dialect: Dialect) -> bool | None:
    """Whether the events of a dialect have versions; None if that is up to a user's function."""
    if dialect is _DIALECTS["uri"]:
        return False
    return True if dialect in _DIALECTS.values() else None


def check_store(choice: str | Callable[..., Any], root: str) -> None:
    """Raise `SettingsError` if the dialect announces objects of another kind of store: all of them would be ignored."""
    scheme = _SCHEMES.get(choice) if isinstance(choice, str) else None
    if scheme is not None and not root.startswith(f"{scheme}://"):
        raise SettingsError(
            f"dialect={choice!r} announces objects of {scheme}://, and the store is {root}; read such messages with a "
            "function that returns the URIs of this store: dialect=…"
        )


def read_notification(delivery: Delivery, dialect: Dialect, selection: ObjectSelection) -> list[Announcement]:
    """Read a message as the announcements of one pipeline. Raises `MalformedError` if the message is none."""
    return [selection.judged(found) for found in dialect(delivery)]
