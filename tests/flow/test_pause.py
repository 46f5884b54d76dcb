"""A paused pipeline takes nothing and touches nothing; a paused key holds up nobody else."""

import pytest

from flow.limits_rig import EVERYTHING, FlowRig
from flow.rig import LEASED, LEASED_CONDITIONAL, QUEUE_TRANSACTION, Running
from flow.test_consumer import every_way, page
from flow.test_consumer_shutdown import Gate
from flow.unreachable_adapters import Unreachable
from keywise.core import events
from keywise.core.controls import Pause


@every_way
def test_a_paused_pipeline_receives_nothing_and_goes_on_after_the_resume(way: str):
    rig = FlowRig(way, attempts_max=1)

    async def story() -> None:
        await rig.ledger.pause(EVERYTHING)
        async with Running(rig):
            await rig.send(page("a", 1), page("a", 2), page("b", 1))
            before = dict(rig.queue)
            await rig.pass_s(200.0)
            assert (rig.queue, rig.sink.tries) == (before, []), "untouched: not even counted"
            await rig.ledger.resume("*", True)
            await rig.until_empty(limit_s=3.0)

    rig.play(story())
    assert (rig.stored, rig.letters) == ({"a": 2, "b": 1}, [])
    assert (len(rig.of(events.Paused)), len(rig.of(events.Resumed))) == (1, 1)


@every_way
def test_a_pause_is_heeded_by_a_worker_that_runs(way: str):
    rig = FlowRig(way)

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("a", 1))
            await rig.until_empty()
            await rig.ledger.pause(EVERYTHING)
            await rig.pass_s(1.5)
            await rig.send(page("a", 2), page("b", 1), page("b", 2))
            before = dict(rig.queue)
            await rig.pass_s(100.0)
            assert (rig.stored, rig.queue) == ({"a": 1}, before)
            await rig.ledger.resume("*", True)
            await rig.until_empty(limit_s=3.0)

    rig.play(story())
    assert rig.stored == {"a": 2, "b": 2}


@every_way
def test_a_pause_holds_from_the_very_first_change_after_it(way: str):
    """The worker has not looked yet; the ledger refuses all the same."""
    rig = FlowRig(way, attempts_max=1)

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(0.1)
            await rig.ledger.pause(EVERYTHING)
            await rig.send(page("a", 1), page("a", 2))
            await rig.pass_s(50.0)
            assert (rig.sink.tries, len(rig.queue)) == ([], 2)
            await rig.ledger.resume("*", True)
            await rig.until_empty(limit_s=5.0)

    rig.play(story())
    assert (rig.stored, rig.letters, rig.of(events.Failed)) == ({"a": 2}, [], [])


def test_messages_that_share_the_ledgers_transaction_are_untouched_though_the_worker_had_not_looked():
    """Followers and unreadable messages too: the transaction is rolled back as a whole."""
    rig = FlowRig(QUEUE_TRANSACTION)

    async def story() -> None:
        async with Running(rig):
            await rig.pass_s(0.1)
            await rig.ledger.pause(EVERYTHING)
            await rig.send(page("a", 1), page("a", 2), b"{broken", page("b", 1))
            before = dict(rig.queue)
            await rig.pass_s(10.0)
            assert (rig.queue, rig.letters) == (before, [])

    rig.play(story())


@every_way
def test_a_stop_during_a_pause_touches_nothing_either(way: str):
    rig = FlowRig(way)

    async def story() -> None:
        await rig.ledger.pause(EVERYTHING)
        await rig.send(page("a", 1))
        before = dict(rig.queue)
        async with Running(rig):
            await rig.pass_s(5.0)
        assert rig.queue == before
        assert rig.loop.time() < 7.0

    rig.play(story())
    assert isinstance(rig.events[-1], events.Stopped)


@pytest.mark.parametrize("way", [LEASED, LEASED_CONDITIONAL])
def test_what_is_worked_on_when_a_pause_comes_is_finished(way: str):
    rig = FlowRig(way)

    async def story() -> None:
        gate = rig.sink.behaviour = Gate()
        await rig.send(page("a", 1))
        async with Running(rig):
            await gate.reached.wait()
            await rig.ledger.pause(EVERYTHING)
            await rig.pass_s(2.0)
            gate.opened.set()
            await rig.until(lambda: rig.stored == {"a": 1}, limit_s=2.0)

    rig.play(story())


@every_way
@pytest.mark.parametrize("bulk", [False, True])
def test_paused_keys_hold_up_nobody_however_many_of_their_messages_come_first(way: str, bulk: bool):
    """Rule 15: whole batches of them lie before the others."""
    rig = FlowRig(way, bulk=bulk, batch_max=4, prefetch=8, evict_delay_s=30.0)

    async def story() -> None:
        await rig.ledger.pause(Pause("hot*", is_pattern=True))
        await rig.send(*(page(f"hot{number}", 1) for number in range(20)))
        await rig.send(*(page(f"k{number}", 1) for number in range(5)))
        await (rig.send_bulk if bulk else rig.send)(*(page(f"b{number}", 1) for number in range(5)))
        async with Running(rig):
            await rig.until(lambda: len(rig.stored) == 10, limit_s=15.0)
            await rig.pass_s(40.0)
            assert len(rig.queue) == 20
            await rig.ledger.resume("hot*", True)
            await rig.until_empty()

    rig.play(story())
    assert (len(rig.stored), rig.letters, rig.of(events.Failed)) == (30, [], [])


@pytest.mark.parametrize("way", [LEASED, QUEUE_TRANSACTION])
def test_a_control_store_that_is_away_at_the_start_is_waited_for_and_told(way: str):
    rig = FlowRig(way)
    rig.more["control_store"] = Unreachable(rig.ledger, controls=3)
    rig.run(page("a", 1), limit_s=10.0)
    assert rig.stored == {"a": 1}
    assert [event.what for event in rig.of(events.Unavailable)] == ["ledger"] * 3
