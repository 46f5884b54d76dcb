"""Resident memory of a consumer, sampled after every tenth of its changes: it must not grow with what has passed."""

import resource
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figure import Figure
from keywise.core.events import BatchClosed, Event, Settled

SAMPLES = 10
FLAT = 1.05
FILLING = 500_000


class MemorySamples:
    """An observer that samples the memory of its process."""

    def __init__(self, changes: int, counted: type[BatchClosed | Settled] = BatchClosed) -> None:
        self.mib: list[float] = []
        self._changes = changes
        self._counted = counted
        self._done = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, self._counted):
            self._done += event.changes
            while self._done * SAMPLES >= self._changes * (len(self.mib) + 1) and len(self.mib) < SAMPLES:
                self.mib.append(_resident_mib())


def memory_figures(name: str, samples: Sequence[float], changes: int) -> list[Figure]:
    """How much there was early and late, and whether it grew in the second half."""
    course = " ".join(f"{sample:.0f}" for sample in samples)
    # A short run does not fill the caches, so its memory still grows.
    target = FLAT if changes >= FILLING else None
    return [
        Figure(f"{name} after 10 % of the changes", samples[0], "MiB", f"{changes:,} changes"),
        Figure(f"{name} after all of them", samples[-1], "MiB", f"every 10 %: {course}"),
        Figure(
            f"{name}, at the end / half way",
            samples[-1] / samples[SAMPLES // 2 - 1],
            "",
            "caches are full by then",
            at_most=target,
        ),
    ]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
