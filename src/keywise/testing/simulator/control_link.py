"""What a simulated consumer asks of a control store and a history store, behind a link."""

from collections.abc import Sequence

from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core.controls import Controls, Pause
from keywise.core.entry import Claim
from keywise.core.errors import UnavailableError
from keywise.core.history import HistoryRecord
from keywise.testing.simulator.links import Link


class LinkedControls:
    """Workers take turns and write the history; whatever else there is, an operator asks the ledger itself."""

    def __init__(self, link: Link, ledger: MemoryLedger) -> None:
        self._link = link
        self._ledger = ledger

    async def controls(self) -> Controls:
        if self._link.is_cut():
            raise UnavailableError("the ledger is down")
        return await self._ledger.controls()

    async def acquire(self, task: str, every_s: float) -> bool:
        return await self._link.call(lambda: self._ledger.acquire(task, every_s))

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        await self._link.call(lambda: self._ledger.record(records))

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        return await self._ledger.history(key, limit)

    async def trim(self, age_s: float, records_max: int) -> int:
        return await self._link.call(lambda: self._ledger.trim(age_s, records_max))

    async def pause(self, pause: Pause) -> None:
        raise AssertionError("simulated workers pause nothing")

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        raise AssertionError("simulated workers resume nothing")

    async def reset(self, claim: Claim) -> int | None:
        raise AssertionError("simulated workers reset nothing")

    async def raise_era(self) -> int | None:
        raise AssertionError("simulated workers raise no era")

    async def held(self, after: str, limit: int) -> list[str]:
        raise AssertionError("simulated workers do not look at each other's claims")

    async def keys(self, after: str, limit: int) -> list[str]:
        return await self._ledger.keys(after, limit)
