"""The helper that runs coroutines gives back what they return, and ends those that hang."""

import asyncio

import pytest

from running import SLOWER, run, scaled


def test_run_returns_what_the_coroutine_returns():
    async def answer() -> int:
        return 42

    assert run(answer()) == 42


def test_run_ends_a_coroutine_that_hangs():
    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(hang(), limit_s=0.01)


def test_a_limit_is_longer_than_a_quiet_machine_needs():
    assert scaled(10.0) >= 10.0 * SLOWER
