"""What is claimed and waits for a worker: live before bulk but not for ever, and whoever can work is woken."""

import asyncio

from keywise.flow.lanes import LIVE_BEFORE_BULK
from keywise.flow.leased.dispatch import CLAIM_WINDOW_S, LIVE_S, ClaimWindow, DispatchQueue
from running import run


async def steps(count: int = 5) -> None:
    """Let everything that can go on go on."""
    for _ in range(count):
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0)


def filled(live: int, bulk: int) -> DispatchQueue[str]:
    jobs: DispatchQueue[str] = DispatchQueue()
    for number in range(bulk):
        jobs.put(f"bulk {number}", is_bulk=True)
    for number in range(live):
        jobs.put(f"live {number}")
    return jobs


def test_live_jobs_go_first_and_each_line_in_its_order():
    async def story() -> list[str | None]:
        jobs = filled(2, 2)
        return [await jobs.get() for _ in range(4)]

    assert run(story()) == ["live 0", "live 1", "bulk 0", "bulk 1"]


def test_bulk_has_its_turn_however_many_live_jobs_wait():
    """A worker of its own may be all there is, and live work may never end."""

    async def story() -> list[str | None]:
        jobs = filled(3 * LIVE_BEFORE_BULK, 2)
        return [await jobs.get() for _ in range(2 * LIVE_BEFORE_BULK + 2)]

    order = run(story())
    assert [place for place, job in enumerate(order) if job.startswith("bulk")] == [8, 17]


def test_a_worker_for_live_jobs_leaves_bulk_alone():
    async def story() -> None:
        jobs = filled(0, 1)
        waiting = asyncio.ensure_future(jobs.get(live_only=True))
        await steps()
        assert not waiting.done()
        jobs.put("live")
        assert (await waiting, await jobs.get()) == ("live", "bulk 0")

    run(story())


def test_while_live_jobs_come_so_many_bulk_calls_run_and_no_more():
    now = 100.0

    async def story() -> None:
        nonlocal now
        jobs: DispatchQueue[str] = DispatchQueue(1, lambda: now)
        for name in ("bulk 0", "bulk 1", "bulk 2", "bulk 3"):
            jobs.put(name, is_bulk=True)
        jobs.put("live 0")
        assert [await jobs.get(), await jobs.get()] == ["live 0", "bulk 0"]
        waiting = asyncio.ensure_future(jobs.get())
        await steps()
        assert not waiting.done()
        jobs.put("live 1")
        assert await waiting == "live 1"
        waiting = asyncio.ensure_future(jobs.get())
        jobs.done(is_bulk=False)
        await steps()
        assert not waiting.done()
        jobs.done(is_bulk=True)
        assert await waiting == "bulk 1"
        now += LIVE_S + 0.1
        assert [await jobs.get(), await jobs.get()] == ["bulk 2", "bulk 3"]

    run(story(), limit_s=5)


def test_a_worker_that_waits_notices_by_itself_that_no_live_jobs_come_any_more(monkeypatch):
    monkeypatch.setattr("keywise.flow.leased.dispatch.LIVE_S", 0.01)

    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue(1)
        for name in ("bulk 0", "bulk 1"):
            jobs.put(name, is_bulk=True)
        jobs.put("live")
        assert [await jobs.get() for _ in range(3)] == ["live", "bulk 0", "bulk 1"]

    run(story(), limit_s=5)


def test_after_the_close_bulk_jobs_are_handed_out_though_live_ones_came():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue(1)
        for name in ("bulk 0", "bulk 1"):
            jobs.put(name, is_bulk=True)
        jobs.put("live")
        jobs.close()
        assert [await jobs.get() for _ in range(4)] == ["live", "bulk 0", "bulk 1", None]

    run(story(), limit_s=5)


def test_what_follows_in_a_line_is_taken_along_as_far_as_it_fits():
    jobs = filled(4, 1)
    assert jobs.take_beside(lambda job: job != "live 2", 10, is_bulk=False) == ["live 0", "live 1"]
    assert jobs.take_beside(lambda job: True, 1, is_bulk=False) == ["live 2"]
    assert jobs.take_beside(lambda job: True, 10, is_bulk=True) == ["bulk 0"]


def test_after_the_close_the_rest_is_handed_out_and_then_nothing():
    async def story() -> None:
        jobs = filled(1, 1)
        jobs.close()
        assert [await jobs.get(), await jobs.get(), await jobs.get()] == ["live 0", "bulk 0", None]

    run(story())


def test_a_worker_for_live_jobs_does_not_wait_for_bulk_after_the_close():
    async def story() -> None:
        jobs = filled(0, 1)
        jobs.close()
        assert await jobs.get(live_only=True) is None

    run(story())


def test_the_close_tells_everybody_who_waits():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        waiting = [asyncio.ensure_future(jobs.get(live_only=live_only)) for live_only in (True, False, False)]
        await steps()
        jobs.close()
        assert await asyncio.gather(*waiting) == [None, None, None]

    run(story(), limit_s=5)


def test_each_job_wakes_a_worker():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        waiting = [asyncio.ensure_future(jobs.get()) for _ in range(3)]
        await steps()
        for name in "abc":
            jobs.put(name)
        assert sorted(await asyncio.gather(*waiting)) == ["a", "b", "c"]

    run(story(), limit_s=5)


def test_a_bulk_job_does_not_lie_there_while_a_worker_is_idle():
    """The one that was woken for it took the live job that came right after; another has to be woken."""

    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        waiting = [asyncio.ensure_future(jobs.get(live_only=live_only)) for live_only in (False, True, False)]
        await steps()
        jobs.put("bulk", is_bulk=True)
        jobs.put("live")
        await steps()
        first, for_live, second = waiting
        assert (first.done(), for_live.done(), second.done()) == (True, False, True)
        assert (first.result(), second.result()) == ("live", "bulk")
        jobs.close()
        assert await for_live is None

    run(story(), limit_s=5)


def test_a_worker_that_is_cancelled_while_it_waits_takes_nothing_along():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        gone, stays = (asyncio.ensure_future(jobs.get()) for _ in range(2))
        await steps()
        gone.cancel()
        await steps()
        jobs.put("a")
        assert await stays == "a"

    run(story(), limit_s=5)


def test_a_worker_that_is_cancelled_just_after_it_was_woken_wakes_another():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        gone, stays = (asyncio.ensure_future(jobs.get()) for _ in range(2))
        await steps()
        jobs.put("a")
        gone.cancel()
        assert await stays == "a"
        assert gone.cancelled()

    run(story(), limit_s=5)


def test_a_job_for_which_a_cancelled_worker_was_woken_is_not_left_to_one_that_may_not_take_it():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        gone, for_live, stays = (asyncio.ensure_future(jobs.get(live_only=one)) for one in (False, True, False))
        await steps()
        jobs.put("a", is_bulk=True)
        gone.cancel()
        assert await stays == "a"
        for_live.cancel()

    run(story(), limit_s=5)


def test_workers_that_come_and_go_leave_nothing_behind():
    async def story() -> None:
        jobs: DispatchQueue[str] = DispatchQueue()
        for _ in range(100):
            waiting = asyncio.ensure_future(jobs.get())
            await steps(1)
            waiting.cancel()
            await steps(1)
        assert len(jobs._waiting) == 0

    run(story(), limit_s=20)


def test_quick_work_is_claimed_further_ahead_up_to_a_limit():
    window = ClaimWindow(workers=4, batch_max=1, most=1000)
    assert window.limit == 8
    limits = []
    for moment in range(7):
        window.adapt(waiting=0, now=moment * CLAIM_WINDOW_S / 2)
        limits.append(window.limit)
    assert limits == [8, 16, 32, 64, 128, 256, 256], "the first look has nothing to compare with"


def test_slow_work_is_claimed_less_far_ahead_but_never_less_than_workers_need():
    window = ClaimWindow(workers=4, batch_max=1, most=1000)
    for moment in range(4):
        window.adapt(waiting=0, now=moment * CLAIM_WINDOW_S / 2)
    limits = []
    for moment in range(4):
        window.adapt(waiting=30, now=10.0 + moment * 2 * CLAIM_WINDOW_S)
        limits.append(window.limit)
    assert limits == [32, 16, 8, 8]


def test_a_quiet_source_changes_nothing_and_nor_do_workers_that_have_enough():
    window = ClaimWindow(workers=4, batch_max=1, most=1000)
    window.adapt(waiting=0, now=0.0)
    window.adapt(waiting=0, now=60.0)
    window.adapt(waiting=6, now=60.0 + CLAIM_WINDOW_S / 2)
    assert window.limit == 8


def test_no_more_is_claimed_ahead_than_a_batch_may_hold():
    window = ClaimWindow(workers=1, batch_max=1000, most=1000)
    for moment in range(3):
        window.adapt(waiting=0, now=moment * CLAIM_WINDOW_S / 2)
    assert window.limit == 1000
    assert ClaimWindow(workers=16, batch_max=1, most=5).limit == 5


def test_it_is_time_to_claim_when_half_of_the_room_is_free_or_a_worker_may_soon_have_nothing():
    window = ClaimWindow(workers=4, batch_max=1, most=1000)
    assert not window.is_due(free=3, waiting=4)
    assert window.is_due(free=4, waiting=4)
    assert window.is_due(free=1, waiting=3)
