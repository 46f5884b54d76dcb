"""A store that has neither versions nor transactions, and allows about one update per second and document.

It takes whatever comes last, and answers 429 to what comes too soon. Run as a process, it prints its port.
"""

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any

from aiohttp import web

PACE_S = 1.0


class Store:
    """Documents, and when each was updated last."""

    def __init__(self) -> None:
        self._documents: dict[str, dict[str, Any]] = {}
        self._updated_at: dict[str, float] = {}
        self._updates = self._refusals = 0

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_put("/documents/{key}", self.put)
        application.router.add_delete("/documents/{key}", self.delete)
        application.router.add_get("/documents", self.show_content)
        return application

    async def put(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._pace(request.match_info["key"])
        self._documents[request.match_info["key"]] = body
        return web.Response(status=204)

    async def delete(self, request: web.Request) -> web.Response:
        self._pace(request.match_info["key"])
        found = self._documents.pop(request.match_info["key"], None)
        if found is None:
            return web.Response(status=404, text="no such document")
        return web.Response(status=204)

    async def show_content(self, request: web.Request) -> web.Response:
        versions = {key: body["payload_version"] for key, body in self._documents.items()}
        return web.json_response({"versions": versions, "updates": self._updates, "refusals": self._refusals})

    def _pace(self, key: str) -> None:
        now = time.monotonic()
        left_s = self._updated_at.get(key, -PACE_S) + PACE_S - now
        if left_s > 0:
            self._refusals += 1
            raise web.HTTPTooManyRequests(headers={"Retry-After": "1"})
        self._updated_at[key] = now
        self._updates += 1


async def main() -> None:
    runner = web.AppRunner(Store().application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(json.dumps(runner.addresses[0][1]) + "\n")
    sys.stdout.flush()
    # It ends with whoever started it.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    # A Ctrl-C is meant for all; whoever started this one ends it.
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
