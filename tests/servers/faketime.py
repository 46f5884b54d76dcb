"""Debian's faketime: a process of the tests sees a clock of its own."""

from pathlib import Path

from servers import machine

FOLDERS = "/usr/lib"


def shifted(ahead_s: int, *, boot_too: bool = False) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead; its boot clock may be quite another one, too."""
    # The first library on the list is asked first; with this it leaves clocks alone that only count.
    kept = {} if boot_too else {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(find_library()), "FAKETIME": f"{ahead_s:+d}s", **kept}


class MovableClock:
    """The wall clock of a process, which a test moves ahead while the process runs."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ahead"
        self._ahead_s = 0.0
        self.advance(0.0)

    @property
    def environment(self) -> dict[str, str]:
        """Of the process; its clocks that only count are left alone."""
        return {
            "LD_PRELOAD": str(find_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # The process looks at the clock thousands of times a second, and reads the file once in a second.
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def advance(self, seconds: float) -> None:
        """The process sees it about a second later."""
        self._ahead_s += seconds
        # In one step: the process may read the file at any moment.
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"+{self._ahead_s:.3f}s\n")
        fresh.replace(self._file)


def find_library() -> Path:
    """Where it is."""
    return machine.installed("faketime", _installed)


def _installed() -> Path | None:
    return next(Path(FOLDERS).glob("*/faketime/libfaketime.so.1"), None)
