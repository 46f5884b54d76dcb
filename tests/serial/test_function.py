"""Calls of serial functions at the door: what is refused there, before anybody else can suffer from it."""

import asyncio
import json
import math

import pytest

import keywise
from keywise import Change, Claim, Transaction
from keywise.core.errors import ExpiredError, RefusedError, SettingsError
from running import awaited

HALF = json.loads(r'"\ud800"')
LONGEST = {"id": 256, "asked_by": 512}


def an_app(url: str = "memory://") -> keywise.App:
    return keywise.App(url, observers=[])


def an_echo(app: keywise.App):
    @app.serial("echo", key=lambda request: request["key"])
    async def echo(claim: Claim, request: dict) -> str:
        return claim.key

    return echo


def an_outer(app: keywise.App, mode: str):
    @app.serial("outer", key=lambda request: request["key"], mode=mode)
    async def outer(claim: Claim, request: dict, transaction: Transaction) -> str:
        return await outer({"key": request["inner"]}) if "inner" in request else claim.key

    return outer


@awaited
async def test_text_that_a_store_cannot_keep_is_refused_and_holds_up_nobody(tmp_path):
    wrong = [HALF, "a\0", 17, b"x", ("x",)]
    for url in ("memory://", f"sqlite:///{tmp_path}/a.db"):
        async with an_app(url) as app:
            echo = an_echo(app)
            for name, longest in LONGEST.items():
                for text in (*wrong, "x" * (longest + 1), "☃" * (longest // 3 + 1)):
                    with pytest.raises(RefusedError, match=name):
                        await echo({"key": "a"}, **{name: text})
                for text in ("x" * longest, "☃" * (longest // 3), "'\"\\;--% \u202e🐘\n"):
                    assert await echo({"key": "a"}, **{name: text}) == "a"
            for key in (*wrong[:2], b"x", "", "☃" * 171, (HALF, "b")):
                with pytest.raises(RefusedError, match="key"):
                    await echo({"key": key})
            with pytest.raises(RefusedError, match="id"):
                await echo({"key": "a"}, id="")
            async with asyncio.timeout(10):
                assert await echo({"key": "a"}, id="last") == "a"


@awaited
async def test_a_request_that_cannot_be_stored_is_refused():
    async with an_app() as app:
        echo = an_echo(app)
        for value in (object(), HALF):
            with pytest.raises(RefusedError, match="cannot be stored"):
                await echo({"key": "a", "value": value})


@awaited
async def test_a_timeout_that_is_no_time_is_refused_and_one_that_is_over_says_so():
    async with an_app() as app:
        echo = an_echo(app)
        for timeout in (math.nan, "nan", "soon", True):
            with pytest.raises(SettingsError, match="duration"):
                await echo({"key": "a"}, timeout=timeout)
        for timeout in (0, -1, "0s", -math.inf):
            with pytest.raises(ExpiredError, match="over before it begins"):
                await echo({"key": "a"}, timeout=timeout, id="1")
        for timeout in (math.inf, 1e300, "7d"):
            assert await echo({"key": "a"}, timeout=timeout, id="1") == "a"


@awaited
async def test_a_call_from_within_a_transaction_of_its_store_is_refused_and_holds_up_nobody(tmp_path):
    """It would wait for the end of its own caller's transaction."""
    for url in ("memory://", f"sqlite:///{tmp_path}/b.db"):
        for mode in ("on", "observe", "off"):
            async with an_app(url) as app, asyncio.timeout(10):
                echo, outer = an_echo(app), an_outer(app, mode)
                calls = [outer({"key": "a", "inner": "b"}), outer({"key": "c"}), echo({"key": "b"})]
                told = await asyncio.gather(*calls, return_exceptions=True)
            assert "within a transaction of its own store" in str(told[0]), (url, mode)
            assert told[1:] == ["c", "b"]


@awaited
async def test_what_a_function_leaves_behind_may_call_once_its_transaction_is_over():
    async with an_app() as app, an_app() as other:
        echo, over, left = an_echo(app), asyncio.Event(), []

        async def later() -> str:
            await over.wait()
            return await echo({"key": "b"})

        @other.serial("elsewhere", key=str)
        async def elsewhere(claim: Claim, key: str) -> str:
            return key if key == "first" else await echo({"key": key})

        @app.serial("outer", key=str)
        async def outer(claim: Claim, key: str, transaction: Transaction) -> str:
            left.append(asyncio.ensure_future(later()))
            # It is opened here.
            return await elsewhere("first")

        async with asyncio.timeout(10):
            assert await outer("a") == "first"
            assert await elsewhere("c") == "c"
            over.set()
            assert await left[0] == "b"


@awaited
async def test_a_handler_that_writes_in_the_ledgers_transaction_is_refused_too():
    async with an_app() as app:
        echo, told = an_echo(app), []
        orders = app.pipeline("orders", key="key")
        orders.source("memory://")

        @orders.apply
        async def sell(change: Change[dict], transaction: Transaction) -> None:
            try:
                await echo(change.value, timeout="5s")
            except RefusedError as error:
                told.append(str(error))
            app.stop()

        await app.send("orders", {"key": "a"})
        async with asyncio.timeout(20):
            await app.run("orders", handle_signals=False)
        assert len(told) == 1 and "within a transaction of its own store" in told[0]
