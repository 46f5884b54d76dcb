"""Calls of several keys share a transaction: what fails is undone alone, and each has its own answer."""

import asyncio
import threading
from collections import defaultdict

import keywise
from keywise import Claim, Transaction
from keywise.core.errors import ExpiredError, FailedError, TransientError
from running import awaited

KEYS = [f"k{number}" for number in range(12)]


def an_app() -> keywise.App:
    return keywise.App("memory://", observers=[])


def an_insert(app, seen, meet=None, **options):
    """A serial function that writes a row, and remembers who wrote in the same transaction."""

    @app.serial("f", key=str, transaction="60s", **options)
    async def f(claim: Claim, key: str, transaction: Transaction) -> int:
        database = transaction.connection
        rows = database.table("rows")
        database.set(rows, key, rows.get(key, 0) + 1)
        seen[id(transaction)].append((transaction, key))
        if meet is not None:
            await meet(key)
        return rows[key]

    return f


def most_at_once(seen) -> int:
    return max(len(calls) for calls in seen.values())


@awaited
async def test_calls_of_several_keys_share_a_transaction():
    async with an_app() as app:
        seen = defaultdict(list)
        f = an_insert(app, seen)
        for turn in (1, 2, 3):
            assert await asyncio.gather(*map(f, KEYS)) == [turn] * len(KEYS)
        assert most_at_once(seen) == len(KEYS)


@awaited
async def test_no_transaction_is_shared_by_functions_that_take_long():
    async with an_app() as app:
        seen = defaultdict(list)

        @app.serial("f", key=str, transaction="1ms", concurrency=20)
        async def f(claim: Claim, key: str, transaction: Transaction) -> None:
            seen[id(transaction)].append((transaction, key))
            await asyncio.to_thread(threading.Event().wait, 0.01)

        await f("first")
        await asyncio.gather(*map(f, KEYS))
        assert most_at_once(seen) == 1


@awaited
async def test_of_those_that_share_a_transaction_what_fails_is_undone_alone():
    async def meet(key):
        if key in KEYS[2:4]:
            raise ValueError(key)

    async with an_app() as app:
        seen = defaultdict(list)
        f = an_insert(app, seen, meet)
        await f(KEYS[0])
        answers = await asyncio.gather(*map(f, KEYS), return_exceptions=True)
        assert [key for key, answer in zip(KEYS, answers, strict=True) if isinstance(answer, FailedError)] == KEYS[2:4]
        assert set(f._turns.database.table("rows")) == {*KEYS} - {*KEYS[2:4]}
        assert most_at_once(seen) > 1


@awaited
async def test_of_those_that_share_a_transaction_what_is_tried_again_holds_up_nobody():
    tries = defaultdict(int)

    async def meet(key):
        tries[key] += 1
        if key == KEYS[1] and tries[key] < 3:
            raise TransientError(key)

    async with an_app() as app:
        f = an_insert(app, defaultdict(list), meet, backoff="1ms", backoff_max="2ms")
        assert await asyncio.gather(*map(f, KEYS)) == [1] * len(KEYS)
        assert tries == {key: 3 if key == KEYS[1] else 1 for key in KEYS}


@awaited
async def test_a_call_from_within_is_made_by_one_that_shares_nothing():
    async with an_app() as app, keywise.App("memory://", observers=[]) as other:
        seen = defaultdict(list)

        @other.serial("g", key=str)
        async def g(claim: Claim, key: str) -> str:
            return key

        async def meet(key):
            if key == KEYS[5]:
                assert await g(key) == key

        f = an_insert(app, seen, meet)
        assert await asyncio.gather(*map(f, KEYS)) == [1] * len(KEYS)
        assert most_at_once(seen) > 1
        seen.clear()
        assert await asyncio.gather(*map(f, KEYS)) == [2] * len(KEYS)
        assert most_at_once(seen) == 1, "nothing is shared by a function that makes calls"


@awaited
async def test_what_is_refused_with_others_is_run_apart():
    async with an_app() as app:
        seen = defaultdict(list)

        async def meet(key):
            # Somebody else takes the key while its function runs.
            if key == KEYS[1] and len(seen) == 2:
                lines = f._turns.database.lines["f"]
                f._merge._held.lose([lines.holds[key].token])

        f = an_insert(app, seen, meet)
        await f(KEYS[0])
        answers = await asyncio.gather(*(f(key, timeout="2s") for key in KEYS[1:]), return_exceptions=True)
        assert answers[1:] == [1] * len(KEYS[2:])


@awaited
async def test_what_takes_longer_than_its_deadline_is_undone_and_told_as_not_run():
    async def meet(key):
        if key == KEYS[3]:
            await asyncio.Event().wait()

    async with an_app() as app:
        f = an_insert(app, defaultdict(list), meet)
        calls = (f(key, timeout="300ms" if key == KEYS[3] else None) for key in KEYS)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[3], ExpiredError)
        assert answers[:3] + answers[4:] == [1] * (len(KEYS) - 1)
        assert set(f._turns.database.table("rows")) == {*KEYS} - {KEYS[3]}


@awaited
async def test_a_function_in_a_transaction_that_is_switched_off_runs_at_once():
    async with an_app() as app:
        f = an_insert(app, defaultdict(list), mode="off")
        assert await f(KEYS[0]) == 1 and await f(KEYS[0]) == 2
