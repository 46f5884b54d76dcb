"""The user's function: its parameters, the key of a request, and the decoding of its answers."""

import datetime
import inspect
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_type_hints

import msgspec

from keywise.core import errors
from keywise.core.bodies import decoder, encoded
from keywise.core.change import KEY_MAX_BYTES
from keywise.core.entry import Claim
from keywise.core.errors import RefusedError, SettingsError
from keywise.core.serial.contract import Ending, Reply
from keywise.core.transaction import Transaction

PARTS = str | int | datetime.date | uuid.UUID


class Serial:
    """A function that runs one at a time per key, and the function that says which key that is."""

    def __init__(self, name: str, function: Callable[..., Any], key: Callable[[Any], Any]) -> None:
        self.name = name
        self.function = function
        self._key = key
        hints, names = _read(function)
        transactions = [one for one in names if hints.get(one) is Transaction]
        others = [one for one in names if one not in transactions]
        claims = [one for one in others if hints.get(one) is Claim] or others[:-1]
        requests = [one for one in others if one not in claims]
        if len(requests) != 1 or len(claims) > 1 or len(transactions) > 1:
            raise SettingsError(
                f"{function!r} has to take a keywise.Claim, the request, and perhaps a keywise.Transaction; "
                f"it takes {', '.join(names) or 'nothing'}"
            )
        self._claim, self._request = next(iter(claims), None), requests[0]
        self._transaction = next(iter(transactions), None)
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_atomic = self._transaction is not None
        self._read_request = decoder(hints.get(self._request, Any))
        self._read_result = decoder(hints.get("return", Any))
        if self.is_atomic and not self.is_async:
            raise SettingsError(f"{function!r} writes in a transaction, so that it has to be an async function")

    def call(self, claim: Claim, request: Any, transaction: Any = None) -> Any:
        """What the function returns; a coroutine if it is async."""
        given = {self._claim: claim, self._request: request, self._transaction: transaction}
        return self.function(**{name: value for name, value in given.items() if name is not None})

    def key_of(self, request: Any) -> str:
        """The key of a request, as text."""
        try:
            return key_text(self._key(request))
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(f"the key function of {self.name!r} failed: {type(error).__name__}: {error}") from error

    def body_of(self, request: Any) -> bytes:
        try:
            return encoded(request)
        except Exception as error:
            raise RefusedError(
                f"the request to {self.name!r} cannot be stored as JSON: {type(error).__name__}: {error}"
            ) from error

    def request_of(self, body: bytes) -> Any:
        return self._read_request(body)

    def result_body(self, result: Any) -> bytes:
        """A result as it is stored; raises TypeError if it could not be, or not be read by the caller."""
        try:
            body = msgspec.json.encode(result) if isinstance(result, bytes) else encoded(result)
            self._read_result(body)
        except Exception as error:
            raise TypeError(f"it has run to its end, but its result cannot be stored and read: {error}") from error
        return body

    def result_of(self, reply: Reply) -> Any:
        """The result that a reply has, or the error that it stands for."""
        if reply.outcome is Ending.DONE:
            try:
                return self._read_result(reply.body)
            except msgspec.DecodeError as error:
                # Another version of the function may have stored it.
                raise errors.FailedError(
                    f"{self.name} {reply.id!r} has run, but its stored result is not what the function returns: {error}"
                ) from error
        raise _ERRORS[reply.outcome](f"{self.name} {reply.id!r} {_TOLD[reply.outcome]}: {reply.cause}")


def key_text(key: Any) -> str:
    """A key as text; the parts of a tuple have a slash between them, and a slash inside of one is written %2F."""
    if isinstance(key, tuple):
        text = "/".join(_part(part).replace("%", "%25").replace("/", "%2F") for part in key)
    else:
        text = _part(key)
    return checked("key", text, KEY_MAX_BYTES)


def checked(name: str, text: Any, bytes_max: int) -> str:
    """Text that every store keeps as it is; it travels with that of others, who must not suffer from it."""
    if isinstance(text, str) and text and "\0" not in text and len(text) <= bytes_max:
        with suppress(UnicodeEncodeError):
            if len(text.encode()) <= bytes_max:
                return str.__str__(text)
    raise RefusedError(f"the {name} {str(text)[:40]!r} is no text of 1 to {bytes_max} bytes in UTF-8 without NUL")


def _part(part: Any) -> str:
    if isinstance(part, bool) or not isinstance(part, PARTS):
        raise RefusedError(f"a key is text, or a tuple of texts, whole numbers, dates and UUIDs; {part!r} is none")
    return part.isoformat() if isinstance(part, datetime.date) else str(part)


def _read(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    try:
        return get_type_hints(function), list(inspect.signature(function).parameters)
    except (NameError, TypeError, ValueError) as error:
        raise SettingsError(
            f"the parameters of {function!r} cannot be read: {error}; write a function whose annotations are names of "
            "its module"
        ) from error


_ERRORS = {
    Ending.FAILED: errors.FailedError,
    Ending.EXPIRED: errors.ExpiredError,
    Ending.CANCELLED: errors.RequestCancelledError,
    Ending.LOST: errors.LostError,
    Ending.REFUSED: RefusedError,
}
_TOLD = {
    Ending.FAILED: "failed",
    Ending.EXPIRED: "has not run",
    Ending.CANCELLED: "was cancelled before it ran",
    Ending.LOST: "was broken off, and nobody knows how much of it happened",
    Ending.REFUSED: "was not taken in",
}
