"""A real PostgreSQL for tests: in a scratch folder, on a free port of this machine, stopped by its process id."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from running import scaled
from servers import machine

FOLDERS = "/usr/lib/postgresql"
USER = "postgres"
START_S = 60


class PostgresServer:
    """One server; it can be stopped and started again on the same data and the same port."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.port = machine.free_port()
        self.url = f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"
        self._binaries = binaries
        self._data = folder / "data"
        self._log = folder / "log"

    def create(self, **more: str) -> None:
        # Only this machine can reach the port, and only while the tests run: there is no password to be told.
        self._run("initdb", "--username", USER, "--auth", "trust", "--encoding", "UTF8", "-D", str(self._data))
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\n")
            settings.writelines(f"{name} = '{more[name]}'\n" for name in more)

    def start(self) -> None:
        self._run("pg_ctl", "start", "--wait", "-t", str(START_S), "-D", str(self._data), "-l", str(self._log))

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "stop", "--wait", "-m", mode, "-D", str(self._data))

    def restart(self) -> None:
        """As an administrator does it: every connection is cut."""
        self.stop("immediate")
        self.start()

    @property
    def has_started(self) -> bool:
        """Whether there is a server to stop."""
        return (self._data / "postmaster.pid").exists()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def create_database(self, name: str, **settings: str) -> str:
        """The URL of a new database."""
        created = [
            f"create database {name}",
            *(f"alter database {name} set {one} = '{settings[one]}'" for one in settings),
        ]
        self._run("psql", "--quiet", "--no-psqlrc", *(f"--command={statement}" for statement in created), self.url)
        return self.url.removesuffix("postgres") + name

    def _run(self, program: str, *arguments: str) -> None:
        command = [*as_user(), str(self._binaries / program), *arguments]
        # Whatever interrupts a test, pg_ctl must not be killed between its start of a server and the server's pid file.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/") as process:
            try:
                output, _ = process.communicate(timeout=scaled(2 * START_S))
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode != 0:
            log = self._log.read_text() if self._log.exists() else ""
            raise RuntimeError(f"{program} failed: {output}{log[-2000:]}")


@contextmanager
def postgres_server(scratch: str | None = machine.IN_MEMORY, **settings: str) -> Iterator[PostgresServer]:
    """A new server that ends with the context."""
    binaries = find_binaries()
    folder = Path(tempfile.mkdtemp(prefix="keywise-postgres-", dir=scratch))
    try:
        if os.getuid() == 0:
            shutil.chown(folder, USER)
        server = PostgresServer(binaries, folder)
        server.create(**settings)
        try:
            server.start()
            yield server
        finally:
            if server.has_started:
                server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path:
    """Where the newest server is."""
    return machine.installed("postgresql", _installed)


def _installed() -> Path | None:
    folders = [path for path in Path(FOLDERS).glob("*/bin") if (path / "initdb").exists()]
    return max(folders, key=lambda path: int(path.parent.name), default=None)


def as_user() -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return []
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "--"]
