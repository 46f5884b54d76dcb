"""Stands between a client and a server, and loses the answer to one request: the server has done what it was asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LossyRelay:
    """Passes everything on, but for the first answer to a request that holds certain words."""

    def __init__(self, server_port: int, words: bytes) -> None:
        self.port = 0
        self.lost = 0
        self._server_port = server_port
        self._words = words
        self._open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A task of our own, which is waited for in the end."""
        self._open.add(asyncio.create_task(self.serve(reader, writer)))

    async def ended(self) -> None:
        """Once all clients have gone."""
        await asyncio.gather(*self._open, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        asked = bytearray()

        async def ask() -> None:
            while some := await reader.read(65536):
                asked.extend(some)
                far_writer.write(some)
            far_writer.close()

        asking = asyncio.create_task(ask())
        try:
            while some := await far_reader.read(65536):
                if not self.lost and self._words in asked:
                    self.lost += 1
                    return
                writer.write(some)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            writer.close()
            far_writer.close()


@asynccontextmanager
async def lossy_relay(server_port: int, words: bytes) -> AsyncIterator[LossyRelay]:
    relay = LossyRelay(server_port, words)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.ended()
