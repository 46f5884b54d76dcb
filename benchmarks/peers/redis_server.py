"""A Redis for the benchmarks: Debian's package with its own defaults, in a scratch folder, on a free port."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_S = 10


class RedisServer:
    """One server."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    def empty(self) -> None:
        command(self.port, "FLUSHALL")


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A new server that ends with the context."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("there is no redis-server; install the package redis-server")
    folder, port = tempfile.mkdtemp(prefix="keywise-redis-"), _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while "PONG" not in command(port, "PING"):
            if time.monotonic() > deadline:
                raise RuntimeError("redis-server does not answer")
        yield RedisServer(process.pid, port)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def command(port: int, word: str) -> str:
    """Send one word, and return the first line of the answer; nothing if nobody is there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=START_S) as connection:
            connection.sendall(f"{word}\r\n".encode())
            return connection.recv(1000).decode()
    except ConnectionRefusedError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
