"""Debian's faketime: a process of the tests sees a clock of its own."""

import subprocess
from pathlib import Path

from servers.postgres import MissingServerError, may_install

FOLDERS = "/usr/lib"
PACKAGE = ("apt-get", "install", "--yes", "--no-install-recommends", "faketime")


def shifted(ahead_s: int, *, boot_too: bool = False) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead; its boot clock may be quite another one, too."""
    # The first library on the list is asked first; with this it leaves clocks alone that only count.
    kept = {} if boot_too else {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(find_library()), "FAKETIME": f"{ahead_s:+d}s", **kept}


def find_library() -> Path:
    """Where it is; Debian's package is installed if that is allowed."""
    if (found := _installed()) is not None:
        return found
    if not may_install():
        raise MissingServerError(f"no faketime in {FOLDERS}; install the package faketime")
    done = subprocess.run(PACKAGE, capture_output=True, text=True, timeout=600, check=False)
    if (found := _installed()) is None:
        raise MissingServerError(f"the package faketime could not be installed: {done.stderr[-500:]}")
    return found


def _installed() -> Path | None:
    return next(Path(FOLDERS).glob("*/faketime/libfaketime.so.1"), None)
