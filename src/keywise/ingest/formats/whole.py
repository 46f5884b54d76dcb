"""Formats that need the whole content of an object at once: a JSON array, or a function of the user."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import msgspec

from keywise.core.errors import ObjectError

_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


@runtime_checkable
class WholeFormat(Protocol):
    """Makes records of the whole content. The same content has to give the same records each time."""

    @property
    def name(self) -> str: ...

    def records(self, content: bytes) -> Iterable[bytes]: ...

    def decode(self, record: bytes, header: str) -> Any: ...


class JsonArrayFormat:
    """The object is one JSON array, and each of its items a record."""

    name = "json"

    def records(self, content: bytes) -> Iterator[bytes]:
        try:
            items = _decode_array(content.removeprefix(b"\xef\xbb\xbf")) if content.strip() else []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ObjectError(f"the object is no JSON array: {error}; correct it, or use another format") from error
        return map(bytes, items)

    def decode(self, record: bytes, header: str) -> Any:
        return msgspec.json.decode(record)


class FunctionFormat:
    """A function of the user returns the records of the content, each as bytes, as text or as a value for JSON."""

    name = "function"

    def __init__(self, function: Callable[[bytes], Iterable[Any]]) -> None:
        self._function = function

    def records(self, content: bytes) -> Iterator[bytes]:
        return map(_as_bytes, self._function(content))

    def decode(self, record: bytes, header: str) -> bytes:
        return record


def _as_bytes(record: Any) -> bytes:
    if isinstance(record, bytes):
        return record
    return record.encode() if isinstance(record, str) else msgspec.json.encode(record)
