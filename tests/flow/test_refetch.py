"""A plain `refetch` function runs beside the event loop: one that hangs keeps its thread, and nothing else."""

import asyncio
import threading

import pytest

from keywise import App
from keywise.core.errors import KeywiseError
from keywise.flow.refetch import THREADS, in_thread
from running import run


def test_a_plain_function_that_hangs_does_not_block_the_event_loop():
    go_on = threading.Event()
    refetch = in_thread(lambda key: go_on.wait() and {"id": key})

    async def story() -> object:
        waiting = asyncio.ensure_future(refetch("a"))
        await asyncio.wait([waiting], timeout=0)
        go_on.set()  # With a blocked loop, this line would never be reached.
        return await waiting

    assert run(story()) == {"id": "a"}


def test_a_function_that_hangs_keeps_its_thread_until_it_ends():
    go_on = threading.Event()
    refetch = in_thread(lambda key: go_on.wait())

    async def story() -> None:
        for _ in range(THREADS):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await refetch("a")
        with pytest.raises(KeywiseError, match="time limit"):
            await refetch("a")
        go_on.set()
        while True:
            try:
                assert await refetch("b") is True
                return
            except KeywiseError:
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)

    run(story())


def test_a_call_waits_for_a_thread_that_another_one_still_uses():
    """`keywise reconcile` reads many keys at a time."""
    refetch = in_thread(lambda key: key)

    async def story() -> list[str]:
        return await asyncio.gather(*(refetch(str(number)) for number in range(3 * THREADS)))

    assert run(story()) == [str(number) for number in range(3 * THREADS)]


def test_what_it_raises_is_passed_on():
    def refetch(key: str) -> None:
        raise LookupError(key)

    async def story() -> None:
        with pytest.raises(LookupError, match="a"):
            await in_thread(refetch)("a")

    run(story())


def test_a_stop_iteration_is_an_answer_too():
    """A future does not accept one: without care, the repair would wait for ever."""
    refetch = in_thread(lambda key: next(iter(())))

    async def story() -> None:
        async with asyncio.timeout(30):
            await refetch("a")

    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        run(story())
    assert isinstance(raised.value.__cause__, StopIteration)


def test_a_coroutine_function_stays_on_the_loop():
    async def refetch(key: str) -> str:
        return threading.current_thread().name

    assert in_thread(refetch) is refetch


def test_a_pipeline_calls_a_plain_refetch_beside_its_loop():
    app = App("memory://")
    pages = app.pipeline("pages", key="id").source("memory://").sink("memory://?grade=plain")
    pages.refetch(lambda key: threading.current_thread().name)

    async def story() -> object:
        async with app.open("pages") as pipeline:
            assert pipeline.refetch is not None
            return await pipeline.refetch("a")

    assert run(story()) == "keywise-refetch"
