"""A road between two ledgers in memory, on which a pipeline moves."""

from collections.abc import Callable

import pytest

from adapters.benches import MovingClock
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.entry import LeaseTerms, LedgerPolicy
from keywise.core.errors import AdminError
from keywise.core.transfer import TransferPage
from keywise.operate.admin import AuditNote
from keywise.operate.copy_ledger import Checksums, LedgerCopy, LedgerHandle
from keywise.testing.conformance.claims import PLAIN, LedgerBench
from keywise.testing.conformance.dumps import filled, joined, pages_of
from running import run

WHO = AuditNote("ada@desk", "ticket 7")
TERMS = LeaseTerms("w1", 60.0)
EVERY_KEY = Pause(EVERYTHING, True, 5.0, "ada@desk", "moving")


class Road:
    """Two ledgers in memory, each with a clock of its own, and a move between them."""

    def __init__(self, *, ahead_s: float = 0.0, policy: LedgerPolicy = PLAIN) -> None:
        self.clock, self.there = MovingClock(), MovingClock()
        self.there.advance(ahead_s)
        self.source = MemoryLedger(MemoryDatabase(clock=self.clock), "pages", policy)
        self.target = MemoryLedger(MemoryDatabase(clock=self.there), "pages", policy)
        self.reported: list[tuple[str, int]] = []
        self.meanwhile: Callable[[str], None] = lambda what: None

    @property
    def move(self) -> LedgerCopy:
        old, new = LedgerHandle("old://", self.source), LedgerHandle("new://", self.target)
        return LedgerCopy("pages", old, new, self._report)

    def _report(self, what: str, done: int) -> None:
        self.reported.append((what, done))
        self.meanwhile(what)

    async def fill(self) -> None:
        await filled(LedgerBench(ledger=self.source, another=self.source, advance=self.clock.advance))
        self.clock.advance(10_000.0)
        self.there.advance(self.clock() - self.there())
        await self.source.control_store.pause(EVERY_KEY)

    async def copy(self) -> Checksums:
        move = self.move
        return await move.run(await move.plan(), WHO)

    async def content(self) -> tuple[TransferPage, TransferPage]:
        mine, theirs = [joined(await pages_of(one.transfer, 100)) for one in (self.source, self.target)]
        return mine, theirs

    def refusal(self) -> str:
        """Why it cannot be copied."""
        with pytest.raises(AdminError) as error:
            run(self.move.plan())
        return str(error.value)
