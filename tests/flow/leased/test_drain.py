"""A drain gives back every claim whose work had not begun, also those of changes that failed before."""

from flow.rig import LEASED, Rig, Running
from flow.test_consumer import page
from flow.test_consumer_shutdown import Gate
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Certainty, LeaseTerms
from keywise.core.ledger import Failure


def test_a_drain_gives_back_a_retry_that_was_put_behind_the_sign_to_stop():
    """Rule 18: a retry goes alone, so it is put back into the line; it must not end up behind the last sign."""
    rig = Rig(LEASED, concurrency=1, drain_s=20.0)
    rig.sink.batch_max = 2

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        [claim] = (await rig.ledger.claim([ChangeHeader("c", order_of(1))], LeaseTerms("w0", 30.0))).granted
        await rig.ledger.fail([Failure(claim, Certainty.CLEAN, 0.0)])
        await rig.send(page("a", 1))
        async with Running(rig) as running:
            await gate.reached.wait()
            await rig.send(page("b", 1), page("c", 1))
            await rig.until(lambda: rig.entry("b") is not None and rig.entry("c").token)
            stopped_at = rig.loop.time()
            running.consumer.stop()
            await rig.pass_s(0.5)
            gate.opened.set()
            await running.task
        assert rig.loop.time() - stopped_at < 2.0, "it waited for the whole drain time"
        assert rig.entry("b") is None
        assert rig.entry("c").token == 0

    rig.play(story())
