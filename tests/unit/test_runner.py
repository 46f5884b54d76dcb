"""Runs of serial functions: every turn ends with a reply inside of its deadline, whatever the function does."""

import asyncio

import msgspec

import keywise
from keywise import Claim, Transaction
from keywise.errors import FailedError, LostError
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
