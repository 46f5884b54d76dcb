"""Calls from within serial functions: who waits for another turn takes up no room."""

import asyncio

from keywise import Claim
from running import awaited
from serial.faulty_store import serial


@awaited
async def test_more_calls_from_within_than_can_run_side_by_side():
    meeting = asyncio.Barrier(4)

    async def f(claim: Claim, request: dict) -> int:
        depth = request["depth"]
        if depth == 3:
            await meeting.wait()
        return 1 + await nested({"k": f"{request['k']}>", "depth": depth - 1}) if depth else 0

    nested = serial(f, concurrency=4, timeout="10s")
    calls = (nested({"k": f"{number}", "depth": 3}) for number in range(4))
    assert await asyncio.gather(*calls) == [3] * 4
    await nested.close()


@awaited
async def test_only_so_many_run_side_by_side_that_wait_for_nobody():
    running, most = set(), []

    async def f(claim: Claim, request: dict) -> None:
        if request["within"]:
            await nested({"k": f"within {request['k']}", "within": False})
            return
        running.add(claim.key)
        most.append(len(running))
        await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(int))])
        running.discard(claim.key)

    nested = serial(f, concurrency=3, timeout="10s")
    await asyncio.gather(*(nested({"k": f"{number}", "within": number % 2 == 0}) for number in range(20)))
    assert max(most) == 3
    await nested.close()
