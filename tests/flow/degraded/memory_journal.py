"""A journal store of journals without a disk, for virtual time, and a ledger that can go away."""

import asyncio
from collections.abc import Callable
from typing import Any

from keywise.core.errors import UnavailableError
from keywise.flow.degraded.journal import JournalContents, Orphans, read


class Paper:
    """A journal store whose sheets outlive the workers that write them. It can be full, slow, and stuck."""

    def __init__(self) -> None:
        self.sheets: list[Sheet] = []
        self.is_full = False
        self.is_stuck = False
        self.slow_s = 0.0
        self.troubles: list[str] = []
        self.log: list[str] = []

    async def create(self) -> "Sheet":
        await self.check()
        sheet = Sheet(self, f"sheet-{len(self.log)}")
        self.sheets.append(sheet)
        return sheet

    async def orphans(self) -> Orphans:
        await self.check()
        found = [sheet for sheet in self.sheets if not sheet.is_held]
        for sheet in found:
            sheet.is_held = True
        return Orphans(found, self.troubles)

    async def check(self) -> None:
        if self.slow_s:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=self.slow_s)
        if self.is_full:
            raise UnavailableError("no space left on device")

    def leave(self, text: bytes) -> "Sheet":
        """What a dead worker has left behind."""
        sheet = Sheet(self, "left")
        sheet.text, sheet.is_held = text, False
        self.sheets.append(sheet)
        return sheet


class Sheet:
    """One journal."""

    def __init__(self, paper: Paper, name: str) -> None:
        self.name = name
        self.text = b""
        self.is_held = True
        self.rewrites = 0
        self.is_torn = False
        self._paper = paper

    def contents(self) -> JournalContents:
        return read(self.text)

    async def read(self) -> bytes:
        await self._paper.check()
        if self.is_torn:
            raise UnavailableError("it is torn")
        return self.text

    async def append(self, text: bytes, *, durably: bool) -> None:
        await self._paper.check()
        self._paper.log.append(f"{'durably' if durably else 'soon'} {text.decode().strip()}")
        self.text += text

    async def rewrite(self, text: bytes) -> None:
        await self._paper.check()
        self.rewrites += 1
        self.text = text

    async def remove(self) -> None:
        await self._paper.check()
        if self._paper.is_stuck:
            raise UnavailableError("it cannot be removed")
        self._paper.sheets.remove(self)

    def close(self) -> None:
        self.is_held = False


class Away:
    """Stands before a plug that cannot be reached while it is away: all of it, or some of its methods."""

    def __init__(self, plug: Any, *only: str) -> None:
        self.is_away = False
        self.only = only
        self._plug = plug

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = getattr(self._plug, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            self._check(name)
            result = await found(*arguments, **options)
            self._check(name)
            return result

        return call

    def _check(self, name: str) -> None:
        if self.is_away and (not self.only or name in self.only):
            raise UnavailableError("the ledger is away")
