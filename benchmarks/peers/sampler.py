"""Where the CPU time of a worker goes: looks at what runs, once in two milliseconds of CPU time."""

import signal
from collections import Counter
from collections.abc import Mapping
from types import FrameType

from benchmarks.machine import ROOT

EVERY_S = 0.002
LOOP = "the event loop and sockets"
OURS = "/src/keywise/"
PARTS = {
    # The outermost function, which everything runs in.
    "benchmarks/peers/entrance.py": LOOP,
    "benchmarks/peers": "the handler and its client",
    "src/keywise/adapters/function": "calling the handler",
    "src/keywise/adapters": "ledger and queue: their statements",
    "src/keywise/flow/leased/executors.py": "calling the handler",
    "src/keywise/flow/heartbeat.py": "calling the handler",
    "src/keywise/flow/leased/dispatch.py": "calling the handler",
    "src/keywise": "lanes, decisions and events",
}


class Sampler:
    """Counts, for each look, the innermost part whose code is on the stack."""

    def __init__(self, parts: Mapping[str, str] = PARTS) -> None:
        """The beginnings of paths, the longer ones first, and the part that each belongs to."""
        self.looks: Counter[str] = Counter()
        self._parts = parts
        self._known: dict[str, str | None] = {}

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> dict[str, float]:
        """The share of each part, the largest first."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        total = max(1, self.looks.total())
        return {part: count / total for part, count in self.looks.most_common()}

    def _look(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._known:
                self._known[file] = part_of(file, self._parts)
            if (part := self._known[file]) is not None:
                self.looks[part] += 1
                return
            frame = frame.f_back
        self.looks[LOOP] += 1


def part_of(file: str, parts: Mapping[str, str]) -> str | None:
    """The part that a file of ours belongs to; None for files of others."""
    path = file.removeprefix(f"{ROOT}/")
    if OURS in path:
        # The source of another revision lies in a folder of its own.
        path = OURS.removeprefix("/") + path.rpartition(OURS)[2]
    return next((part for start, part in parts.items() if path.startswith(start)), None)
