"""A change that a gateway answers for, in place of its sink, does not take others along again and again."""

import pytest

from flow.rig import Rig, Running, Store
from flow.test_consumer import page
from keywise.core.change import Outcome
from keywise.core.entry import Certainty
from keywise.core.sink import Grade, SinkResult


class Gateway(Store):
    """Whatever holds one bad change gets no answer from the sink itself."""

    batch_max = 500

    async def apply(self, changes, claims):
        if any(change.key == "bad" for change in changes):
            return [SinkResult(Outcome.BUSY, "504", certainty=Certainty.UNKNOWN)] * len(changes)
        return await super().apply(changes, claims)


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("others", [1, 20])
def test_those_beside_a_bad_change_are_written_once_their_leases_have_run_out(concurrency, others):
    rig = Rig(concurrency=concurrency, attempts_max=5, lease_s=60.0)
    rig.sink = Gateway(Grade.PLAIN, rig.loop.time)

    async def story() -> None:
        await rig.send(page("bad", 1), *(page(f"k{number}", 1) for number in range(others)))
        async with Running(rig):
            await rig.until(lambda: len(rig.stored) == others, 130)

    rig.play(story())
