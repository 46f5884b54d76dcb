"""A real OpenSearch for tests: in a scratch folder, on a free port of this machine, stopped by its process id."""

import fcntl
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import machine

VERSION = "2.19.3"
ARTIFACT = f"org.opensearch.distribution.integ-test-zip:opensearch:{VERSION}:zip"
USER = "nobody"
CACHE = Path("/var/cache/keywise") if os.getuid() == 0 else Path.home() / ".cache" / "keywise"
"""It outlives the tests. What root has must be readable for the user that the engine runs as."""
START_S = 110
LOOK_S = 0.05
HEAP = ("-Xms512m", "-Xmx512m")
QUICK = (*HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xlog:disable")
"""A quick start, for tests; what takes longer than a few seconds is slower with it."""
CLASSES = "classes.jsa"
"""Beside the engine: its classes as the JVM keeps them, which halves the time of a start."""
TIGHT = {"http.max_content_length": "1mb", "thread_pool.write.queue_size": "10"}
"""Settings under which requests that are large, or many at once, are refused."""


class OpenSearchServer:
    """One node; it can be stopped and started again on the same data and the same port."""

    def __init__(self, home: Path, folder: Path, settings: Mapping[str, str], jvm: Sequence[str]) -> None:
        self.port = machine.free_port()
        self.url = f"opensearch://127.0.0.1:{self.port}"
        self._home = home
        self._folder = folder
        self._settings = settings
        self._jvm = jvm
        self._process: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        """Folders and settings of its own."""
        for name in ("config", "data", "logs", "tmp"):
            (self._folder / name).mkdir()
        (self._folder / "config" / "opensearch.yml").touch()
        (self._folder / "config" / "log4j2.properties").write_text(LOGGING)

    def start(self) -> None:
        own = {
            "discovery.type": "single-node",
            "http.port": str(self.port),
            "transport.port": str(machine.free_port()),
            "network.host": "127.0.0.1",
            "path.data": str(self._folder / "data"),
            "path.logs": str(self._folder / "logs"),
            "cluster.routing.allocation.disk.threshold_enabled": "false",
        }
        settings = [f"-E{name}={value}" for name, value in {**own, **self._settings}.items()]
        paths = {"home": self._home, "conf": self._folder / "config"}
        command = [
            *_as_user(),
            shutil.which("java") or "java",
            *self._jvm,
            f"-Djava.io.tmpdir={self._folder / 'tmp'}",
            "-Dlog4j2.disable.jmx=true",
            *(f"-Dopensearch.path.{name}={path}" for name, path in paths.items()),
            *("-cp", f"{self._home}/lib/*", "org.opensearch.bootstrap.OpenSearch"),
            *settings,
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        self._wait()

    def stop(self, *, gently: bool = False) -> None:
        """At once, as a crash would, or as an administrator does it."""
        if self._process is not None:
            self._process.terminate() if gently else self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

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
        return (self._folder / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

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
            raise RuntimeError(f"OpenSearch does not answer: {self.log[-2000:]}")

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
    with _scratch(scratch) as folder:
        server = OpenSearchServer(home, folder, settings, [*jvm, f"-XX:SharedArchiveFile={home / CLASSES}"])
        try:
            _prepare(server, folder)
            server.start()
            yield server
        finally:
            server.stop()


@contextmanager
def _scratch(parent: str | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="keywise-opensearch-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(server: OpenSearchServer, folder: Path) -> None:
    server.create()
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, USER)


def find_home() -> Path:
    """Where the engine is; it is fetched if it is not there yet."""
    machine.installed("default-jre-headless", lambda: shutil.which("java"))
    home = CACHE / f"opensearch-{VERSION}"
    if (home / CLASSES).exists():
        return home
    machine.installed("maven", lambda: shutil.which("mvn"))
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "opensearch.lock").open("w") as lock:
        # Of several processes that begin at once, one fetches it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.is_dir():
            _fetch(home)
        if not (home / CLASSES).exists():
            _keep_classes(home)
    return home


def _fetch(home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = ("mvn", "--quiet", "--batch-mode", "dependency:copy", f"-Dartifact={ARTIFACT}")
        done = subprocess.run(
            [*command, f"-DoutputDirectory={scratch}"],
            capture_output=True,
            text=True,
            timeout=machine.INSTALL_S,
            check=False,
            cwd=scratch,
        )
        archives = list(Path(scratch).glob("*.zip"))
        if not archives:
            raise machine.MissingServerError(f"{ARTIFACT} could not be fetched: {done.stdout[-500:]}")
        with zipfile.ZipFile(archives[0]) as archive:
            archive.extractall(scratch)
        [unpacked] = [path for path in Path(scratch).iterdir() if path.is_dir()]
        for path in (unpacked, *unpacked.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        unpacked.rename(home)


def _keep_classes(home: Path) -> None:
    """Let a first run write down its classes when it ends. A JVM that has no use for the file leaves it alone."""
    with _scratch(None) as folder:
        server = OpenSearchServer(home, folder, {}, [*QUICK, f"-XX:ArchiveClassesAtExit={folder / CLASSES}"])
        _prepare(server, folder)
        server.start()
        server.stop(gently=True)
        kept = folder / CLASSES
        kept.touch()
        shutil.copyfile(kept, home / f"{CLASSES}.part")
        (home / f"{CLASSES}.part").rename(home / CLASSES)


def _as_user() -> list[str]:
    """OpenSearch refuses to run as root."""
    if os.getuid() != 0:
        return []
    return ["setpriv", f"--reuid={USER}", "--clear-groups", "--"]
