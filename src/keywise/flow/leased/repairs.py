"""Repairs beside the flow: suspect keys are repaired in tasks of their own, so that no change waits for them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from keywise.core.entry import Claim, Level, RefusalReason
from keywise.core.errors import UnavailableError
from keywise.flow.leased.probation import Company
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.repair import Repairer
from keywise.flow.wakeup import Wakeup

SIDE_BY_SIDE = 2
"""How many keys are repaired at a time."""


class RepairLoop:
    """Looks for suspect keys periodically and repairs them, in the company that their level allows."""

    def __init__(
        self,
        pipeline: OpenPipeline,
        repairer: Repairer,
        company: Company,
        arrivals: Wakeup,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pipeline = pipeline
        self._repairer = repairer
        self._company = company
        self._arrivals = arrivals
        self._may_begin = may_begin
        """False while changes are written without claims: a repair could run beside one of the same key."""
        self._stop = asyncio.Event()
        self._alone: deque[str] = deque()

    def stop(self) -> None:
        """Begin no more repairs."""
        self._stop.set()

    @property
    def has_alone(self) -> bool:
        return bool(self._alone)

    def take_alone(self) -> str | None:
        """Return a key whose repair has to run alone; None if there is none."""
        return self._alone.popleft() if self._alone else None

    async def run(self) -> None:
        while not self._stop.is_set():
            try:
                async with asyncio.timeout(self._pipeline.until(self._repairer.due)):
                    await self._stop.wait()
            except TimeoutError:
                keys = iter(await self._repairer.suspects())
                await asyncio.gather(*(self._repair_each(keys) for _ in range(SIDE_BY_SIDE)))

    async def _repair_each(self, keys: Iterator[str]) -> None:
        for key in keys:
            try:
                if not self._stop.is_set():
                    await self._repair(key)
            except UnavailableError as error:
                await self._pipeline.back_off(LEDGER, error, 1)

    async def _repair(self, key: str) -> None:
        level = Level.USUAL
        while self._may_begin() and self._company.may_repair(level):
            # Counted from before the claim: a change that has to run alone waits for it.
            try:
                with self._company.repairing(level) as repair:
                    answer = await self._repairer.claim(key, level)
                    if isinstance(answer, Claim):
                        if answer.took_over:
                            self._company.window.took_over(answer.level)
                        await self._repairer.run_under(answer, repair.begin)
                        return
            finally:
                self._arrivals.notify()
            if answer.reason is not RefusalReason.PROBATION or answer.level is level:
                return
            level = answer.level
        if level is Level.ALONE and key not in self._alone:
            self._alone.append(key)
            self._arrivals.notify()
