"""A proxy in front of DynamoDB Local: it throttles as Amazon does, loses answers, and notes what is asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

TYPE = "application/x-amz-json-1.0"
PREFIX = "com.amazonaws.dynamodb.v20120810#"
THROTTLED = ("ProvisionedThroughputExceededException", "ThrottlingException")
KEPT = {"Content-Type", "X-Amz-Target", "Authorization", "X-Amz-Date"}

Asked = dict[str, Any]


class DynamoDbFaults:
    """Passes requests on. Every so many of them, one is throttled or loses its answer; zero means never."""

    def __init__(self, server_url: str) -> None:
        self.port = 0
        self.asked: list[tuple[str, Asked]] = []
        """Every request: the action, and what it says."""
        self.is_noting = True
        """Whether requests are kept there; a run of very many does not need them."""
        self.throttle_every = 0
        self.lose_every = 0
        self.skip_every = 0
        """Of the keys of a batch, one in so many is left to be read again, but never the first."""
        self.skips_all = False
        """Whether no key of a batch is read."""
        self.judge: Callable[[str, Asked], tuple[int, str] | None] = lambda action, asked: None
        """Decides on a request first: a status and an error code to answer with."""
        self.before: Callable[[str, Asked], None] = lambda action, asked: None
        """Called before a request is passed on."""
        self.hangs = False
        """Whether a request gets no answer, until the client breaks it off."""
        self.hanging = 0
        """How many such requests are under way."""
        self.throttled = 0
        self.lost = 0
        self.skipped = 0
        self.side_by_side = 0
        """The most requests that were under way at the same time."""
        self._under_way = 0
        self._server_url = server_url
        self._taken = 0
        self._carried_out = 0
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, action: str) -> list[Asked]:
        return [asked for one, asked in self.asked if one == action]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        action = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        asked: Asked = json.loads(await request.read())
        if self.is_noting:
            self.asked.append((action, asked))
        if (refusal := self.judge(action, asked)) is not None:
            return refused(*refusal)
        is_of_rows = action != "DescribeTable"
        self._taken += is_of_rows
        if is_of_rows and is_due(self._taken, self.throttle_every):
            self.throttled += 1
            return refused(400, THROTTLED[self.throttled % len(THROTTLED)])
        if self.hangs:
            await self._hang()
        if self.skips_all and action == "BatchGetItem":
            return web.json_response({"Responses": {}, "UnprocessedKeys": asked["RequestItems"]}, content_type=TYPE)
        skipped = self._skip(asked) if action == "BatchGetItem" else {}
        self.before(action, asked)
        status, body = await self._forward(request, asked)
        self._carried_out += is_of_rows
        if is_of_rows and is_due(self._carried_out, self.lose_every):
            self.lost += 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if skipped and status == 200:
            body = json.dumps(json.loads(body) | {"UnprocessedKeys": skipped}).encode()
        return web.Response(status=status, body=body, content_type=TYPE)

    async def _hang(self) -> None:
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1

    def _skip(self, asked: Asked) -> Asked:
        """Take keys out of a batch; one is left, because DynamoDB refuses an empty batch."""
        skipped: Asked = {}
        for table, wanted in asked["RequestItems"].items():
            keys = [key for place, key in enumerate(wanted["Keys"]) if place and is_due(place, self.skip_every)]
            if keys:
                wanted["Keys"] = [key for key in wanted["Keys"] if key not in keys]
                skipped[table] = wanted | {"Keys": keys}
                self.skipped += len(keys)
        return skipped

    async def _forward(self, request: web.Request, asked: Asked) -> tuple[int, bytes]:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name in KEPT}
        self._under_way += 1
        self.side_by_side = max(self.side_by_side, self._under_way)
        try:
            async with self._session.post(self._server_url, data=json.dumps(asked), headers=headers) as answer:
                return answer.status, await answer.read()
        finally:
            self._under_way -= 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator["DynamoDbFaults"]:
        runner = web.ServerRunner(web.Server(self.serve, handler_cancellation=True))
        async with aiohttp.ClientSession() as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            try:
                yield self
            finally:
                await runner.cleanup()


def dynamodb_faults(server_url: str) -> AbstractAsyncContextManager[DynamoDbFaults]:
    """A new proxy on a free port of this machine."""
    return DynamoDbFaults(server_url).running()


def is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def refused(status: int, code: str) -> web.Response:
    body = {"__type": f"{PREFIX}{code}", "message": "words of the service"}
    return web.json_response(body, status=status, content_type=TYPE)
