"""While enough lanes are ready, messages are received many at a time, not one for each that has ended."""

from collections.abc import Sequence

from flow.rig import Rig, Running
from flow.test_consumer import page
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, Delivery


class CountedReceives(MemorySource):
    """A queue that notes how many messages it was asked for."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.source.database, "queue", visibility_s=60.0)
        self.limits: list[int] = []

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        self.limits.append(limit)
        return await super().receive(limit, wait_s)


def test_a_receive_waits_until_there_is_room_for_half_a_batch():
    rig = Rig(batch_max=20, prefetch=40, concurrency=1)
    rig.source = source = CountedReceives(rig)

    async def take_a_while(change: Change) -> None:
        await rig.pass_s(0.01)

    async def story() -> None:
        rig.sink.behaviour = take_a_while
        await rig.send(*(page(f"k{number}", 1) for number in range(60)))
        async with Running(rig):
            await rig.until(lambda: not rig.queue)

    rig.sink.batch_max = 1
    rig.play(story())
    assert source.limits[:4] == [20, 20, 10, 10]


def test_room_for_a_few_is_used_at_once_if_no_lane_is_ready():
    """All that is held is at work, and takes long: an idle key does not wait for it."""
    rig = Rig(batch_max=20, prefetch=20, concurrency=20)

    async def take_long(change: Change) -> None:
        if change.key != "idle":
            await rig.pass_s(20.0)

    async def story() -> None:
        rig.sink.behaviour = take_long
        await rig.send(*(page(f"k{number}", 1) for number in range(15)))
        async with Running(rig):
            await rig.until(lambda: len(rig.sink.tries) == 15)
            await rig.send(page("idle", 1))
            await rig.until(lambda: "idle" in rig.stored, limit_s=5.0)
            await rig.until(lambda: not rig.queue)

    rig.sink.batch_max = 1
    rig.play(story())
