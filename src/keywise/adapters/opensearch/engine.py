"""One OpenSearch or Elasticsearch: sends requests, and turns refusals into errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import msgspec

from keywise.adapters.http.client import HttpClient, HttpResponse, Server
from keywise.adapters.opensearch.documents import TOO_MANY, cause_of
from keywise.core.errors import DatabaseError, OutcomeUnknownError, UnavailableError

JSON = {"Content-Type": "application/json"}


class Engine:
    """Sends requests for one index or alias, whose name the errors contain."""

    def __init__(self, server: Server, index: str, timeout_s: float, answer_max: int) -> None:
        self.name = server.name
        self.server = server
        self.timeout_s = timeout_s
        self._index = index
        self._client = HttpClient(server, answer_max=answer_max)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = JSON,
        timeout_s: float | None = None,
    ) -> HttpResponse:
        """Send one request; raises what `HttpClient.request` raises."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return await self._client.request(method, path, body=body, headers=headers if body else None, timeout_s=limit_s)

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Turn an unknown outcome into `UnavailableError`, for requests that can be repeated, such as reads."""
        try:
            yield
        except OutcomeUnknownError as error:
            raise UnavailableError(str(error)) from error
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise UnavailableError(f"{self.name}: the answer cannot be read: {error}") from error

    def check(self, answer: HttpResponse) -> None:
        """Raise the error that a refusal means."""
        if answer.status == 200:
            return
        cause = f"{self.name}: {self.cause(answer)}"
        if answer.status == 404:
            raise DatabaseError(
                f"{self.name} has no index {self._index}; make one with the types that you want, "
                f"with a request such as PUT /{self._index}"
            )
        if answer.status in (401, 403):
            raise DatabaseError(f"{cause}; check user and password, and what they may do")
        if answer.status == TOO_MANY or answer.status >= 500:
            raise UnavailableError(cause)
        raise DatabaseError(f"{cause}; is this the address of OpenSearch or Elasticsearch?")

    def cause(self, answer: HttpResponse) -> str:
        """Return why a request was refused, without secrets."""
        return cause_of(answer, self._client.discreet)
