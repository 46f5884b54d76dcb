"""A proxy in front of SeaweedFS that counts what is read of each object, and can hold back or refuse answers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

BLOCK_BYTES = 64 * 1024


class CountingStore:
    """Passes requests for objects on, and knows how many bytes of each were asked for.

    A client that ends a stream early has received less than was asked for, so each get counts the bytes that were sent.
    """

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.server_port = server_port
        self.gets: list[tuple[str, int]] = []
        """The path and the first byte of each get of an object."""
        self.sent: dict[str, int] = {}
        """Bytes that were sent of each object."""

    def starts_of(self, path: str) -> list[int]:
        return [start for one, start in self.gets if one == path]


def _handler_of(store: CountingStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
            is_object = path.count("/") > 1 and "list-type" not in self.path
            if is_object:
                store.gets.append((path, int(start)))
            connection = HTTPConnection("127.0.0.1", store.server_port, timeout=60)
            try:
                connection.request("GET", self.path, headers=dict(self.headers.items()))
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding"):
                        self.send_header(name, value)
                content = answer.read() if answer.headers.get("Content-Length") is None else None
                if content is not None:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if content is not None:
                    self.wfile.write(content)
                while content is None and (block := answer.read(BLOCK_BYTES)):
                    self.wfile.write(block)
                    if is_object:
                        store.sent[path] = store.sent.get(path, 0) + len(block)
            except OSError:
                self.close_connection = True  # The client has gone.
            finally:
                connection.close()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


@contextmanager
def counting_store(server_port: int) -> Iterator[CountingStore]:
    """A new proxy in threads of its own, on a free port of this machine."""
    store = CountingStore(server_port)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(store))
    server.daemon_threads = True
    store.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
