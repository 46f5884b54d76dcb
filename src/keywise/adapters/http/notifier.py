"""A URL that gets messages as the bodies of POST requests."""

from typing import Self
from urllib.parse import quote, urlsplit

from keywise.adapters.http.client import HttpClient, HttpResponse, one_line, server_at
from keywise.core.errors import AddressError, KeywiseError, OutcomeUnknownError, UnavailableError
from keywise.core.notifier import Notifier
from keywise.core.url import Address, redacted

TIMEOUT_S = 10.0
TRY_AGAIN = frozenset({401, 403, 408, 425, 429})
"""Statuses below 500 that may change without another URL: the receiver is busy, or its rights are being set up."""
JSON = {"Content-Type": "application/json"}
SAFE = "/%:@!$&'()*+,;=~?"


class HttpNotifier:
    """Posts each message to one URL, whose receiver has to answer 2xx."""

    def __init__(self, client: HttpClient, target: str) -> None:
        self._client = client
        self._target = target
        """The path, with the query."""

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__()

    async def check(self) -> None:
        """Send a HEAD request. Any answer will do, because many receivers accept only POST."""
        await self._ask("HEAD", b"")

    async def notify(self, body: bytes) -> None:
        answer = await self._ask("POST", body)
        if 200 <= answer.status < 300:
            return
        said = one_line(self._client.discreet(answer.body.decode("utf-8", "replace")))
        cause = f"{self._client.name}: {answer.status}{f': {said}' if said else ''}"
        if answer.status in TRY_AGAIN or answer.status >= 500:
            raise UnavailableError(cause)
        raise KeywiseError(f"{cause}; a receiver has to answer 2xx to a POST request")

    async def _ask(self, method: str, body: bytes) -> HttpResponse:
        try:
            return await self._client.request(method, self._target, body=body, headers=JSON, timeout_s=TIMEOUT_S)
        except OutcomeUnknownError as error:
            # A message may arrive twice.
            raise UnavailableError(str(error)) from error


def connect(address: Address) -> Notifier:
    """Make the notifier for `https://user:password@host/path?query`; nothing of the query is an option of keywise."""
    parts = urlsplit(address.url)
    if parts.fragment:
        raise AddressError(f"{redacted(address.url)}: what follows a # is never sent; write %23 if it is meant")
    target = quote(f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", safe=SAFE)
    return HttpNotifier(HttpClient(server_at(address, address.scheme, {})), target)
