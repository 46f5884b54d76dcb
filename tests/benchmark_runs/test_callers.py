"""The callers of the benchmark of serial functions notice work that was not done one at a time."""

import asyncio
from collections import Counter

import pytest
from benchmarks.callers import Load, call_all

from running import awaited

LOAD = Load(callers=4, keys=2, seconds=0.05)


@awaited
async def test_answers_of_work_done_one_at_a_time_are_measured():
    taken: Counter[str] = Counter()

    async def ask(key: str) -> int:
        await asyncio.to_thread(int)
        taken[key] += 1
        return taken[key]

    called = await call_all(ask, LOAD)
    assert called.calls_per_s > 0 and 0 < called.p50_ms <= called.p99_ms


@awaited
async def test_work_done_side_by_side_on_one_key_is_an_error():
    taken: Counter[str] = Counter()

    async def ask(key: str) -> int:
        before = taken[key]
        await asyncio.to_thread(int)
        taken[key] = before + 1
        return taken[key]

    with pytest.raises(AssertionError, match="not worked on one at a time"):
        await call_all(ask, LOAD)
