"""Google's fake of Cloud Pub/Sub for tests, in memory: on a free port of this machine, stopped by its process id."""

import socket
import urllib.request
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
        self._control_port = machine.free_port()
        self._program = program
        self._process = ServerProcess(folder, self._answers)

    def start(self) -> None:
        self._process.start([str(self._program), "-port", str(self.port), "-control", str(self._control_port)])

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def advance(self, seconds: float) -> None:
        """Move its clock ahead, or back."""
        self._ask(f"advance?by={round(seconds * 1000)}ms")

    def unacked(self, topic: str) -> int:
        """How many messages of a topic nobody has acked; the topic has one subscription."""
        return int(self._ask(f"unacked?topic={topic}"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, control: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._control_port}/{control}") as answer:
            return str(answer.read(), "ascii")

    def _answers(self) -> bool:
        for port in (self.port, self._control_port):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    return False
        return True


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
