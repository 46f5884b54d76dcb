"""A server that answers like S3 and generates one object of any size: JSON lines, the same for each range."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.object_workload import LARGE_RECORD_BYTES, record

NAME = "generated.ndjson"
ETAG = '"generated"'
BLOCK = record(0, LARGE_RECORD_BYTES) * 5_000
"""All records are the same, so that the server needs no time to make them."""


class GeneratedObject(BaseHTTPRequestHandler):
    """Answers gets of one object, from any byte on."""

    protocol_version = "HTTP/1.1"
    size = 0

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        end = min(int(asked[2]) + 1, self.size) if asked and asked[2] else self.size
        self.send_response(206 if asked else 200)
        self.send_header("ETag", ETAG)
        self.send_header("Last-Modified", "Wed, 18 Nov 2026 12:00:00 GMT")
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{self.size}")
        self.end_headers()
        try:
            while start < end:
                place = start % len(BLOCK)
                start += self.wfile.write(BLOCK[place : place + end - start])
        except ConnectionError:
            # The reader has gone.
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def generated_object(size: int) -> Iterator[str]:
    """The URL of a server whose object has so many bytes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SizedObject", (GeneratedObject,), {"size": size}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
