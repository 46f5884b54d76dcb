"""An operator's desk: the verbs on the pipeline of a rig, and what they leave in the history."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flow.rig import Rig
from keywise.core.history import HistoryRecord
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat

WHO, WHY = "ada@desk", "ticket 7"


class Desk:
    """Opens the verbs, and notes what an operator is told while they wait."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.told: list[str] = []

    @asynccontextmanager
    async def admin(self, wait_s: float = 30.0) -> AsyncIterator[PipelineAdmin]:
        pipeline = self.rig.pipeline("operator")
        async with running_heartbeat(pipeline) as heartbeat:
            claimer = AdminClaimer(
                pipeline, WaitBudget(pipeline, wait_s, self.told.append, "wait longer with --wait"), heartbeat
            )
            yield PipelineAdmin(pipeline, AuditNote(WHO, WHY), claimer)

    async def act(self, verb: str, *arguments: Any, wait_s: float = 30.0, **options: Any) -> Any:
        async with self.admin(wait_s) as admin:
            return await getattr(admin, verb)(*arguments, **options)

    def do(self, verb: str, *arguments: Any, wait_s: float = 30.0, **options: Any) -> Any:
        return self.rig.play(self.act(verb, *arguments, wait_s=wait_s, **options))

    @property
    def lines(self) -> list[HistoryRecord]:
        """The history, oldest first."""
        return self.rig.play(self.rig.ledger.history(None, 100))[::-1]

    @property
    def noted(self) -> list[tuple[str, str, int | None]]:
        return [(line.what, line.key, line.version) for line in self.lines]
