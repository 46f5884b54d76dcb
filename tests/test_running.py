"""The helper that runs coroutines gives back what they return, and ends those that hang."""

import asyncio

import pytest

from running import run


def test_run_returns_what_the_coroutine_returns():
    async def answer() -> int:
        return 42

    assert run(answer()) == 42


def test_run_ends_a_coroutine_that_hangs():
    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(hang(), limit_s=0.01)
