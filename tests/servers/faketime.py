"""Debian's faketime: a process of the tests sees a clock of its own."""

from pathlib import Path

from servers import machine

FOLDERS = "/usr/lib"


def shifted(ahead_s: int, *, boot_too: bool = False) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead; its boot clock may be quite another one, too."""
    # The first library on the list is asked first; with this it leaves clocks alone that only count.
    kept = {} if boot_too else {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(find_library()), "FAKETIME": f"{ahead_s:+d}s", **kept}


def find_library() -> Path:
    """Where it is."""
    return machine.installed("faketime", _installed)


def _installed() -> Path | None:
    return next(Path(FOLDERS).glob("*/faketime/libfaketime.so.1"), None)
