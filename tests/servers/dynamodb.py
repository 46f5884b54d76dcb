"""A real DynamoDB Local for tests, which is Amazon's own: on a free port of this machine, stopped by its process id.

It listens on all interfaces, and has no option for that: do not run it where others can reach the machine. It holds
only what a test puts there, in memory. It never throttles; `dynamodb_faults.py` does that in its place.
"""

import http.client
import json
import platform
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import jars, machine
from servers.machine import Report
from servers.process import START_S, ServerProcess

NAME = "dynamodb"
MAIN = "software.amazon.dynamodb.services.local.main.ServerRunner"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# It checks no signature, but there has to be one.
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=local/20260101/us-east-1/dynamodb/aws4_request, "
    "SignedHeaders=host, Signature=0",
    "Content-Type": "application/x-amz-json-1.0",
}


class DynamoDbServer:
    """One server; it can be stopped and started again on the same port, without the data."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.port = machine.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = ServerProcess(folder, self._answers)
        native = folder / "native"
        native.mkdir()
        for library in (home / "lib").glob(f"libsqlite4java-linux-{MACHINES[platform.machine()]}-*.so"):
            shutil.copyfile(library, native / library.name)
        options = ("-Xmx384m", *jars.QUICK, f"-Djava.library.path={native}", "-cp", f"{home}/lib/*", MAIN)
        own = ("-inMemory", "-sharedDb", "-port", str(self.port), "-disableTelemetry")
        self._java = jars.JvmServer(home, self._process, [*options, *own])

    def start(self) -> None:
        self._java.start()

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        """Start again after a crash, with no tables."""
        self.stop()
        self.start()

    def keep_classes(self) -> None:
        self._java.keep_classes()

    def ask(self, action: str, **request: Any) -> Any:
        """What the server answers to an action; raises AssertionError if it refuses."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            headers = SIGNED | {"X-Amz-Target": f"DynamoDB_20120810.{action}"}
            connection.request("POST", "/", json.dumps(request), headers)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status < 300, body.decode()
            return json.loads(body)
        finally:
            connection.close()

    def create_table(self, name: str, key: str = "id", kind: str = "S", sort: str = "") -> str:
        """Create a table as its owner does, and return its name."""
        keys = [(key, "HASH"), *([(sort, "RANGE")] if sort else [])]
        self.ask(
            "CreateTable",
            TableName=name,
            KeySchema=[{"AttributeName": one, "KeyType": role} for one, role in keys],
            AttributeDefinitions=[{"AttributeName": one, "AttributeType": kind} for one, _ in keys],
            BillingMode="PAY_PER_REQUEST",
        )
        return name

    def items(self, table: str) -> list[dict[str, Any]]:
        """All items of a table, as DynamoDB writes them."""
        found: list[dict[str, Any]] = []
        after: dict[str, Any] = {}
        while True:
            answer = self.ask("Scan", TableName=table, ConsistentRead=True, **after)
            found += answer["Items"]
            if "LastEvaluatedKey" not in answer:
                return found
            after = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answers(self) -> bool:
        try:
            return bool(self.ask("ListTables"))
        except (OSError, AssertionError, http.client.HTTPException):
            return False


@contextmanager
def dynamodb_server(scratch: str | None = machine.IN_MEMORY) -> Iterator[DynamoDbServer]:
    """A new server that ends with the context."""
    home = find_home()
    with machine.scratch_folder(NAME, scratch) as folder:
        server = DynamoDbServer(home, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_home() -> Path:
    """Where its jars are."""
    return jars.find(NAME)


def build(report: Report) -> None:
    home = jars.fetch(NAME, report, prepare=_remove_class_path)
    report("starts once, to keep its classes")
    with machine.scratch_folder(NAME) as folder:
        DynamoDbServer(home, folder).keep_classes()


def _remove_class_path(lib: Path) -> None:
    """Its jar names its own folder as a class path, and the JVM archives no classes beside a folder that has files."""
    [jar] = lib.glob("DynamoDBLocal-*.jar")
    changed = jar.with_suffix(".changed")
    with zipfile.ZipFile(jar) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename == "META-INF/MANIFEST.MF":
                # A long line goes on after a line break and a space.
                content = re.sub(rb"(?m)^Class-Path:.*\r?\n( .*\r?\n)*", b"", content)
            new.writestr(entry, content)
    changed.rename(jar)
