"""Runs of serial functions: every turn ends with a reply inside of its deadline, whatever the function does."""

import asyncio
import math
import threading

import msgspec
import pytest

import keywise
from keywise import Claim, Transaction
from keywise.core.errors import ExpiredError, FailedError, LostError, RefusedError, TransientError, UnansweredError
from running import awaited


class Case(msgspec.Struct):
    key: str
    name: str = ""


def by_key(case: Case) -> str:
    return case.key


def an_app(**options) -> keywise.App:
    return keywise.App("memory://", observers=[], **options)


class OddError(BaseException):
    """Nothing that is an Exception."""


async def cancelled() -> None:
    """What a function meets that awaits a task which somebody has cancelled."""
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


@awaited
async def test_a_function_that_awaits_something_cancelled_has_failed_and_its_key_goes_on():
    async with an_app() as app:

        @app.serial("plain", key=by_key)
        async def plain(claim: Claim, case: Case) -> str:
            await cancelled() if case.name == "bad" else None
            return case.name

        @app.serial("atomic", key=by_key)
        async def atomic(claim: Claim, case: Case, transaction: Transaction) -> str:
            await cancelled() if case.name == "bad" else None
            return case.name

        @app.serial("thread", key=by_key)
        def thread(claim: Claim, case: Case) -> str:
            if case.name == "bad":
                raise asyncio.CancelledError
            return case.name

        for function in (plain, atomic, thread):
            names = ["1", "bad", "2"]
            async with asyncio.timeout(10):
                told = await asyncio.gather(*(function(Case("a", name)) for name in names), return_exceptions=True)
            assert told[::2] == names[::2] and isinstance(told[1], FailedError), function.name
            assert await function(Case("a", "3")) == "3"


@awaited
async def test_whatever_ends_the_task_of_a_run_all_of_its_turns_are_answered():
    async with an_app() as app:

        async def end(name: str) -> None:
            if name == "odd":
                raise OddError
            if name == "itself":
                asyncio.current_task().cancel()
                await asyncio.Event().wait()

        @app.serial("plain", key=by_key, run="60s")
        async def plain(claim: Claim, case: Case) -> str:
            await end(case.name)
            return case.name

        @app.serial("atomic", key=by_key)
        async def atomic(claim: Claim, case: Case, transaction: Transaction) -> str:
            await end(case.name)
            return case.name

        for name in ("odd", "itself"):
            async with asyncio.timeout(10):
                told = await asyncio.gather(*(plain(Case("a", one)) for one in (name, "2")), return_exceptions=True)
                assert isinstance(told[0], LostError) and told[1] == "2"
                cases = [Case("a", name), Case("a", "2"), Case("b", "3")]
                told = await asyncio.gather(*map(atomic, cases), return_exceptions=True)
                assert isinstance(told[0], FailedError) and "nothing of it happened" in str(told[0])
                assert told[1:] == ["2", "3"]
                assert [await plain(Case("a", "4")), await atomic(Case("a", "4"))] == ["4", "4"]


@awaited
async def test_a_function_that_waits_for_a_thread_does_not_begin_after_its_deadline():
    async with an_app() as app:
        go_on, begun = threading.Event(), []

        @app.serial("f", key=by_key, concurrency=1, switch=lambda key: "off" if key == "off" else "on")
        def f(claim: Claim, case: Case) -> str:
            begun.append(case.name)
            go_on.wait(10)
            return case.name

        first = asyncio.ensure_future(f(Case("off", "first")))
        with pytest.raises((ExpiredError, UnansweredError)):
            await f(Case("a", "late"), timeout="300ms")
        go_on.set()
        assert await f(Case("a", "next")) == "next"
        assert await first == "first" and begun == ["first", "next"]


@awaited
async def test_nobody_else_has_the_key_of_a_thread_that_goes_on_after_its_deadline():
    async with an_app() as app:
        second_began, met = threading.Event(), []

        @app.serial("f", key=by_key)
        def f(claim: Claim, case: Case) -> str:
            if case.name == "first":
                met.append(second_began.wait(0.6))
            else:
                second_began.set()
            return case.name

        first = asyncio.ensure_future(f(Case("a", "first"), timeout="200ms"))
        second = asyncio.ensure_future(f(Case("a", "second")))
        with pytest.raises((LostError, UnansweredError)):
            await first
        assert await second == "second" and met == [False]


@awaited
async def test_a_thread_sees_the_context_of_its_run_and_so_a_call_from_within_is_known():
    async with an_app() as app:
        loop = asyncio.get_running_loop()

        @app.serial("f", key=by_key)
        def f(claim: Claim, case: Case) -> str:
            try:
                return asyncio.run_coroutine_threadsafe(f(Case("a", "inner")), loop).result(10)
            except RefusedError as error:
                return str(error)

        async with asyncio.timeout(10):
            assert "would wait for itself" in await f(Case("a"))


@awaited
async def test_a_thread_that_ends_with_what_no_future_takes_has_failed():
    async with an_app() as app:

        @app.serial("f", key=by_key)
        def f(claim: Claim, case: Case) -> str:
            return next(iter(()))

        async with asyncio.timeout(10):
            with pytest.raises(FailedError, match="StopIteration"):
                await f(Case("a"))


@awaited
async def test_nothing_is_tried_again_that_would_begin_after_its_deadline():
    async with an_app() as app:
        tries = []

        @app.serial("plain", key=by_key, backoff="60s", backoff_max="60s", timeout="5s")
        async def plain(claim: Claim, case: Case) -> None:
            tries.append("plain")
            raise TransientError("later")

        @app.serial("atomic", key=by_key, backoff="60s", backoff_max="60s", timeout="5s")
        async def atomic(claim: Claim, case: Case, transaction: Transaction) -> None:
            tries.append("atomic")
            raise TransientError("later")

        for function in (plain, atomic):
            with pytest.raises(FailedError, match="TransientError: later"):
                await function(Case("a"))
        assert tries == ["plain", "atomic"]


@awaited
async def test_time_is_kept_to_store_the_answer():
    async with an_app() as app:
        kept_s = []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> None:
            [held] = f._merge._held._helds.values()
            kept_s.append(f._merge._calls[case.name].deadline - held.timeout.when())

        for timeout in ("1s", "10s"):
            await f(Case("a", timeout), id=timeout, timeout=timeout)
        assert 0 < kept_s[0] <= 0.05 and kept_s[1] == pytest.approx(0.1)


@awaited
async def test_turns_of_a_key_are_taken_together_only_while_its_function_is_quick():
    async with an_app() as app:

        @app.serial("f", key=by_key, run="200ms")
        async def f(claim: Claim, case: Case) -> int:
            if case.name == "slow":
                await asyncio.to_thread(threading.Event().wait, 0.25)
            return claim.token

        for _ in range(50):
            await f(Case("a"))
        assert len(set(await asyncio.gather(*(f(Case("a")) for _ in range(5))))) < 5
        await f(Case("a", "slow"))
        assert len(set(await asyncio.gather(*(f(Case("a")) for _ in range(5))))) == 5


@awaited
async def test_a_result_that_its_caller_could_not_read_is_told_as_such_and_not_stored():
    async with an_app() as app:
        results = {"text": "1", "nan": math.nan, "odd": object(), "half": "\ud800", "whole": 1}
        ran = []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> int:
            ran.append(case.name)
            return results[case.name]

        for name in ("text", "nan", "odd", "half"):
            for _ in range(2):
                with pytest.raises(FailedError, match="has run to its end, but its result"):
                    await f(Case("a", name), id=name)
        assert await f(Case("a", "whole")) == 1
        assert ran == [*results]


@awaited
async def test_a_stored_result_that_is_none_of_the_present_function_is_told_as_such():
    async with an_app() as app:

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> str:
            return "text"

        assert await f(Case("a"), id="1") == "text"
        f._serial._read_result = msgspec.json.Decoder(int).decode
        with pytest.raises(FailedError, match="has run, but its stored result"):
            await f(Case("a"), id="1")


def test_attempts_max_is_for_turns_that_were_lost_too():
    @an_app().serial("f", key=by_key, attempts_max=7)
    async def f(claim: Claim, case: Case, transaction: Transaction) -> None:
        """Nothing."""

    assert f.connect()._policy.attempts_max == 7
