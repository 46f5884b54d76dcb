"""A pipeline on virtual time whose ledger can go away, with what it notes meanwhile."""

from typing import Any

from flow.degraded.memory_journal import Away, Paper
from flow.rig import LEASED, Rig
from keywise.core import events


class Outage:
    """A pipeline whose ledger can go away, with what it notes meanwhile."""

    def __init__(self, mode: str = "write-anyway", *only: str, way: str = LEASED, **settings: Any) -> None:
        given = {"horizon_s": 10.0, "repair_s": 2.0, "backoff_max_s": 2.0, "on_ledger_down": mode, **settings}
        journal = {"journal": "paper"} if mode == "write-anyway" else {}
        self.rig = Rig(way, **given, **journal)
        self.ledger = Away(self.rig.ledger, *only)
        self.paper = Paper()
        self.truth: dict[str, bytes | None] = {}
        self.rig.refetch = self.truth.get
        parts = dict.fromkeys(("ledger", "admin", "control_store", "history_store"), self.ledger)
        self.rig.more = {
            **parts,
            "journal_store": self.paper if journal else None,
            "wall": lambda: 1e9 + self.rig.loop.time(),
        }

    async def goes_down(self) -> None:
        self.ledger.is_away = True
        await self.rig.until(lambda: self.rig.of(events.LedgerDown))

    def comes_back(self) -> None:
        self.ledger.is_away = False

    def suspicions(self, key: str) -> int:
        entry = self.rig.entry(key)
        return entry.suspicions if entry is not None else 0


def body(key: str, version: int, **more: Any) -> dict[str, Any]:
    return {"id": key, "v": version, **more}
