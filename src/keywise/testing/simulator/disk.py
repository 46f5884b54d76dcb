"""A simulated disk for journals: it outlives processes, and what was not flushed may be lost with one."""

import asyncio
import random
from typing import TYPE_CHECKING

import msgspec

from keywise.core.change import Order
from keywise.core.errors import UnavailableError
from keywise.flow.degraded.journal import JournalContents, JournalLine, Orphans, read
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World


class Disk:
    """All files of all processes."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.files: list[DiskFile] = []
        self._number = 0

    def journal_store(self, process: Process) -> "DiskJournalStore":
        return DiskJournalStore(self, process)

    def noted_keys(self) -> set[str]:
        """Every key that is noted somewhere."""
        return {key for file in self.files for key in file.contents().keys}

    def flying(self, process: Process) -> set[tuple[str, Order | None]]:
        """What a process has noted as about to be written, so that a crash of the machine would not lose it."""
        mine = [file.durable_contents() for file in self.files if file.holder is process]
        return {(key, header.order) for contents in mine for key, header in contents.flying.items()}

    def crashed(self, process: Process) -> None:
        """A process was killed, perhaps with its whole machine."""
        for file in self.files:
            if file.holder is process and self.rng.random() < 0.5:
                file.lose_tail(self.rng)

    def add(self, process: Process) -> "DiskFile":
        self._number += 1
        file = DiskFile(self, f"journal-{self._number}", process)
        self.files.append(file)
        return file

    async def moment(self) -> None:
        """In which a process can be stopped."""
        await asyncio.sleep(self.rng.uniform(0.0, 0.01))
        if self.world.faults.happens("full disk", 0.02):
            raise UnavailableError("no space left on device")


class DiskJournalStore:
    """The disk as one process sees it."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process

    async def create(self) -> "DiskFile":
        await self._disk.moment()
        return self._disk.add(self._process)

    async def orphans(self) -> Orphans:
        await self._disk.moment()
        found = [file for file in self._disk.files if file.holder is None or file.holder.is_dead]
        for file in found:
            file.holder = self._process
        return Orphans(found)


class DiskFile:
    """One file: a durable part, and a tail that is written and not flushed."""

    def __init__(self, disk: Disk, name: str, holder: Process) -> None:
        self.name = name
        self.holder: Process | None = holder
        self._disk = disk
        self._durable = self._tail = b""

    def contents(self) -> JournalContents:
        return read(self._durable + self._tail)

    def durable_contents(self) -> JournalContents:
        return read(self._durable)

    def lose_tail(self, rng: random.Random) -> None:
        self._tail = self._tail[: rng.randrange(len(self._tail) + 1)]

    async def read(self) -> bytes:
        await self._disk.moment()
        return self._durable + self._tail

    async def append(self, text: bytes, *, durably: bool) -> None:
        await self._disk.moment()
        self._disk.world.blackout.noted(self, msgspec.json.decode(text, type=JournalLine))
        self._tail += text
        if durably:
            self._durable, self._tail = self._durable + self._tail, b""
        await asyncio.sleep(0.001)

    async def rewrite(self, text: bytes) -> None:
        await self._disk.moment()
        self._durable, self._tail = text, b""

    async def remove(self) -> None:
        await self._disk.moment()
        self._disk.world.blackout.removed(self)
        self._disk.files.remove(self)
        await asyncio.sleep(0.001)

    def close(self) -> None:
        self.holder = None
