"""What the servers of the tests need from this machine: packages, ports, scratch folders, a cache."""

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

Found = TypeVar("Found")
Report = Callable[[str], None]
"""Shows one line of progress to the user of `make servers`."""

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""What tests write need not outlive the machine, and a flush to a disk would be most of their time."""
CACHE = Path("/var/cache/keywise") if os.getuid() == 0 else Path.home() / ".cache" / "keywise"
"""Holds fetched and built servers between runs. A server that root starts as another user has to be able to read it."""
PROGRESS_S = 15
# Below the ports that the kernel hands out by itself, so that no client or other server of the tests takes them.
FIXED_PORTS = range(12_000, 22_000)


class MissingServerError(Exception):
    """The server is not on this machine; the message says why, and what to do."""


class MissingPackageError(MissingServerError):
    """Debian packages are not installed."""

    def __init__(self, *packages: str) -> None:
        super().__init__(f"not installed; run make servers as root, or install the package {', '.join(packages)}")
        self.packages = packages


def installed(package: str, look: Callable[[], Found | None]) -> Found:
    """Return what `look` finds. Installs nothing; raises MissingPackageError if there is nothing."""
    if (found := look()) is None:
        raise MissingPackageError(package)
    return found


def built(home: Path) -> Path:
    """Return what `make servers` has built. Builds nothing; raises MissingServerError if it is not there."""
    if not home.exists():
        raise MissingServerError("not built; run make servers")
    return home


def build_once(home: Path, build: Callable[[Path], None]) -> Path:
    """Let `build` fill the folder if it is not there; of several processes, one builds and the others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                # The scratch folder itself is closed to other users.
                folder = Path(scratch) / "home"
                folder.mkdir()
                build(folder)
                folder.rename(home)
    return home


def cache_of(name: str, *recipe: Path) -> Path:
    """Where a server is kept that was built by these files; a change in one of them is another folder."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in recipe)).hexdigest()
    return CACHE / f"{name}-{digest[:12]}"


def run(command: Sequence[str], report: Report, environment: Mapping[str, str] | None = None) -> None:
    """Run a step of a build at low priority, and report that it still runs; raises MissingServerError if it fails."""
    program = Path(command[0]).name
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["nice", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while _is_running(process):
                report(f"{program} still runs")
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            output.seek(0)
            raise MissingServerError(f"{program} ended with status {process.returncode}: {output.read()[-1000:]}")


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(PROGRESS_S)
    except subprocess.TimeoutExpired:
        return True
    return False


@contextmanager
def scratch_folder(server: str, parent: str | None = IN_MEMORY) -> Iterator[Path]:
    """A new folder that is deleted with all its content."""
    folder = Path(tempfile.mkdtemp(prefix=f"keywise-{server}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port(also: int = 0) -> int:
    """A free port for a server that starts within a minute, and again later; with `also`, one so far above it too."""
    while True:
        port = SystemRandom().choice(FIXED_PORTS)  # Hypothesis seeds `random` alike in all processes.
        if all(reserve(one) for one in {port, port + also}):
            return port


def reserve(port: int) -> bool:
    """Keep a free port for a minute, for a server that reuses its address, as all do; return whether it was free.

    A connection that its server closed first leaves the port in TIME_WAIT, so the next call for it returns False.
    """
    with socket.socket() as listener, socket.socket() as client:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen()
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.close()
        return True
