"""A fake of Google Cloud Storage for tests, in memory: on a free port of this machine, stopped by its process id."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import gobuilds, machine
from servers.machine import Report
from servers.process import START_S, ServerProcess

PROGRAM = "fakegcs"


class FakeGcsServer:
    """One server; it can be stopped and started again on the same port, and has forgotten everything then."""

    def __init__(self, program: Path, folder: Path, pubsub: str) -> None:
        self.port = machine.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._program = program
        self._process = ServerProcess(folder, self._answers, {"PUBSUB_EMULATOR_HOST": pubsub})

    def start(self) -> None:
        self._process.start([str(self._program), "-port", str(self.port)])

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def create_bucket(self, bucket: str) -> None:
        self._post("b", {"name": bucket})

    def notify(self, bucket: str, topic: str) -> None:
        """Publish every event of a bucket to a topic, which has to exist: `projects/PROJECT/topics/TOPIC`."""
        self._post(f"b/{bucket}/notificationConfigs", {"topic": topic, "payload_format": "JSON_API_V1"})

    @property
    def pid(self) -> int:
        return self._process.pid

    def _post(self, path: str, document: dict[str, str]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/storage/v1/{path}", json.dumps(document).encode(), headers)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            answer.read()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/storage/v1/b?project=any", timeout=START_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def fakegcs_server(pubsub: str) -> Iterator[FakeGcsServer]:
    """A new server that ends with the context, and publishes to the Pub/Sub at an address."""
    program = find_program()
    with machine.scratch_folder("fakegcs") as folder:
        server = FakeGcsServer(program, folder, pubsub)
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
