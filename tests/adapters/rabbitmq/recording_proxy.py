"""Stands between a client and a RabbitMQ broker, passes everything on, and knows what the client has said."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pika.frame import decode_frame


class Listener:
    """A place to connect to instead of the broker."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self._server_port = server_port
        self._said: list[bytearray] = []
        """What each client said."""
        self._open: set[asyncio.Task[None]] = set()

    def said(self, kind: type) -> list[Any]:
        """The methods of a kind that the clients called, in their order; those of each client together."""
        methods = (getattr(frame, "method", None) for said in self._said for frame in _frames(bytes(said)))
        return [method for method in methods if isinstance(method, kind)]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(asyncio.create_task(self._serve(reader, writer)))

    async def ended(self) -> None:
        """Once all clients have gone."""
        await asyncio.gather(*self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = bytearray()
        self._said.append(said)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        await asyncio.gather(_passed(reader, far_writer, said), _passed(far_reader, writer, bytearray()))


@asynccontextmanager
async def listener(server_port: int) -> AsyncIterator[Listener]:
    one = Listener(server_port)
    server = await asyncio.start_server(one.accept, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        await one.ended()


async def _passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytearray) -> None:
    try:
        while some := await reader.read(65536):
            said.extend(some)
            writer.write(some)
    finally:
        writer.close()


def _frames(said: bytes) -> list[Any]:
    found, at = [], 0
    while at < len(said):
        size, frame = decode_frame(said[at:])
        if not size:
            break
        found.append(frame)
        at += size
    return found
