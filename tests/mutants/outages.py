"""Variants of what is done while the ledger is down and how it is told afterwards, and while the sink is away."""

import asyncio
from collections.abc import Sequence
from typing import Any

from keywise.core import events
from keywise.core.entry import Claim
from keywise.core.errors import UnavailableError
from keywise.core.sink import Grade, SinkResult
from keywise.flow.degraded.journal import DirtyKeyJournal
from keywise.flow.degraded.worker import DegradedWorker
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Ticket
from keywise.flow.leased.disposition import Execution, Ran
from keywise.flow.leased.executors import SinkExecutor, SinkHealth
from keywise.flow.pipeline import LEDGER
from mutants.mutant import Mutant

_note = DegradedWorker._note


async def _noted_later(self: DegradedWorker, tickets: Sequence[Ticket]) -> None:
    async def later() -> None:
        await asyncio.sleep(0.05)
        try:
            await _note(self, tickets)
        except UnavailableError:
            return

    vars(self).setdefault("later", []).append(asyncio.get_running_loop().create_task(later()))


async def _forgotten_first(self: DegradedWorker) -> bool:
    pipeline = self._pipeline
    for file, contents in self._journal.pending():
        try:
            await self._journal.forget(file, contents)
            await self._journal.tidy()
            await self._mark_suspect(contents)
        except UnavailableError as error:
            await pipeline.back_off(LEDGER, error, 1)
            return False
        pipeline.emit(events.MarkedSuspect(pipeline=pipeline.name, keys=len(contents.keys)))
    return True


def _never_cut_off(self: Heartbeat, claims: Sequence[Claim]) -> bool:
    return False


async def _find_nothing(self: DirtyKeyJournal) -> None:
    return None


async def _known_and_not_suspect(self: DegradedWorker, contents: Any) -> None:
    await self._pipeline.admin.mark_suspect([])


def _untouched(self: SinkExecutor, claim: Claim, result: SinkResult, rest_s: float) -> Execution:
    return Ran(result, rest_s=rest_s)


def _never_away(self: SinkHealth, claim: Claim) -> bool:
    return False


OUTAGES = (
    Mutant("a key is noted after it is written", 22, DegradedWorker, "_note", _noted_later),
    Mutant("notes go before their keys are suspect", 22, DegradedWorker, "_hand_over", _forgotten_first),
    Mutant("noted keys do not become suspect", 22, DegradedWorker, "_mark_suspect", _known_and_not_suspect),
    Mutant("what a dead worker has noted is left", 22, DirtyKeyJournal, "find", _find_nothing, Grade.CONDITIONAL),
    Mutant("an outage costs an attempt", 22, Heartbeat, "is_cut_off", _never_cut_off),
    Mutant("a sink that is away counts as untouched", 6, SinkExecutor, "_judge", _untouched),
    Mutant("a sink that is away costs an attempt", 10, SinkHealth, "is_away", _never_away),
)
