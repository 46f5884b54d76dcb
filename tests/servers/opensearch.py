"""A real OpenSearch for tests: in a scratch folder, on a free port of this machine, stopped by its process id."""

import http.client
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import jars, machine
from servers.machine import Report
from servers.process import START_S, ServerProcess

NAME = "opensearch"
USER = "nobody"
HEAP = ("-Xms512m", "-Xmx512m")
QUICK = (*HEAP, *jars.QUICK)
TIGHT = {"http.max_content_length": "1mb", "thread_pool.write.queue_size": "10"}
"""Settings under which requests that are large, or many at once, are refused."""


class OpenSearchServer:
    """One node; it can be stopped and started again on the same data and the same port."""

    def __init__(self, home: Path, folder: Path, settings: Mapping[str, str], jvm: Sequence[str] = QUICK) -> None:
        self.port = machine.free_port()
        self.url = f"opensearch://127.0.0.1:{self.port}"
        self._folder = folder
        self._settings = settings
        self._process = ServerProcess(folder, self._answers)
        self._java = jars.JvmServer(home, self._process, [*jvm, *self._program(home)], _as_user())

    def create(self) -> None:
        """Make its folders and settings."""
        for name in ("config", "data", "logs", "tmp"):
            (self._folder / name).mkdir()
        (self._folder / "config" / "opensearch.yml").touch()
        (self._folder / "config" / "log4j2.properties").write_text(LOGGING)
        if os.getuid() == 0:
            for path in (self._folder, *self._folder.rglob("*")):
                shutil.chown(path, USER)

    def start(self) -> None:
        self._java.start()

    def stop(self) -> None:
        """At once, as a crash would."""
        self._process.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def keep_classes(self) -> None:
        self._java.keep_classes()

    def index(self, name: str, mappings: dict[str, str] | None = None, **settings: object) -> str:
        """The URL of a new index with one part and no copies; `mappings` has the types of fields."""
        own = {"number_of_shards": 1, "number_of_replicas": 0, "refresh_interval": "-1"}
        types = {field: {"type": kind} for field, kind in (mappings or {}).items()}
        self.ask("PUT", f"/{name}", {"settings": own | settings, "mappings": {"properties": types}})
        return f"{self.url}/{name}"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask it something, over a connection that is nobody else's; what it answers has to be well."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, HEADERS)
            answer = connection.getresponse()
            told = json.loads(answer.read() or b"null")
            assert answer.status < 300, told
            return told
        finally:
            connection.close()

    def documents(self, index: str) -> dict[str, dict[str, Any]]:
        """What searches can see, by key."""
        self.ask("POST", f"/{index}/_refresh")
        hits = self.ask("POST", f"/{index}/_search", {"size": 10_000, "version": True})["hits"]["hits"]
        return {hit["_id"]: hit["_source"] for hit in hits}

    @property
    def log(self) -> str:
        return self._process.log

    @property
    def pid(self) -> int:
        return self._process.pid

    def _program(self, home: Path) -> list[str]:
        """All that follows `java` and its options for memory and speed."""
        [engine] = (home / "lib").iterdir()
        own = {
            "discovery.type": "single-node",
            "http.port": str(self.port),
            "transport.port": str(machine.free_port()),
            "network.host": "127.0.0.1",
            "path.data": str(self._folder / "data"),
            "path.logs": str(self._folder / "logs"),
            "cluster.routing.allocation.disk.threshold_enabled": "false",
        }
        paths = {"home": engine, "conf": self._folder / "config"}
        return [
            f"-Djava.io.tmpdir={self._folder / 'tmp'}",
            "-Dlog4j2.disable.jmx=true",
            *(f"-Dopensearch.path.{name}={path}" for name, path in paths.items()),
            *("-cp", f"{engine}/lib/*", "org.opensearch.bootstrap.OpenSearch"),
            *(f"-E{name}={value}" for name, value in {**own, **self._settings}.items()),
        ]

    def _answers(self) -> bool:
        """Whether it has come so far that indexes can be written, those from before a restart too."""
        try:
            return bool(self.ask("GET", "/_cluster/health")["status"] != "red")
        except (OSError, AssertionError, http.client.HTTPException):
            return False


HEADERS = {"Content-Type": "application/json"}
LOGGING = """
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


@contextmanager
def opensearch_server(
    scratch: str | None = machine.IN_MEMORY, *, jvm: Sequence[str] = QUICK, **settings: str
) -> Iterator[OpenSearchServer]:
    """A new node that ends with the context."""
    home = find_home()
    with machine.scratch_folder(NAME, scratch) as folder:
        server = OpenSearchServer(home, folder, settings, jvm)
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_home() -> Path:
    """Where the engine is."""
    return jars.find(NAME)


def build(report: Report) -> None:
    home = jars.fetch(NAME, report, goal="unpack-dependencies")
    for path in home.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    report("starts once, to keep its classes")
    with machine.scratch_folder(NAME) as folder:
        server = OpenSearchServer(home, folder, {})
        server.create()
        server.keep_classes()


def _as_user() -> list[str]:
    """OpenSearch refuses to run as root."""
    if os.getuid() != 0:
        return []
    return ["setpriv", f"--reuid={USER}", "--clear-groups", "--"]
