"""Acks run beside the next commit: at most one batch at a time, and a drain waits for the last."""

import asyncio
from collections.abc import Sequence

from flow.rig import Rig, Running
from flow.test_consumer import page
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Delivery, Order


class SlowAcks(MemorySource):
    """A queue whose acks take until the test lets them go on."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.source.database, "queue", visibility_s=60.0)
        self.begun = 0
        self.go_on = asyncio.Event()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self.begun += 1
        await self.go_on.wait()
        await super().ack(deliveries)


def mark(rig: Rig, key: str) -> Order | None:
    entry = rig.entry(key)
    return None if entry is None else entry.mark


def test_the_next_batch_is_committed_while_one_is_acked_and_no_batch_after_it():
    rig = Rig()
    rig.source = source = SlowAcks(rig)

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("a", 1))
            await rig.until(lambda: source.begun == 1)
            await rig.send(page("b", 1))
            await rig.until(lambda: mark(rig, "b") is not None)
            await rig.send(page("c", 1))
            await rig.until(lambda: "c" in rig.stored)
            await rig.pass_s(5.0)
            assert mark(rig, "c") is None, "a source that acks slowly is not left behind"
            assert source.begun == 1
            source.go_on.set()
            await rig.until(lambda: not rig.queue)
        assert mark(rig, "c") == (0, 1, 0)

    rig.play(story())


def test_a_drain_waits_for_the_last_ack():
    rig = Rig()
    rig.source = source = SlowAcks(rig)

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("a", 1))
            await rig.until(lambda: source.begun == 1)
            asyncio.get_running_loop().call_later(5.0, source.go_on.set)
        assert not rig.queue, "the message would come again"

    rig.play(story())
