"""An HTTP client for one server: pools connections, limits responses, and reports whether a request was sent."""

import asyncio
import base64
import io
import os
import re
import ssl
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
from yarl import URL

from keywise.core.errors import AddressError, OutcomeUnknownError, UnavailableError
from keywise.core.url import SECRET_MIN, Address, redacted

OPTIONS = ("token_env", "ca")
"""Options of a URL that concern the server."""
PORTS = {"http": 80, "https": 443}
CONNECT_S = 10.0
"""How long it may take to open a connection, with the TLS handshake."""
CONNECTIONS_MAX = 100
IDLE_S = 1.0
"""How long an idle connection is kept. Servers close idle connections, some after two seconds, and a request that meets
a closing connection may or may not have arrived."""
ANSWER_MAX = 16 * 1024 * 1024
QUOTE_MAX = 200
"""The most characters of a response that an error message quotes."""
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 0.1, 600.0
"""Bounds on `Retry-After`: with 0 the sink would retry without a pause, and a day would hide that the server is
back."""
_WARNED_BYTES = 1024 * 1024
"""The client library warns about a larger body that is passed as bytes; a stream avoids the warning."""


class Server(msgspec.Struct, frozen=True):
    """The address of an HTTP server, and the credentials for it."""

    scheme: str
    host: str
    port: int
    authorization: str = ""
    """The value of the `Authorization` header; empty: no such header."""
    ca: str = ""
    """A file with the certificates to trust instead of the system's."""
    secrets: tuple[str, ...] = ()
    """Credentials to remove from error messages, because a server may repeat them in a response."""

    @property
    def name(self) -> str:
        """Host and port, for error messages; without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.name}"

    def __repr__(self) -> str:
        return f"Server({self.origin})"


class HttpResponse(msgspec.Struct, frozen=True):
    """A response."""

    status: int
    headers: Mapping[str, str]
    """By name, in lower case."""
    body: bytes
    is_whole: bool = True
    """False if the body was longer than the limit and is cut."""


class HttpClient:
    """Sends requests to one server. It never retries, follows no redirect, keeps no cookie, and uses no proxy."""

    def __init__(self, server: Server, *, connections_max: int = CONNECTIONS_MAX, answer_max: int = ANSWER_MAX) -> None:
        self.name = server.name
        self._server = server
        self._connections_max = connections_max
        self._answer_max = answer_max
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trust = _tls_context(self._server.ca) if self._server.scheme == "https" else True
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(_note_sent)
        headers = {"User-Agent": "keywise", "Accept-Encoding": "identity"}
        if self._server.authorization:
            headers["Authorization"] = self._server.authorization
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections_max, keepalive_timeout=IDLE_S, ssl=trust),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trace_configs=[tracing],
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None, "the client was opened"
        await self._session.close()

    async def request(
        self, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> HttpResponse:
        """Send one request. The path is percent-encoded already, and may have a query.

        Raises `UnavailableError` if nothing was sent, and `OutcomeUnknownError` if the request may have arrived but no
        complete response came. If the call is cancelled, the outcome is unknown too.
        """
        assert self._session is not None, "the client is not open"
        assert path.startswith("/"), "without the slash, the path could become part of the host"
        # Otherwise the client library would resolve dot segments, and decode characters that need no encoding.
        url = URL(self._server.origin + path, encoded=True)
        sent = asyncio.Event()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    url,
                    data=io.BytesIO(body) if len(body) > _WARNED_BYTES else body or None,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=sent,
                ) as response,
            ):
                return await self._answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError, _RepeatedSendError) as error:
            if sent.is_set():
                raise OutcomeUnknownError(f"{self.name}: {_describe(error, 'no answer in time')}") from error
            raise UnavailableError(f"{self.name}: {_describe(error, 'no connection in time')}") from error

    def discreet(self, message: str) -> str:
        """Return a message with the credentials replaced by `***`."""
        for secret in sorted(self._server.secrets, key=len, reverse=True):
            message = message.replace(secret, "***")
        return message

    async def _answer(self, response: aiohttp.ClientResponse) -> HttpResponse:
        headers = {name.lower(): value for name, value in response.headers.items()}
        try:
            body = await response.content.readexactly(self._answer_max + 1)
        except asyncio.IncompleteReadError as whole:
            return HttpResponse(response.status, headers, whole.partial)
        # The rest of the body is still in the connection, so it must not go back to the pool.
        response.close()
        return HttpResponse(response.status, headers, body[: self._answer_max], is_whole=False)


class _RepeatedSendError(Exception):
    """The client library was about to repeat a request whose first transmission may have arrived."""


async def _note_sent(session: object, context: Any, about: object) -> None:
    """Called by the client library before it sends the first byte of a request."""
    sent: asyncio.Event = context.trace_request_ctx
    if sent.is_set():
        # If a pooled connection turns out to be closed, the client library repeats the request on a new one, and does
        # not report it.
        raise _RepeatedSendError
    sent.set()


def _describe(error: Exception, late: str) -> str:
    """Describe an error without the URL, which the client library's own messages often contain."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error)
    if isinstance(error, TimeoutError):
        return late
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is no HTTP"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer broke off"
    return "the connection was lost"


def _tls_context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise AddressError(f"ca={ca} cannot be read as certificates: {error.strerror or error}") from error


def one_line(text: str) -> str:
    """Return the beginning of a text on one line, with printable characters only."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:QUOTE_MAX]


def retry_after_s(answer: HttpResponse) -> float | None:
    """Return the `Retry-After` of a response in seconds, within bounds; None if it is missing or malformed."""
    header = answer.headers.get("retry-after", "").strip()
    if header.isascii() and header.isdigit():
        wait_s = float(header)
    else:
        until = _moment(header)
        if until is None:
            return None
        # Compare with the server's own clock, if the response has a `Date`: the clocks may differ.
        since = _moment(answer.headers.get("date", ""))
        wait_s = until - (time.time() if since is None else since)
    return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


def _moment(date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def server_at(address: Address, scheme: str, options: dict[str, str], port: int | None = None) -> Server:
    """Return the server of an address; removes the options for the server from `options`.

    `token_env` names an environment variable with a bearer token, `ca` a file with certificates.
    """
    url = redacted(address.url)
    address.check_ports()
    parts = urlsplit(f"//{address.host}")
    host = parts.hostname or ""
    if not re.fullmatch(_HOST, host):
        raise AddressError(f"{url} names no server; write for example {address.scheme}://localhost:8080")
    token_env, ca = options.pop("token_env", ""), options.pop("ca", "")
    if ca and scheme != "https":
        raise AddressError(f"{url}: ca is for connections that are encrypted; this one is not")
    if token_env and parts.username is not None:
        raise AddressError(f"{url} has both a user and token_env; keep one of them")
    kind, credential, password = "", "", unquote(parts.password or "")
    if token_env:
        kind, credential = "Bearer ", _token(token_env)
    elif parts.username is not None:
        kind, credential = "Basic ", base64.b64encode(f"{unquote(parts.username)}:{password}".encode()).decode()
    secrets = {one for one in (credential, password, parts.password or "") if len(one) >= SECRET_MIN}
    return Server(scheme, host, parts.port or port or PORTS[scheme], kind + credential, ca, tuple(secrets))


_HOST = r"(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?|[0-9a-f.:]+"
"""A DNS name or an IP address."""


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if not token:
        raise AddressError(f"token_env={variable}: the environment has no such variable, or it is empty")
    if not re.fullmatch(r"[!-~]+", token):
        raise AddressError(f"token_env={variable}: what it holds is no token; remove spaces and line ends")
    return token
