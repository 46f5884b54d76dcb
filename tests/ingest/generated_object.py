"""A server that speaks enough of Amazon S3 to serve one large object, which it makes while it is read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LINES_AT_ONCE = 500


class GeneratedObject:
    """So many lines of JSON of the same length."""

    def __init__(self, records: int, record_bytes: int) -> None:
        filler = "x" * (record_bytes - len('{"x": ""}\n'))
        self.line = f'{{"x": "{filler}"}}\n'.encode()
        self.records = records
        self.size = records * len(self.line)
        self.url = ""

    def content(self, start: int) -> Iterator[bytes]:
        block, left = self.line * LINES_AT_ONCE, self.size - start
        within = start % len(self.line)
        while left > 0:
            chunk = block[within : within + left]
            yield chunk
            left, within = left - len(chunk), 0


def _handler_of(generated: GeneratedObject) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(generated.size - start))
            self.send_header("ETag", '"generated"')
            self.send_header("Last-Modified", "Wed, 18 Nov 2026 00:00:00 GMT")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{generated.size - 1}/{generated.size}")
            self.end_headers()
            try:
                for chunk in generated.content(start):
                    self.wfile.write(chunk)
            except OSError:
                self.close_connection = True  # The client has gone.

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


@contextmanager
def generated_object(records: int, record_bytes: int) -> Iterator[GeneratedObject]:
    """The object `o` of a bucket on a free port of this machine; any other name names the same object."""
    generated = GeneratedObject(records, record_bytes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(generated))
    server.daemon_threads = True
    generated.url = f"s3://generated?endpoint=http://127.0.0.1:{server.server_address[1]}&anonymous=true"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield generated
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
