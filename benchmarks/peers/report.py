"""What a run found: every turn of every contender, and what is derived from them."""

import statistics
from collections.abc import Iterator

import msgspec

from benchmarks.figure import Figure
from benchmarks.machine import Machine
from benchmarks.peers.contenders import BATCH, ONE, Contender
from benchmarks.peers.race import Turn

TARGETS = {
    "Procrastinate": (100, 10),
    "DBOS": (100, 10),
    "PgQueuer": (20, 2),
    "Dramatiq": (20, 2),
    "lock and latest in Redis": (None, None),
}
"""How many times as fast keywise should be: with a table sink or a batch handler, and with the same handler."""


class Row(msgspec.Struct):
    """One contender and its turns."""

    contender: Contender
    turns: list[Turn]

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(turn, name) for turn in self.turns))

    def worst(self, name: str) -> int | None:
        """The highest count of any turn; None if there is none to count."""
        counts = [getattr(turn.verdict, name) for turn in self.turns]
        return None if None in counts else max(counts)


class Report(msgspec.Struct):
    """A whole run."""

    machine: Machine
    versions: dict[str, str]
    keys: int
    distribution: str
    rounds: int
    others: float
    """The share of all CPUs that other work used meanwhile, from 0 to 1."""
    load: str
    rows: list[Row]
    shares: dict[str, float] = {}
    """Where the CPU time of keywise with the one-change handler goes, in a turn of its own."""

    def speed(self, name: str) -> float | None:
        """Changes per second, the median of its turns."""
        return next((row.median("changes_per_s") for row in self.rows if row.contender.name == name), None)

    def cpu_s(self, name: str) -> float:
        """CPU seconds for 1,000 changes, those of the servers included."""
        row = next(row for row in self.rows if row.contender.name == name)
        return row.median("cpu_s_per_1000") + row.median("server_cpu_s_per_1000")

    def ratios(self) -> list[Figure]:
        """keywise against each peer that took part."""
        return [*self._ratios(BATCH, 0), *self._ratios(ONE, 1)]

    def _ratios(self, ours: tuple[str, ...], place: int) -> Iterator[Figure]:
        speeds = {name: speed for name in ours if (speed := self.speed(name)) is not None}
        if not speeds:
            return
        best = max(speeds, key=lambda name: speeds[name])
        for peer, targets in TARGETS.items():
            speed = self.speed(peer)
            if speed is not None:
                # In a small trial ours may be too little to be measured.
                saved = self.cpu_s(peer) / max(self.cpu_s(best), 1e-6)
                yield Figure(
                    f"{best} / {peer}",
                    speeds[best] / speed,
                    "",
                    f"{saved:,.1f}",
                    at_least=targets[place],
                )
