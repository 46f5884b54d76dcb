"""A gateway before a real server: it passes requests on, and at times answers in the server's place."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gateway:
    """The server does what it is asked each time; who asked may hear the gateway's own words instead."""

    def __init__(self, server_port: int, words: bytes) -> None:
        self.port = 0
        self.statuses: list[int] = []
        """What it answers by itself next, to requests that hold certain words."""
        self._server_port = server_port
        self._words = words
        self._open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A task of our own, which is waited for in the end."""
        self._open.add(asyncio.create_task(self.serve(reader, writer)))

    async def ended(self) -> None:
        """Once all clients have gone."""
        await asyncio.gather(*self._open)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await message(reader):
                told = await self._passed_on(request)
                is_own = self.statuses and self._words in request
                writer.write(page(self.statuses.pop(0)) if is_own else told)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _passed_on(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            writer.write(request)
            return await message(reader)
        finally:
            writer.close()


async def message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return head + await reader.readexactly(int(length[1]) if length else 0)


def page(status: int) -> bytes:
    body = b"<html>the gateway waits for the engine</html>"
    return b"HTTP/1.1 %d told\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@asynccontextmanager
async def gateway(server_port: int, words: bytes) -> AsyncIterator[Gateway]:
    relay = Gateway(server_port, words)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.ended()
