"""Google's fake of Cloud Pub/Sub for tests, in memory: on a free port of this machine, stopped by its process id."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import gobuilds, machine
from servers.machine import Report
from servers.process import ServerProcess

PROGRAM = "pstest"


class PubSubServer:
    """One server; it can be stopped and started again on the same port, and has forgotten everything then."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.port = machine.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._program = program
        self._process = ServerProcess(folder, self._answers)

    def start(self) -> None:
        self._process.start([str(self._program), "-port", str(self.port)])

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def pubsub_server() -> Iterator[PubSubServer]:
    """A new server that ends with the context."""
    program = find_program()
    with machine.scratch_folder("pubsub") as folder:
        server = PubSubServer(program, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_program() -> Path:
    """Where it is."""
    return gobuilds.find(PROGRAM)


def build(report: Report) -> None:
    gobuilds.build(PROGRAM, report)
