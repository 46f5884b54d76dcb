"""Work under several claims stops when one of them ends, whatever becomes of the others."""

import asyncio

from flow.test_heartbeat import LEASE_S, MARGIN_S, RUNTIME_MAX_S, Holder, on_virtual_time, pass_s


def test_a_lost_claim_stops_a_call_that_carries_others_too():
    """Rule 7: the others are renewed in the same beat, and that must not give the lost one more time."""

    async def story(holder: Holder) -> None:
        lost, kept = await holder.take("a", "b")
        await holder.ledger.release([lost])
        await holder.take("a", owner="w2")
        assert await holder.is_stopped_at([lost, kept], 60.0) == 10.0

    on_virtual_time(story)


def test_a_call_stops_at_the_first_deadline_of_its_claims():
    """Rule 7: a renewal of one of them must not keep the call going."""

    async def story(holder: Holder) -> None:
        one, other = await holder.take("a", "b")
        stopped = asyncio.create_task(holder.is_stopped_at([one, other]))
        await pass_s(5.0)
        assert await holder.heartbeat.begin(holder.ledger, other)
        holder.ledger.is_away = True
        assert await stopped == LEASE_S - MARGIN_S

    on_virtual_time(story)


def test_waiting_for_a_worker_uses_up_none_of_the_time_that_work_may_take():
    """Changes are claimed ahead: as long as others begin, a claim waits for its turn, and then has all of its time."""

    async def story(holder: Holder) -> None:
        first, second, last = await holder.take("a", "b", "c")
        for claim in (first, second):
            with holder.heartbeat.limit([claim]):
                await pass_s(RUNTIME_MAX_S - 1)
            holder.heartbeat.drop([claim])
        with holder.heartbeat.limit([last]):
            await pass_s(RUNTIME_MAX_S - 1)
        assert holder.heartbeat.left_s([last]) > 0

    on_virtual_time(story)


def test_what_waits_outlasts_a_call_that_hangs_and_is_not_renewed_for_ever():
    """A loop that is blocked for good begins nothing any more, and others get what it has claimed."""

    async def story(holder: Holder) -> None:
        hung, waiting = await holder.take("a", "b")
        await holder.is_stopped_at([hung])
        assert holder.heartbeat.left_s([waiting]) > 0
        await pass_s(RUNTIME_MAX_S + 2 * LEASE_S)
        assert holder.heartbeat.left_s([waiting]) <= 0

    on_virtual_time(story)
