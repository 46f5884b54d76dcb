"""Where the CPU time of a worker goes: looks at what runs, once in two milliseconds of CPU time."""

import signal
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

from benchmarks.machine import ROOT

EVERY_S = 0.002
LOOP = "the event loop and sockets"
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

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self, path: Path) -> None:
        """Write down the share of each part."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        total = max(1, self.looks.total())
        shares = {part: count / total for part, count in self.looks.most_common()}
        path.write_bytes(msgspec.json.encode(shares))

    def _look(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if (part := part_of(frame.f_code.co_filename)) is not None:
                self.looks[part] += 1
                return
            frame = frame.f_back
        self.looks[LOOP] += 1


def part_of(file: str) -> str | None:
    """The part that a file of ours belongs to; None for files of others."""
    path = file.removeprefix(f"{ROOT}/")
    return next((part for start, part in PARTS.items() if path.startswith(start)), None)
