"""One HTTP server that sinks write to: pooled connections, bounded answers, and what is known after a failure."""

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
"""What a URL may say about its server."""
PORTS = {"http": 80, "https": 443}
CONNECT_S = 10.0
"""How long a connection may take, its TLS handshake included."""
CONNECTIONS_MAX = 100
IDLE_S = 1.0
"""A connection that nobody used for longer is made anew: servers close idle ones, some after two seconds, and a
request that meets the end of its connection may or may not have arrived."""
ANSWER_MAX = 16 * 1024 * 1024
WORDS_MAX = 200
"""Characters of an answer that a cause holds."""
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 0.1, 600.0
"""A server that asks for no wait would be asked without pause; one that asks for a day is asked again before."""
_WARNED_BYTES = 1024 * 1024
"""The client library warns of larger bodies that it is given as one piece."""


class Server(msgspec.Struct, frozen=True):
    """Where an HTTP server is, and what it is shown to be let in."""

    scheme: str
    host: str
    port: int
    authorization: str = ""
    """The value of that header; empty for none."""
    ca: str = ""
    """A file with the certificates to trust instead of those of the system."""
    secrets: tuple[str, ...] = ()
    """What must not be in a message, should the server repeat it."""

    @property
    def name(self) -> str:
        """For messages: never with a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.name}"

    def __repr__(self) -> str:
        return f"Server({self.origin})"


class HttpResponse(msgspec.Struct, frozen=True):
    """What a server said to one request."""

    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes
    is_whole: bool = True
    """False: the body is longer than the limit, and only its begin is here."""


class HttpClient:
    """Requests to one server. Nothing is tried again here, no redirect is followed, no cookie kept, no proxy used."""

    def __init__(self, server: Server, *, connections_max: int = CONNECTIONS_MAX, answer_max: int = ANSWER_MAX) -> None:
        self.name = server.name
        self._server = server
        self._connections_max = connections_max
        self._answer_max = answer_max
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trust = _trust(self._server.ca) if self._server.scheme == "https" else True
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(_note_sending)
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
        assert self._session is not None, "it was opened"
        await self._session.close()

    async def request(
        self, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> HttpResponse:
        """One request. The path is percent-encoded already, and may have a query.

        Raises UnavailableError if nothing was sent, and OutcomeUnknownError if the request may have arrived and no
        whole answer came. Being cancelled, the outcome is unknown as well.
        """
        assert self._session is not None, "the client is not open"
        assert path.startswith("/"), "a path of this server, whatever is in it"
        # Encoded already: else the client library would resolve dots and decode what need not be encoded.
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
        except (aiohttp.ClientError, OSError, TimeoutError, _SecondSendingError) as error:
            if sent.is_set():
                raise OutcomeUnknownError(f"{self.name}: {_why(error, 'no answer in time')}") from error
            raise UnavailableError(f"{self.name}: {_why(error, 'no connection in time')}") from error

    def discreet(self, message: str) -> str:
        """A message from this server without what it was shown to let us in."""
        for secret in sorted(self._server.secrets, key=len, reverse=True):
            message = message.replace(secret, "***")
        return message

    async def _answer(self, response: aiohttp.ClientResponse) -> HttpResponse:
        headers = {name.lower(): value for name, value in response.headers.items()}
        try:
            body = await response.content.readexactly(self._answer_max + 1)
        except asyncio.IncompleteReadError as whole:
            return HttpResponse(response.status, headers, whole.partial)
        # The rest is on its way, so nobody may use this connection again.
        response.close()
        return HttpResponse(response.status, headers, body[: self._answer_max], is_whole=False)


class _SecondSendingError(Exception):
    """The client library was about to send a request again, whose first sending may have arrived."""


async def _note_sending(session: object, context: Any, about: object) -> None:
    """Called before the first byte of a request is sent."""
    sent: asyncio.Event = context.trace_request_ctx
    if sent.is_set():
        # It would do so over a new connection when the one that it kept has ended, and say nothing of it.
        raise _SecondSendingError
    sent.set()


def _why(error: Exception, late: str) -> str:
    """In words without the URL, which the client library's own often hold."""
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


def _trust(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise AddressError(f"ca={ca} cannot be read as certificates: {error.strerror or error}") from error


def one_line(text: str) -> str:
    """The begin of a text, without what is not printable."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:WORDS_MAX]


def retry_after_s(answer: HttpResponse) -> float | None:
    """How long the server asks to be left alone, within bounds; None if it does not say so, or not clearly."""
    header = answer.headers.get("retry-after", "").strip()
    if header.isascii() and header.isdigit():
        wait_s = float(header)
    else:
        until = _moment(header)
        if until is None:
            return None
        # By the server's own clock, if it tells it.
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
    """The server that an address names, `http` or `https`; what `options` say about it is taken out of them.

    `token_env` names a variable of the environment that holds a bearer token, `ca` a file with certificates.
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
"""A name as DNS knows it, or an address."""


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if not token:
        raise AddressError(f"token_env={variable}: the environment has no such variable, or it is empty")
    if not re.fullmatch(r"[!-~]+", token):
        raise AddressError(f"token_env={variable}: what it holds is no token; remove spaces and line ends")
    return token
