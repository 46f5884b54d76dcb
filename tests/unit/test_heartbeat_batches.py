"""Work under several claims stops when one of them ends, whatever becomes of the others."""

from unit.test_heartbeat import LEASE_S, MARGIN_S, RUNTIME_MAX_S, Holder, on_virtual_time, pass_s


def test_a_lost_claim_stops_a_call_that_carries_others_too():
    """Rule 7: the others are renewed in the same beat, and that must not give the lost one more time."""

    async def story(holder: Holder) -> None:
        lost, kept = await holder.take("a", "b")
        await holder.ledger.release([lost])
        await holder.take("a", owner="w2")
        assert await holder.is_stopped_at([lost, kept], 60.0) == 10.0

    on_virtual_time(story)


def test_a_call_stops_at_the_first_deadline_of_its_claims():
    """Rule 7: a claim past runtime_max is not renewed; its younger neighbour must not keep the call going."""

    async def story(holder: Holder) -> None:
        [old] = await holder.take("a")
        await pass_s(60.0)
        [young] = await holder.take("b")
        last_renewal = RUNTIME_MAX_S - 10.0
        assert await holder.is_stopped_at([old, young]) == last_renewal + LEASE_S - MARGIN_S

    on_virtual_time(story)
