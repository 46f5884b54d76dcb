"""What the servers of the tests need from this machine: packages, ports, scratch folders."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""What tests write need not outlive the machine, and a flush to a disk would be most of their time."""
INSTALL_S = 600


class MissingServerError(Exception):
    """There is no such server here, and none can be had; the message says why."""


def installed(package: str, look: Callable[[], Found | None]) -> Found:
    """What `look` finds; Debian's package is installed if there is nothing yet and that is allowed."""
    if (found := look()) is not None:
        return found
    if not may_install():
        raise MissingServerError(f"not installed; install the package {package}")
    command = ("apt-get", "install", "--yes", "--no-install-recommends", package)
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if (found := look()) is None:
        raise MissingServerError(f"the package {package} could not be installed: {done.stderr[-500:]}")
    return found


def may_install() -> bool:
    return os.getuid() == 0 and shutil.which("apt-get") is not None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
