"""A pipeline on virtual time with limits on its keys, and with a bulk queue if a test wants one."""

import json
from typing import Any

from msgspec.structs import replace

from flow.rig import LEASED, Rig
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.source import MemorySource
from keywise.core.controls import Pause
from keywise.core.limits import Debounce, Rate

EVERYTHING = Pause("*", is_pattern=True)


class FlowRig(Rig):
    """A rig whose pipeline has a rate, a debounce or a second queue for bulk changes."""

    def __init__(
        self,
        way: str = LEASED,
        *,
        rate: Rate | None = None,
        debounce: Debounce | None = None,
        bulk: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(way, **settings)
        self.policy = replace(self.policy, rate=rate)
        self.ledger = MemoryLedger(self.database, "test", self.policy)
        self.more = {"rate": rate, "debounce": debounce}
        queues = self.source.database
        self.bulk_source = MemorySource(queues, "bulk", visibility_s=60.0)
        self.bulk_queue = queues.queue("bulk")
        if bulk:
            self.more |= {"sources": [("queue", self.source), ("bulk", self.bulk_source)], "bulk": frozenset({1})}

    async def send_bulk(self, *bodies: dict[str, Any]) -> None:
        await self.bulk_source.send([json.dumps(body).encode() for body in bodies])

    async def until_empty(self, limit_s: float = 3000.0) -> None:
        await self.until(lambda: not self.queue and not self.bulk_queue, limit_s)

    @property
    def times(self) -> list[float]:
        """When the store was asked to write, to a hundredth of a second."""
        return [round(at, 2) for at, _, _ in self.sink.tries]

    @property
    def order(self) -> list[str]:
        """The keys in the order in which the store was asked to write them."""
        return [key for _, key, _ in self.sink.tries]
