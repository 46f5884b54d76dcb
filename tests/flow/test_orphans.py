"""Deliveries that their source refuses to extend: their tickets are orphaned until the message comes again."""

from collections.abc import Sequence

from flow.rig import LEASED, Rig
from flow.tickets import ticket
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Delivery
from keywise.flow.lanes import Lanes, Ticket
from keywise.flow.settlement import Settlement

VISIBILITY_S = 60.0


class InterruptedSource(MemorySource):
    """Redelivers messages to their worker while it answers an extension."""

    lanes: Lanes

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        refused = await super().extend(deliveries, visibility_s)
        self.lanes.add(read(await self.receive(10, 0.0)))
        return refused


class RefusingSource(MemorySource):
    """Says of every delivery that another consumer has it."""

    refused = 0

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> Sequence[Delivery]:
        await super().extend(deliveries, visibility_s)
        self.refused += len(deliveries)
        return deliveries


def read(deliveries: Sequence[Delivery]) -> list[Ticket]:
    return [ticket(one.body.decode(), 1, number=int(one.id), receipt=int(one.receipt)) for one in deliveries]


def orphaned(lanes: Lanes) -> list[str]:
    return sorted(one.change.key for one in lanes.tickets() if one.is_orphaned)


def test_a_ticket_whose_message_another_worker_received_is_orphaned_until_the_message_comes_again():
    rig, lanes = Rig(LEASED), Lanes(10)
    settlement = Settlement(rig.pipeline())

    async def story() -> None:
        await rig.source.send([b"a", b"b"])
        lanes.add(read(await rig.source.receive(10, 0.0)))
        await settlement.extend(lanes.tickets(), age=0.0)
        assert orphaned(lanes) == []
        await rig.pass_s(VISIBILITY_S + 1)
        taken = await rig.source.receive(1, 0.0)
        for _ in range(2):
            await settlement.extend(lanes.tickets(), age=0.0)
            assert orphaned(lanes) == ["a"]
        await rig.source.release(taken, 0.0)
        lanes.add(read(await rig.source.receive(10, 0.0)))
        assert orphaned(lanes) == []
        await settlement.extend(lanes.tickets(), age=0.0)
        assert orphaned(lanes) == []

    rig.play(story())


def test_a_message_that_comes_again_while_its_extension_is_refused_is_not_orphaned():
    rig, lanes = Rig(LEASED), Lanes(10)
    source = InterruptedSource(rig.source.database, "queue", visibility_s=VISIBILITY_S)
    source.lanes = lanes
    rig.more["sources"] = [("queue", source)]
    settlement = Settlement(rig.pipeline())

    async def story() -> None:
        await source.send([b"a"])
        lanes.add(read(await source.receive(10, 0.0)))
        await rig.pass_s(VISIBILITY_S + 1)
        await source.receive(10, 0.0)
        await rig.pass_s(VISIBILITY_S + 1)
        await settlement.extend(lanes.tickets(), age=0.0)
        assert orphaned(lanes) == []
        assert await MemorySource.extend(source, [one.delivery for one in lanes.tickets()], VISIBILITY_S) == []

    rig.play(story())


def test_an_orphaned_change_is_processed_like_any_other():
    """The ledger decides who may write, and not the source."""
    rig = Rig(LEASED)
    source = RefusingSource(rig.source.database, "queue", visibility_s=VISIBILITY_S)
    rig.more["sources"] = [("queue", source)]
    rig.sink.behaviour = lambda change: rig.pass_s(VISIBILITY_S)
    rig.run({"id": "a", "v": 1})
    assert source.refused
    assert (rig.written, rig.outcomes) == ([("a", 1)], {"applied": 1})
