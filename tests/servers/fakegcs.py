"""A fake of Google Cloud Storage for tests, in memory: on a free port of this machine, stopped by its process id."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

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

    def create_bucket(self, bucket: str, *, is_versioned: bool = False) -> None:
        self._post_json("b", {"name": bucket, "versioning": {"enabled": is_versioned}})

    def notify(self, bucket: str, topic: str) -> None:
        """Publish every event of a bucket to a topic, which has to exist: `projects/PROJECT/topics/TOPIC`."""
        self._post_json(f"b/{bucket}/notificationConfigs", {"topic": topic, "payload_format": "JSON_API_V1"})

    def put(self, bucket: str, name: str, content: bytes) -> int:
        """Write an object, and return its generation."""
        path = f"upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        return int(json.loads(self._ask("POST", path, content, "application/octet-stream"))["generation"])

    def change_metadata(self, bucket: str, name: str, **metadata: str) -> None:
        path = f"storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        self._ask("PATCH", path, json.dumps({"metadata": metadata}).encode(), "application/json")

    def delete(self, bucket: str, name: str) -> None:
        self._ask("DELETE", f"storage/v1/b/{bucket}/o/{quote(name, safe='')}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _post_json(self, path: str, document: dict[str, Any]) -> None:
        self._ask("POST", f"storage/v1/{path}", json.dumps(document).encode(), "application/json")

    def _ask(self, method: str, path: str, body: bytes | None = None, content_type: str = "") -> bytes:
        headers = {"Content-Type": content_type} if content_type else {}
        request = urllib.request.Request(f"{self.url}/{path}", body, headers, method=method)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return bytes(answer.read())

    def _answers(self) -> bool:
        try:
            return bool(self._ask("GET", "storage/v1/b?project=any"))
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
