"""A proxy in front of OpenSearch that notes every write which the engine accepts, in the engine's own order."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

FIELDS = "&filter_path=errors,items.*.status,items.*.error,items.*._index,items.*._id,items.*._version,items.*._seq_no"
KEPT = {"content-type", "authorization"}
BODY_MAX = 64 * 1024 * 1024


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """A write that the engine has accepted."""

    number: int
    """The engine counts the operations of an index with one shard."""
    key: str
    version: int
    deleted: bool
    index: str = ""
    """The index itself, also if it was written by the name of an alias."""
    at: float = 0.0
    """When its answer came, by the clock of this machine."""


class _Item(msgspec.Struct, gc=False):
    status: int
    index: str = msgspec.field(name="_index", default="")
    key: str = msgspec.field(name="_id", default="")
    version: int = msgspec.field(name="_version", default=0)
    number: int = msgspec.field(name="_seq_no", default=-1)


class _Items(msgspec.Struct):
    items: list[dict[str, _Item]] = []


class OpenSearchRecorder:
    """Passes requests on. An answer that is not delivered, because its client has died, is noted all the same."""

    def __init__(self, server_url: str) -> None:
        self.port = 0
        self.accepted: list[Accepted] = []
        self.refused = 0
        """How many writes the engine has refused as older, or for another reason."""
        self.on_accepted: Callable[[Accepted], None] = lambda one: None
        self._server_url = server_url.replace("opensearch://", "http://")
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return f"opensearch://127.0.0.1:{self.port}"

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._session is not None
        body, target = await request.read(), request.raw_path
        is_bulk = request.path.endswith("/_bulk")
        if is_bulk:
            target = "&".join(part for part in target.split("&") if not part.startswith("filter_path="))
            path, _, query = target.partition("?")
            kept = "&".join(part for part in query.split("&") if part and not part.startswith("filter_path="))
            target = f"{path}?{kept}{FIELDS}"
        headers = {name: value for name, value in request.headers.items() if name.lower() in KEPT}
        url = URL(self._server_url + target, encoded=True)
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            content = await answer.read()
        if is_bulk and answer.status == 200:
            self._note(content)
        return web.Response(status=answer.status, body=content, content_type=answer.content_type)

    def _note(self, content: bytes) -> None:
        now = time.time()
        for item in msgspec.json.decode(content, type=_Items).items:
            for action, one in item.items():
                if one.number < 0 or one.status == 409:
                    self.refused += 1
                else:
                    accepted = Accepted(one.number, one.key, one.version, action == "delete", one.index, now)
                    self.accepted.append(accepted)
                    self.on_accepted(accepted)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["OpenSearchRecorder"]:
        # Without `handler_cancellation`: what was sent before its client died may be accepted, so it has to be noted.
        runner = web.ServerRunner(web.Server(self.serve, request_factory=_request))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            try:
                yield self
            finally:
                await runner.cleanup()


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """A bulk of rows is larger than what a request may have otherwise."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=BODY_MAX)


def opensearch_recorder(server_url: str) -> AbstractAsyncContextManager[OpenSearchRecorder]:
    """A new recorder on a free port of this machine."""
    return OpenSearchRecorder(server_url).running()
