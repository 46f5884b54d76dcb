"""What a run found: every turn of every contender, and what is derived from them."""

import statistics
from collections.abc import Iterator, Mapping

import msgspec

from benchmarks.figure import Figure
from benchmarks.machine import Machine
from benchmarks.peers.contenders import BATCH, ONE, Contender
from benchmarks.peers.place import Handler
from benchmarks.peers.race import Turn

PEERS = ("Procrastinate", "DBOS", "PgQueuer", "Dramatiq", "lock and latest in Redis")
Targets = Mapping[str, float]
OF_BATCHES: Targets = {"Procrastinate": 100, "DBOS": 100, "PgQueuer": 20, "Dramatiq": 20}
"""How many times as fast keywise should be with a table sink or a batch handler as a peer with its upsert handler."""
OF_HANDLERS: dict[Handler, Targets] = {
    Handler.NOOP: {"Procrastinate": 20, "DBOS": 20, "PgQueuer": 1.2},
    Handler.UPSERT: {"Procrastinate": 10, "DBOS": 10, "PgQueuer": 1.2, "Dramatiq": 2},
}
"""How many times as fast keywise should be with the same handler."""


class Row(msgspec.Struct):
    """One contender with one handler and one number of keys, and its turns."""

    contender: Contender
    handler: Handler
    keys: int
    turns: list[Turn]

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(turn, name) for turn in self.turns))

    def worst(self, name: str) -> int | None:
        """The highest count of any turn; None if there is none to count."""
        counts = [getattr(turn.verdict, name) for turn in self.turns]
        return None if None in counts else max(counts)

    @property
    def speed(self) -> float:
        """Changes per second."""
        return self.median("changes_per_s")

    @property
    def cpu_s(self) -> float:
        """CPU seconds for 1,000 changes, those of the servers included."""
        return self.median("cpu_s_per_1000") + self.median("server_cpu_s_per_1000")

    @property
    def calls(self) -> int | None:
        """How often its handler was called; None if it has none."""
        calls = [turn.verdict.calls for turn in self.turns if turn.verdict.calls is not None]
        return round(statistics.median(calls)) if calls else None


class Group(msgspec.Struct):
    """The rows that are compared: they have the same handler and the same number of keys."""

    handler: Handler
    keys: int
    rows: list[Row]

    @property
    def name(self) -> str:
        return f"{self.handler} handler, {self.keys:,} keys"

    def ratios(self) -> list[Figure]:
        """keywise beside each peer that took part."""
        of_batches = self._ratios(BATCH, OF_BATCHES)
        return [*of_batches, *self._ratios(ONE, OF_HANDLERS[self.handler])]

    def _ratios(self, names: tuple[str, ...], targets: Targets) -> Iterator[Figure]:
        ours = [row for row in self.rows if row.contender.name in names]
        if not ours:
            return
        best = max(ours, key=lambda row: row.speed)
        for peer in PEERS:
            for row in self.rows:
                if row.contender.name == peer:
                    yield _ratio(best, row, targets.get(peer))


class Report(msgspec.Struct):
    """A whole run."""

    machine: Machine
    versions: dict[str, str]
    distribution: str
    rounds: int
    others: float
    """The share of all CPUs that other work used meanwhile, from 0 to 1."""
    load: str
    rows: list[Row]
    shares: dict[str, float] = {}
    """Where the CPU time of keywise with the one-change handler goes, in a turn of its own."""

    @property
    def groups(self) -> list[Group]:
        found: dict[tuple[Handler, int], Group] = {}
        for row in self.rows:
            group = found.setdefault((row.handler, row.keys), Group(row.handler, row.keys, []))
            group.rows.append(row)
        return list(found.values())


def _ratio(ours: Row, peer: Row, target: float | None) -> Figure:
    pairs = zip(ours.turns, peer.turns, strict=True)
    paired = [mine.changes_per_s / theirs.changes_per_s for mine, theirs in pairs]
    # In a small trial ours may be too little to be measured.
    saved = peer.cpu_s / max(ours.cpu_s, 1e-6)
    return Figure(
        f"{ours.contender.name} / {peer.contender.name}",
        ours.speed / peer.speed,
        "×",
        f"turn by turn {min(paired):.2f} to {max(paired):.2f}",
        at_least=target,
        detail={"of_cpu_time": f"{saved:,.1f}"},
    )
