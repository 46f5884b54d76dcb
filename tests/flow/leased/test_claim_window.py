"""Much is claimed ahead of slow work: the loop that claims rests meanwhile, and what waits is not counted as work."""

from flow.rig import Rig, Running
from flow.test_consumer import page
from keywise.core import events
from keywise.core.change import Change
from keywise.core.errors import TransientError

READS_MAX = 100_000
"""How often the clock may be read: a loop that spins on virtual time would never end otherwise."""


def test_a_retry_that_is_due_is_not_asked_for_over_and_over_while_much_is_claimed_ahead():
    """Nothing is claimed until half of the room is free, so until then there is nothing to look for."""
    rig, reads = Rig(concurrency=4, backoff_s=0.5), 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        assert reads < READS_MAX, "the loop spins"
        return rig.loop.time()

    async def be_quick_then_slow(change: Change) -> None:
        if change.key == "bad" and not rig.of(events.Failed):
            raise TransientError("no")
        if int(change.value["number"]) > 100:
            await rig.pass_s(10.0)

    async def story() -> None:
        rig.sink.behaviour = be_quick_then_slow
        keys = ["bad" if number == 90 else f"k{number}" for number in range(200)]
        await rig.send(*(page(key, 1, number=number) for number, key in enumerate(keys)))
        async with Running(rig):
            await rig.until(lambda: not rig.queue)

    rig.sink.batch_max, rig.more["clock"] = 1, clock
    rig.play(story())
    assert len(rig.stored) == 200
