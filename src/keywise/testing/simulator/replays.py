"""Somebody replays dead letters of a simulated world: what was set aside may be applied after all, but never late."""

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING

from keywise.core.dead_letter import DeadLetter
from keywise.core.errors import LetterError, UnavailableError
from keywise.operate.replay import replay
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

SHARE = 0.4
MENDED_SHARE = 0.5


class Replays:
    """Draws from a generator of its own, so that worlds without a replay are what they always were."""

    def __init__(self, world: "World", seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"replays {world.grade.value} {seed}")
        # A letter of the old numbering would count as one of the new, which the manual warns of.
        self._happens = self._rng.random() < SHARE and not world.flow.restarts
        self._operators = 0

    async def operate(self) -> None:
        """Until the faults are over, mend the cause of some letter now and then, and send it again."""
        while self._happens and not self._world.faults.is_over:
            await asyncio.sleep(self._rng.uniform(2.0, 20.0))
            settled = [(number, letter) for number, (_, letter) in self._letters() if self._is_settled(letter)]
            if settled and not self._world.faults.is_over:
                self._replay_in_process(*self._rng.choice(settled))

    def _letters(self) -> list[tuple[int, tuple[float, DeadLetter]]]:
        is_dirty = self._world.database.is_dirty or self._world.queue_database._undo is not None
        return [] if is_dirty else sorted(self._world.letters().items())

    def _is_settled(self, letter: DeadLetter) -> bool:
        """Its message is acked, so that the auditor can tell it from the new one."""
        return bool(letter.key) and all(message.body != letter.body for message in self._world.messages().values())

    def _replay_in_process(self, number: int, letter: DeadLetter) -> None:
        """Somebody runs a command, which can be paused and killed like any process."""
        self._operators += 1
        process = Process(self._world.loop, f"replayer-{self._operators}")
        process.spawn(self._replay(process, number, letter))

    async def _replay(self, process: Process, number: int, letter: DeadLetter) -> None:
        world = self._world
        world.faults.injected["replay"] += 1
        world.auditor.note(f"{process.name} replays {letter.key} {letter.version}")
        sent = world.sent_by_body[letter.body]
        if self._rng.random() < MENDED_SHARE:
            sent.mend()
            world.sent_now(sent)  # An earlier replay may have sent it already.
        # What was refused or could not be sent is told, and nothing else follows from it.
        with suppress(LetterError, UnavailableError):
            await replay(world.pipeline(process), number, letter)
