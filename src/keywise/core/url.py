"""Adapter URLs: parse them, fill in their variables, check their options, and hide their secrets in messages."""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from keywise.core.errors import AddressError, SettingsError

T = TypeVar("T")

HIDDEN_OPTIONS = r"([?&][^=&#]*(?:password|passwd|pwd|token|secret|api_?key|access_?key)[^=&#]*=)[^&#]*"
_PLACEHOLDER = r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?"
SECRET_MIN = 4
"""Values from the environment that are shorter than this are not hidden: hiding them would garble messages."""


class EnvFilledUrl(str):
    """A URL whose `${ENV}` placeholders were filled in; messages and logs show the placeholders instead."""

    written: str
    values: tuple[str, ...]

    def __new__(cls, url: str, written: str, values: Iterable[str]) -> "EnvFilledUrl":
        filled = super().__new__(cls, url)
        filled.written = written
        filled.values = tuple(values)
        return filled

    def __repr__(self) -> str:
        return repr(redacted(self))


def filled(url: str) -> str:
    """Return the URL with its `${NAME}` placeholders filled in from the environment; `$${` is a literal `${`."""
    values: list[str] = []

    def fill(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        name = found[1]
        if not name:
            raise SettingsError(
                f"in {redacted(url)}, a name and }} have to follow ${{; write ${{NAME}}, or $${{ for the text ${{"
            )
        if name not in os.environ:
            raise SettingsError(f"{redacted(url)} needs the environment variable {name}, which is not set; set it")
        values.append(os.environ[name])
        return values[-1]

    text = re.sub(_PLACEHOLDER, fill, url)
    return EnvFilledUrl(text, url, values) if values else text


def has_secret(url: str) -> bool:
    """Whether a URL has a password or a secret option in clear text, and not in a placeholder."""
    hidden = re.sub(_PLACEHOLDER, "***", url)
    return redacted(hidden) != hidden


class Address:
    """A parsed URL of one pipeline. Adapters with the same URL share one database object through `shared`."""

    def __init__(self, url: str, name: str, shared: dict[tuple[Any, ...], Any]) -> None:
        self.url = url
        self.name = name
        """The name of the pipeline."""
        self._shared = shared
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = None
        if parts is None or not parts.scheme or "://" not in url:
            raise AddressError(f"{redacted(url)} is no URL; write for example sqlite:///shop.db")
        if parts.netloc and "@" in parts.path + parts.query + parts.fragment:
            # The text before the @ may be the rest of a password, so no part of the URL is shown.
            begin = redacted(url) if isinstance(url, EnvFilledUrl) else f"the URL {parts.scheme}://..."
            raise AddressError(
                f"{begin} has an @ after the end of its host; in a password, write %2F for /, %3F for ?, %23 for # "
                "and %40 for @; in a path or an option, write %40 for @"
            )
        self.scheme = parts.scheme
        self.path = unquote(parts.path)
        self.host = parts.netloc
        self._options = dict(parse_qsl(parts.query, keep_blank_values=True))

    def take(self, *known: str) -> dict[str, str]:
        """Return the options after `?`. An unknown one raises `AddressError`, which names the nearest known one."""
        for option in self._options:
            if option not in known:
                near = difflib.get_close_matches(option, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(known) or 'none'}"
                raise AddressError(f"{redacted(self.url)}: unknown option {option!r}; {hint}")
        return dict(self._options)

    def file(self) -> str:
        """Return the path of `scheme:///relative/path` or `scheme:////absolute/path`."""
        if self.host:
            fixed = redacted(self.url).replace("://", ":///", 1)
            raise AddressError(f"{redacted(self.url)} has two slashes where a file needs three; write {fixed}")
        if len(self.path) < 2:
            raise AddressError(f"{redacted(self.url)} names no file; write for example {self.scheme}:///shop.db")
        return self.path[1:]

    def check_ports(self) -> None:
        """Raise `AddressError` for a port that is not a number. The URL may name several hosts, separated by commas."""
        for host in self.host.rpartition("@")[2].split(","):
            try:
                _ = urlsplit(f"//{host}").port
            except ValueError:
                raise AddressError(
                    f"{redacted(self.url)} has an invalid port; write a number from 1 to 65535"
                ) from None

    def discreet(self, message: str) -> str:
        """Return the message with the values that came from the environment masked."""
        if not isinstance(self.url, EnvFilledUrl):
            return message
        parts = [*self.url.values, *map(unquote, self.url.values), *self._options, *self._options.values()]
        secrets = {part for part in parts if len(part) >= SECRET_MIN and part not in self.url.written}
        for secret in sorted(secrets, key=len, reverse=True):
            message = message.replace(secret, "***")
        return message

    def shared(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return the object that `make(*arguments)` creates: one for all addresses of an app with equal arguments."""
        identity = (make, *arguments)
        if identity not in self._shared:
            self._shared[identity] = make(*arguments)
        found: T = self._shared[identity]
        return found


def without_secrets(text: str) -> str:
    """Return text with the passwords and secret options of the URLs in it masked."""
    text = re.sub(r"(://[^:/?#@\s\"']*:)[^\s\"']*@", r"\1***@", text)
    return re.sub(HIDDEN_OPTIONS.replace("#]", "#\\s\"']"), r"\1***", text, flags=re.IGNORECASE)


def redacted(url: str) -> str:
    """Return the URL with its password and secret options masked, for messages and logs."""
    written = url.written if isinstance(url, EnvFilledUrl) else url
    # Mask up to the last @: a password may hold characters that otherwise end a host.
    written = re.sub(r"(://[^:/?#@]*:).*@", r"\1***@", written, flags=re.DOTALL)
    return re.sub(HIDDEN_OPTIONS, r"\1***", written, flags=re.IGNORECASE)
