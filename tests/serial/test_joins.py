"""Calls from within others that ask for an id which is asked for already: none of them waits for itself."""

import asyncio

import msgspec
import pytest

import keywise
from keywise import Claim
from keywise.core.errors import FailedError, RefusedError
from keywise.core.serial.contract import Mode, Switch
from running import awaited


class Case(msgspec.Struct):
    key: str
    name: str = ""


def an_app() -> keywise.App:
    return keywise.App("memory://", observers=[])


def by_key(case: Case) -> str:
    return case.key


@awaited
async def test_a_call_cannot_wait_for_its_own_id():
    async with an_app() as app:

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> str:
            with pytest.raises(RefusedError, match=r"wait for itself.*'a'"):
                await f(case, id="1")
            return "done"

        async with asyncio.timeout(10):
            assert await f(Case("a"), id="1") == "done"


@awaited
async def test_two_calls_cannot_wait_for_each_other():
    async with an_app() as app:
        is_joined = asyncio.Event()

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> str:
            if case.key == "a":
                joining = asyncio.ensure_future(f(Case("b"), id="B"))
                while (await f._turns.operator.record("B")).joiners != (claim.token,):
                    await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])
                is_joined.set()
                return await joining
            await is_joined.wait()
            return await f(Case("a", "again"), id="A again")

        async def first() -> str:
            await until_running(f, "B")
            return await f(Case("a"), id="A")

        async with asyncio.timeout(10):
            answers = await asyncio.gather(first(), f(Case("b"), id="B"), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, FailedError) and "'a' → f 'b'" in str(answer)


async def until_running(f, id: str) -> None:
    while f._turns is None or (record := await f._turns.operator.record(id)) is None or not record.token:
        await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])


@awaited
async def test_who_joins_gets_the_same_answer():
    async with an_app() as app:
        go_on = asyncio.Event()

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> str:
            if case.key == "a":
                joining = asyncio.ensure_future(f(Case("b"), id="B"))
                while not (await f._turns.operator.record("B")).joiners:
                    await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])
                go_on.set()
                return await joining
            await go_on.wait()
            return "of b"

        async def first() -> str:
            await until_running(f, "B")
            return await f(Case("a"))

        async with asyncio.timeout(10):
            assert await asyncio.gather(first(), f(Case("b"), id="B")) == ["of b", "of b"]


@awaited
async def test_an_observed_call_does_not_wait_for_itself_when_its_key_is_switched_on():
    async with an_app() as app:

        @app.serial("f", key=by_key, mode="observe", view="1ms")
        async def f(claim: Claim, case: Case) -> str:
            if not case.name:
                return "done"
            await f._turns.operator.switch(Switch(keys="a", mode=Mode.ON, at=1.0))
            with pytest.raises(RefusedError, match=r"wait for itself.*'a'"):
                await f(Case("a"))
            return "done"

        async with asyncio.timeout(10):
            assert await f(Case("a", "outer")) == "done"
