"""One measured figure, beside what it should be."""

from typing import Any

import msgspec


class Figure(msgspec.Struct):
    """A line of the table."""

    name: str
    value: float | None
    """None if it could not be measured here; the note says why."""
    unit: str
    note: str = ""
    at_least: float | None = None
    at_most: float | None = None
    detail: dict[str, Any] = {}

    @property
    def is_met(self) -> bool | None:
        """None if there is no target, or nothing was measured."""
        if self.value is None:
            return None
        if self.at_least is not None:
            return self.value >= self.at_least
        return self.value <= self.at_most if self.at_most is not None else None

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:,g}"
        return f"≤ {self.at_most:,g}" if self.at_most is not None else ""

    @property
    def shown(self) -> str:
        if self.value is None:
            return "–"
        digits = 0 if abs(self.value) >= 100 else 2
        return f"{self.value:,.{digits}f}"


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    changes: int
    keys: int
    batch: int
    rounds: int
    overhead_changes: int
    latency_s: float
    rate: int
    ledger_keys: int
    memory_changes: int
    bulk: int
    flow_s: float
    key_counts: tuple[int, ...]
    calls_s: float
    objects: int
    """Small objects, of 1 KiB."""
    object_bytes: int
    """The size of a large object."""
    generated_bytes: int
    """The size of the object that the memory of a worker is measured with."""
    reindex_rows: int
    reindex_rows_max: int
    """The rows of the table with which a reindex has to be as fast as with `reindex_rows`."""


FULL = Scale(
    changes=100_000,
    keys=10_000,
    batch=1_000,
    rounds=5,
    overhead_changes=100_000,
    latency_s=20.0,
    rate=500,
    ledger_keys=100_000,
    memory_changes=1_000_000,
    bulk=200_000,
    flow_s=6.0,
    key_counts=(1, 10, 1_000, 100_000, 1_000_000),
    calls_s=6.0,
    objects=10_000,
    object_bytes=100_000_000,
    generated_bytes=10 * 2**30,
    reindex_rows=100_000,
    reindex_rows_max=1_000_000,
)
QUICK = Scale(
    changes=20_000,
    keys=2_000,
    batch=1_000,
    rounds=1,
    overhead_changes=20_000,
    latency_s=2.0,
    rate=500,
    ledger_keys=10_000,
    memory_changes=50_000,
    bulk=100_000,
    flow_s=2.0,
    key_counts=(1, 1_000, 10_000),
    calls_s=1.0,
    objects=1_000,
    object_bytes=5_000_000,
    generated_bytes=50_000_000,
    reindex_rows=10_000,
    reindex_rows_max=30_000,
)
