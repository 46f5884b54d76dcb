"""A proxy in front of a real server: it passes everything on, and loses or replaces some of the answers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class FaultProxy:
    """The server carries out every request; a fault only changes what the client gets to see of it."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self._server_port = server_port
        self._faults: list[tuple[bytes, bytes]] = []
        self._holds: list[bytes] = []
        self._held = bytearray()
        self._connections: set[asyncio.Task[None]] = set()
        self._silent: set[asyncio.Task[None]] = set()
        self._is_silent = asyncio.Event()
        """Set for the connections that nothing passes over any more; new ones get an event of their own."""

    @property
    def pending(self) -> int:
        """How many faults have not happened yet."""
        return len(self._faults)

    def lose_answer(self, words: bytes) -> None:
        """Cut the connection in place of the answer to the next request that holds these words."""
        self._faults.append((words, b""))

    def answer(self, words: bytes, status: int, body: bytes) -> None:
        """Answer the next HTTP request that holds these words in the server's place, and close the connection."""
        head = f"HTTP/1.1 {status} Fault\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._faults.append((words, head.encode() + body))

    def hold(self, words: bytes) -> None:
        """Keep the next HTTP request that holds these words from the server; the client gets no answer."""
        self._holds.append(words)

    async def deliver(self) -> bytes:
        """Send the request that was held to the server, perhaps again, and return the head of the answer."""
        assert self._held, "no request was held"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        writer.write(self._held)
        try:
            return await reader.readuntil(b"\r\n\r\n")
        finally:
            writer.close()

    def silence(self) -> None:
        """Let nothing pass over the connections that are open now, and keep them open; new ones work."""
        self._silent |= self._connections
        self._is_silent.set()
        self._is_silent = asyncio.Event()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client in a task that `close` waits for."""
        self._connections.add(asyncio.create_task(self._serve(reader, writer)))

    async def close(self) -> None:
        """Wait until all clients have gone; the server does not hear of those that are silent."""
        for connection in self._silent:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        request = bytearray()
        is_silent = self._is_silent

        async def forward() -> None:
            is_held = False
            while some := await reader.read(65536):
                request.extend(some)
                # The rest of a request may come later than its head.
                is_held = is_held or self._is_held(request)
                if is_held:
                    self._held[:] = request
                elif not is_silent.is_set():
                    server_writer.write(some)
            if not is_silent.is_set():
                server_writer.close()

        forwarding = asyncio.create_task(forward())
        try:
            while some := await server_reader.read(65536):
                if is_silent.is_set():
                    continue
                if (own := self._take(request)) is not None:
                    writer.write(own)
                    return
                # The next request on this connection is judged by its own words.
                request.clear()
                writer.write(some)
        finally:
            forwarding.cancel()
            await asyncio.wait([forwarding])
            writer.close()
            server_writer.close()

    def _is_held(self, request: bytes | bytearray) -> bool:
        for words in self._holds:
            if words in request:
                self._holds.remove(words)
                return True
        return False

    def _take(self, request: bytes | bytearray) -> bytes | None:
        """What the client gets in place of the server's answer; None if the answer goes through."""
        for number, (words, own) in enumerate(self._faults):
            if words in request:
                del self._faults[number]
                return own
        return None


@contextmanager
def fault_proxy_thread(server_port: int) -> Iterator[FaultProxy]:
    """A new proxy in a thread of its own: it goes on while the test, or a thread of the worker, is waited for."""
    ready, done = threading.Event(), asyncio.Event()
    proxies: list[FaultProxy] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with fault_proxy(server_port) as proxy:
            proxies.append(proxy)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield proxies[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@asynccontextmanager
async def fault_proxy(server_port: int) -> AsyncIterator[FaultProxy]:
    """A new proxy on a free port of this machine."""
    proxy = FaultProxy(server_port)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
