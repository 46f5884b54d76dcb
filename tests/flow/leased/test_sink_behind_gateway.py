"""A gateway that answers in place of a sink says nothing of what the sink did: nobody is blamed, nothing given back."""

from collections.abc import Sequence
from typing import Any

import pytest

from flow.degraded.outage_rig import Outage, body
from flow.rig import LEASED, LEASED_CONDITIONAL, Rig, Running, Store
from flow.test_consumer import page
from flow.test_repair import HORIZON_S, Ward
from keywise.core.change import Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AdminError
from keywise.core.events import Failed, MarkedSuspect, Unavailable
from keywise.core.sink import Grade, SinkResult
from keywise.flow.repair import Repairer
from keywise.operate.waiting import running_heartbeat
from operate.test_force import desk_with

AWAY_S = 120.0


class GatewayStore(Store):
    """A store behind a gateway, which answers in its place for a while, or whenever it is given one key."""

    batch_max = 1
    back_at = AWAY_S
    bad_key = ""
    takes_it = False
    """The store behind it writes all the same."""

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        [change] = changes
        if self._clock() >= self.back_at and change.key != self.bad_key:
            return await super().apply(changes, claims)
        self.calls.append(1)
        if self.takes_it:
            self.write(change, claims[0].token)
        return [SinkResult(Outcome.BUSY, "504: no answer", certainty=Certainty.UNKNOWN)]


@pytest.mark.parametrize("way", [LEASED, LEASED_CONDITIONAL])
def test_a_gateway_that_waits_for_its_service_in_vain_buries_nothing(way):
    """However often it is asked: the service is away, and no change is to blame."""
    rig = Rig(way, concurrency=4, attempts_max=1, lease_s=5.0, margin_s=1.0)
    rig.sink = GatewayStore(rig.sink.grade, rig.loop.time)
    rig.run(*(page(f"k{number}", 1) for number in range(10)))
    assert len(rig.stored) == 10
    assert (rig.letters, rig.of(Failed)) == ([], [])
    assert {(event.what, event.cause) for event in rig.of(Unavailable)} == {("sink", "504: no answer")}
    assert len(rig.sink.calls) > 20, "each was tried several times"


def test_an_older_change_waits_for_one_that_a_gateway_answered():
    """The service behind it may have written it, or may be about to."""
    rig = Rig(lease_s=5.0, margin_s=1.0)
    rig.sink = GatewayStore(Grade.PLAIN, rig.loop.time)
    rig.sink.back_at, rig.sink.takes_it = 1.0, True

    async def story() -> None:
        await rig.send(page("a", 2))
        async with Running(rig):
            await rig.until(lambda: rig.sink.calls)
            await rig.pass_s(0.1)
            entry = rig.entry("a")
            assert (entry.token > 0, entry.intent, entry.attempts) == (True, (0, 2, 0), 0)
            await rig.send(page("a", 1))
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert [version for _, version in rig.written] == [2, 2]
    assert rig.entry("a").suspicions == 1


def test_a_change_that_a_gateway_answers_again_and_again_while_others_pass_is_to_blame():
    """It may be what makes the service fall over."""
    rig = Rig(concurrency=4, attempts_max=3, lease_s=5.0, margin_s=1.0)
    rig.sink = GatewayStore(Grade.PLAIN, rig.loop.time)
    rig.sink.back_at, rig.sink.bad_key = 0.0, "bad"

    async def story() -> None:
        await rig.send(page("bad", 1))
        async with Running(rig):
            for version in range(1, 200):
                await rig.send(page("good", version))
                await rig.pass_s(1.0)
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert [letter.key for letter in rig.letters] == ["bad"]
    assert len(rig.of(Failed)) == 3 and rig.stored == {"good": 199}


def test_an_operator_is_told_that_nobody_knows_what_the_service_behind_a_gateway_did():
    desk = desk_with(truth={"id": "a", "v": 5})
    desk.rig.sink = GatewayStore(Grade.PLAIN, desk.rig.loop.time)
    with pytest.raises(AdminError, match=r"504: no answer; it may or may not have been written.*suspect"):
        desk.do("force", "a")
    assert desk.rig.entry("a").abandoned, "its lease runs out"


def test_a_repair_that_a_gateway_answers_keeps_the_key_until_its_lease_runs_out():
    ward = Ward(lambda key: {"id": key, "v": 5})

    async def story() -> None:
        await ward.fall_ill()
        await ward.pass_s(HORIZON_S)
        ward.sink = GatewayStore(Grade.PLAIN, ward.loop.time)
        pipeline = ward.pipeline()
        async with running_heartbeat(pipeline) as heartbeat:
            assert await Repairer(pipeline, heartbeat).run(["a"]) == {"a": "504: no answer"}

    ward.play(story())
    assert ward.entry("a").abandoned and ward.entry("a").suspicions == 1


def test_without_the_ledger_a_key_that_a_gateway_answered_becomes_suspect():
    outage = Outage()
    rig = outage.rig
    rig.sink = GatewayStore(Grade.PLAIN, rig.loop.time)
    rig.sink.back_at, rig.sink.takes_it = 1e9, True

    async def story() -> None:
        async with Running(rig):
            await outage.goes_down()
            await rig.send(body("a", 1))
            await rig.until(lambda: rig.sink.calls)
            rig.sink.back_at = 0.0
            outage.comes_back()
            await rig.until(lambda: not rig.queue)

    rig.play(story())
    assert [event.keys for event in rig.of(MarkedSuspect)] == [1]
