"""A real Redis for tests: in a scratch folder, on a free port of this machine, stopped by its process id."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import machine

PROGRAM = "redis-server"
START_S = 60
LOOK_S = 0.01


class RedisServer:
    """One server; it can be stopped and started again on the same data and the same port."""

    def __init__(self, program: str, folder: Path, settings: dict[str, str]) -> None:
        self.port = machine.free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._program = program
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: str) -> None:
        """Start it with its settings and perhaps others; a name may be written with `_` for `-`."""
        own = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self._folder), "save": ""}
        given = {**own, "appendonly": "yes", **self._settings, **settings}
        options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._program, *options], stdout=log, stderr=log, cwd=self._folder)
        self._wait()

    def stop(self) -> None:
        """At once, as a crash would: what is not in a file is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, **settings: str) -> None:
        self.stop()
        self.start(**settings)

    def lose(self) -> None:
        """Stop it, and take away all that it wrote to files."""
        self.stop()
        shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)

    def read_file(self) -> dict[Path, bytes]:
        """What it has written to files so far."""
        return {path: path.read_bytes() for path in (self._folder / "appendonlydir").iterdir()}

    def write_file(self, content: dict[Path, bytes]) -> None:
        """Set its files back, while it does not run."""
        for path, written in content.items():
            path.write_bytes(written)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def command(self, *words: str) -> str:
        """Ask it something, over a connection that is nobody else's."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=START_S) as connection:
            connection.sendall(_packed(words))
            return connection.recv(1 << 20).decode(errors="replace")

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process is not None
            try:
                self._process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
            self.stop()
            raise RuntimeError(f"{self._program} does not answer: {self.log[-2000:]}")

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(("+PONG", "-NOAUTH"))
        except OSError:
            return False


@contextmanager
def redis_server(scratch: str | None = machine.IN_MEMORY, **settings: str) -> Iterator[RedisServer]:
    """A new server that ends with the context; it writes every change to a file, unless told otherwise."""
    program = find_program()
    folder = Path(tempfile.mkdtemp(prefix="keywise-redis-", dir=scratch))
    server = RedisServer(program, folder, settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def find_program() -> str:
    """Where the server is."""
    return machine.installed(PROGRAM, lambda: shutil.which(PROGRAM))


def _packed(words: tuple[str, ...]) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        code = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(code), code))
    return b"".join(parts)
