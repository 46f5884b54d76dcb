"""A URL that names a source, a ledger or a sink, with what its adapter needs to open it."""

import difflib
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from keywise.errors import AddressError

T = TypeVar("T")


class Address:
    """A parsed URL for one pipeline. Adapters of one technology share a database object through it."""

    def __init__(self, url: str, name: str, shared: dict[tuple[Any, ...], Any]) -> None:
        self.url = url
        self.name = name
        """Of the pipeline."""
        self._shared = shared
        parts = urlsplit(url)
        if not parts.scheme or "://" not in url:
            raise AddressError(f"{shown(url)} is no URL; write for example sqlite:///shop.db")
        self.scheme = parts.scheme
        self.path = unquote(parts.path)
        self.host = parts.netloc
        self._options = dict(parse_qsl(parts.query, keep_blank_values=True))

    def take(self, *known: str) -> dict[str, str]:
        """The options after `?`; an unknown one is refused with the nearest known one."""
        for option in self._options:
            if option not in known:
                near = difflib.get_close_matches(option, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(known) or 'none'}"
                raise AddressError(f"{shown(self.url)}: unknown option {option!r}; {hint}")
        return dict(self._options)

    def file(self) -> str:
        """The path of `scheme:///relative/path` or `scheme:////absolute/path`."""
        if self.host:
            fixed = f"{self.scheme}:///{self.host}{self.path}"
            raise AddressError(f"{shown(self.url)} has two slashes where a file needs three; write {shown(fixed)}")
        if len(self.path) < 2:
            raise AddressError(f"{shown(self.url)} names no file; write for example {self.scheme}:///shop.db")
        return self.path[1:]

    def shared(self, make: Callable[..., T], *arguments: Any) -> T:
        """One object for all addresses of an app that name the same thing."""
        identity = (make, *arguments)
        if identity not in self._shared:
            self._shared[identity] = make(*arguments)
        found: T = self._shared[identity]
        return found


def shown(url: str) -> str:
    """A URL without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, host = parts.username or "", parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return parts._replace(netloc=f"{user}:***@{host}{port}").geturl()
