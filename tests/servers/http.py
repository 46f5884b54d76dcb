"""A real HTTP service for tests: a process with a plain and an encrypted port of this machine, stopped by its id."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from running import scaled
from servers import machine

PROGRAM = Path(__file__).with_name("http_service.py")
LIMIT_S = 30
_numbers = itertools.count(1)


class HttpService:
    """One service; tests have spaces of their own in it."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "certificate.pem"
        self._key = folder / "key.pem"
        self._process: subprocess.Popen[str] | None = None
        self.port = self.tls_port = 0

    def start(self) -> None:
        make_certificate(self.ca, self._key)
        # Isolated from this folder, whose files are named like modules that it needs.
        command = [sys.executable, "-P", str(PROGRAM), str(self.ca), str(self._key)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port, self.tls_port = json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def space(self, **rules: object) -> "Space":
        """Documents that nobody else uses."""
        return Space(self, f"space{os.getpid()}-{next(_numbers)}", rules)


class Space:
    """One space of a service, as its owner sees it."""

    def __init__(self, service: HttpService, name: str, rules: dict[str, object]) -> None:
        self.service = service
        self.path = f"/{name}/documents/{{key}}"
        self.url = f"http://127.0.0.1:{service.port}{self.path}"
        self.tls_url = f"https://127.0.0.1:{service.tls_port}{self.path}"
        self._name = name
        self.rule(**rules)

    def rule(self, **rules: object) -> None:
        """From now on it behaves so."""
        self._ask("PUT", f"/-/rules/{self._name}", json.dumps(rules).encode())

    @property
    def documents(self) -> dict[str, str]:
        """The body of each document that it shows."""
        return {key: document["body"] for key, document in self._state()["documents"].items()}

    @property
    def versions(self) -> dict[str, int]:
        return {key: document["order"][1] for key, document in self._state()["documents"].items()}

    @property
    def log(self) -> list[dict[str, Any]]:
        """All requests that came in, with the status that each was told."""
        log: list[dict[str, Any]] = self._state()["log"]
        return log

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._ask("GET", f"/-/state/{self._name}", b""))
        return state

    def _ask(self, method: str, target: str, body: bytes) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.service.port, timeout=scaled(LIMIT_S))
        try:
            connection.request(method, target, body)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def http_service() -> Iterator[HttpService]:
    """A new service that ends with the context."""
    find_openssl()
    folder = Path(tempfile.mkdtemp(prefix="keywise-http-", dir=machine.IN_MEMORY))
    service = HttpService(folder)
    try:
        service.start()
        yield service
    finally:
        service.stop()
        shutil.rmtree(folder, ignore_errors=True)


def make_certificate(certificate: Path, key: Path) -> None:
    """One that vouches for itself, for this machine's own address and two days."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    name = ("-subj", "/CN=keywise tests", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    command = (find_openssl(), "req", "-x509", *curve, *name, *files)
    subprocess.run(command, check=True, capture_output=True, timeout=scaled(LIMIT_S))


def find_openssl() -> str:
    """The program that makes certificates; Python brings the rest."""
    return machine.installed("openssl", lambda: shutil.which("openssl"))
