"""Serial functions: callers wait for their turn and get their answers, whatever happens to the function."""

import asyncio
import threading

import msgspec
import pytest

import keywise
from keywise import Claim, Transaction
from keywise.core.clock import boot_time
from keywise.core.errors import (
    ExpiredError,
    FailedError,
    LostError,
    OutcomeUnknownError,
    RefusedError,
    RequestCancelledError,
    TransientError,
    UnansweredError,
)
from keywise.core.serial.contract import Ending, Mode, Switch
from running import awaited


class Case(msgspec.Struct):
    key: str
    name: str = ""


def by_key(case: Case) -> str:
    return case.key


def an_app(**options) -> keywise.App:
    return keywise.App("memory://", observers=[], **options)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(threading.Event().wait, 0.002))])


@awaited
async def test_calls_of_one_key_run_one_at_a_time_in_their_order():
    async with an_app() as app:
        running, seen = set(), []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> str:
            assert claim.key not in running
            running.add(claim.key)
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])
            running.discard(claim.key)
            seen.append(case.name)
            return case.name

        names = [f"{number}" for number in range(30)]
        assert await asyncio.gather(*(f(Case("a", name)) for name in names)) == names
        assert seen == names


@awaited
async def test_keys_run_side_by_side():
    async with an_app() as app:
        meeting = asyncio.Barrier(3)

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> None:
            await meeting.wait()

        async with asyncio.timeout(10):
            await asyncio.gather(*(f(Case(key)) for key in "abc"))


@awaited
async def test_the_same_id_is_run_once_and_has_the_same_answer():
    async with an_app() as app:
        calls = []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> int:
            calls.append(case)
            return len(calls)

        at_once = await asyncio.gather(*(f(Case("a"), id="1") for _ in range(5)))
        assert [*at_once, await f(Case("a"), id="1")] == [1] * 6
        assert await f(Case("a"), id="2") == 2
        with pytest.raises(RefusedError, match="id '1'"):
            await f(Case("a", "other"), id="1")


@awaited
async def test_the_second_request_is_judged_against_the_first_if_that_was_feasible():
    """Existing schedule + CR1 + CR2 if CR1 is feasible, existing schedule + CR2 if it is not."""
    async with an_app() as app:
        schedule: dict[str, list[int]] = {"full": [9], "free": [1]}

        @app.serial("accept", key=by_key)
        async def accept(claim: Claim, case: Case) -> list[int] | None:
            before, hours = list(schedule[case.key]), int(case.name)
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])
            if sum(before) + hours > 10:
                return None
            schedule[case.key] = [*before, hours]
            return schedule[case.key]

        assert await asyncio.gather(accept(Case("free", "2")), accept(Case("free", "3"))) == [[1, 2], [1, 2, 3]]
        assert await asyncio.gather(accept(Case("full", "2")), accept(Case("full", "1"))) == [None, [9, 1]]


@awaited
async def test_whatever_a_function_raises_is_a_typed_error_for_its_caller():
    async with an_app() as app:
        tries = []

        @app.serial("f", key=by_key, attempts_max=3, backoff="1ms")
        async def f(claim: Claim, case: Case) -> object:
            tries.append(case.name)
            if case.name == "value":
                raise ValueError("no")
            if case.name == "passing" and tries.count("passing") < 3:
                raise TransientError("later")
            if case.name == "never":
                raise TransientError("later")
            if case.name == "unknown":
                raise OutcomeUnknownError("sent")
            return object() if case.name == "odd" else "done"

        with pytest.raises(FailedError, match="ValueError: no"):
            await f(Case("a", "value"), id="1")
        with pytest.raises(FailedError, match="ValueError: no"):
            await f(Case("a", "value"), id="1")
        assert tries.count("value") == 1
        assert await f(Case("a", "passing")) == "done"
        with pytest.raises(FailedError, match="TransientError"):
            await f(Case("a", "never"))
        assert tries.count("never") == 3
        with pytest.raises(LostError, match="sent"):
            await f(Case("a", "unknown"))
        with pytest.raises(FailedError, match="TypeError"):
            await f(Case("a", "odd"))


@awaited
async def test_who_waits_too_long_is_told_so_and_never_run():
    async with an_app() as app:
        go_on, ran = asyncio.Event(), []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> None:
            ran.append(case.name)
            await go_on.wait()

        first = asyncio.ensure_future(f(Case("a", "first")))
        await until(lambda: ran)
        with pytest.raises(ExpiredError):
            await f(Case("a", "late"), timeout="2s", id="late")
        go_on.set()
        await first
        await f(Case("a", "third"))
        assert ran == ["first", "third"]
        await f(Case("a", "late"), id="late")
        assert ran[-1] == "late"


@awaited
async def test_what_runs_past_its_deadline_is_broken_off():
    async with an_app() as app:
        ends = []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(case.name)

        with pytest.raises(LostError, match="deadline"):
            await f(Case("a", "1"), timeout="1s")
        assert ends == ["1"]


@awaited
async def test_a_thread_keeps_its_key_and_its_answer_is_there_later():
    async with an_app() as app:
        go_on = threading.Event()

        @app.serial("f", key=by_key)
        def f(claim: Claim, case: Case) -> str:
            go_on.wait(10)
            return case.name

        with pytest.raises((UnansweredError, LostError)):
            await f(Case("a", "1"), id="1", timeout="100ms")
        go_on.set()
        assert await f(Case("a", "2")) == "2"


@awaited
async def test_a_caller_that_gives_up_takes_its_request_along():
    async with an_app() as app:
        go_on, ran = asyncio.Event(), []

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> None:
            ran.append(case.name)
            await go_on.wait()

        first = asyncio.ensure_future(f(Case("a", "first")))
        await until(lambda: ran)
        second = asyncio.ensure_future(f(Case("a", "second"), id="second"))
        lines = f._turns.database.lines["f"]
        await until(lambda: "second" in lines.ids)
        second.cancel()
        await asyncio.wait([second])
        await until(lambda: lines.records[lines.ids["second"]].reply is not None)
        go_on.set()
        await first
        assert ran == ["first"]


@awaited
async def test_a_call_that_would_wait_for_itself_is_refused_with_the_keys():
    async with an_app() as app:

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case) -> str:
            if case.name == "end":
                return "done"
            inner, _, rest = case.name.partition(">")
            try:
                return await f(Case(inner, rest or "end"))
            except RefusedError as error:
                return str(error)

        assert await f(Case("a", "b")) == "done"
        assert "f 'a'" in await f(Case("a", "a"))
        told = await f(Case("a", "b>a"))
        assert "would wait" in told and "'a'" in told


@awaited
async def test_a_circle_of_two_functions_is_refused():
    async with an_app() as app:
        both = asyncio.Barrier(2)

        @app.serial("f", key=by_key, timeout="10s")
        async def f(claim: Claim, case: Case) -> str:
            if case.name == "inner":
                return "f"
            await both.wait()
            return await g(Case("y", "inner"))

        @app.serial("g", key=by_key, timeout="10s")
        async def g(claim: Claim, case: Case) -> str:
            if case.name == "inner":
                return "g"
            await both.wait()
            return await f(Case("x", "inner"))

        answers = await asyncio.gather(f(Case("x")), g(Case("y")), return_exceptions=True)
        refused = [one for one in answers if isinstance(one, FailedError)]
        assert len(refused) == 1 and "f 'x'" in str(refused[0]) and "g 'y'" in str(refused[0])


@awaited
async def test_a_key_function_may_refuse():
    def one_day(case: Case) -> str:
        if case.key == "two days":
            raise RefusedError("spans two dates")
        return case.key

    async with an_app() as app:

        @app.serial("f", key=one_day)
        async def f(claim: Claim, case: Case) -> str:
            return claim.key

        with pytest.raises(RefusedError, match="spans two dates"):
            await f(Case("two days"))
        with pytest.raises(RefusedError, match="key function"):
            await f(None)


@awaited
async def test_off_runs_side_by_side_without_the_store():
    async with an_app() as app:
        meeting = asyncio.Barrier(2)

        @app.serial("f", key=by_key, switch=lambda key: "off", turns="nowhere://")
        async def f(claim: Claim, case: Case) -> str:
            await meeting.wait()
            return case.name

        assert await asyncio.gather(f(Case("a", "1")), f(Case("a", "2"))) == ["1", "2"]


@awaited
async def test_observe_counts_what_overlaps():
    told = []
    app = keywise.App("memory://", observers=[told.append])
    async with app:
        meeting = asyncio.Barrier(2)

        @app.serial("f", key=by_key, mode="observe")
        async def f(claim: Claim, case: Case) -> str:
            await meeting.wait()
            return case.name

        assert await asyncio.gather(f(Case("a", "1")), f(Case("a", "2"))) == ["1", "2"]
        assert [event.overlaps for event in told if isinstance(event, keywise.core.events.Overlapped)] == [1]


@awaited
async def test_a_switch_in_the_store_is_heeded():
    async with an_app() as app:
        meeting, modes = asyncio.Barrier(2), []

        @app.serial("f", key=by_key, view="1ms")
        async def f(claim: Claim, case: Case) -> str:
            if case.name == "meet":
                await meeting.wait()
            modes.append(claim.token != 0)
            return case.name

        await f(Case("a"))
        operator = f._turns.operator

        def is_view_old() -> bool:
            return boot_time() - f._modes._asked_at > f.settings.view_s

        for mode in (Mode.OBSERVE, Mode.OFF):
            await operator.switch(Switch(keys="*", is_pattern=True, mode=mode))
            await until(is_view_old)
            await asyncio.gather(f(Case("a", "meet")), f(Case("a", "meet")))
        await operator.switch(None, "*", True)
        await until(is_view_old)
        await f(Case("a"))
        assert modes == [True, True, True, False, False, True]


@awaited
async def test_an_operator_can_cancel_what_waits():
    async with an_app() as app:
        go_on, ran = asyncio.Event(), []

        @app.serial("f", key=by_key, poll="10ms")
        async def f(claim: Claim, case: Case) -> None:
            ran.append(case.name)
            await go_on.wait()

        first = asyncio.ensure_future(f(Case("a", "first")))
        await until(lambda: ran)
        second = asyncio.ensure_future(f(Case("a", "second"), id="second"))
        await until(lambda: "second" in f._turns.database.lines["f"].ids)
        await f._turns.withdraw(["second"], Ending.CANCELLED, "by ann")
        with pytest.raises(RequestCancelledError, match="by ann"):
            await second
        go_on.set()
        await first
        assert ran == ["first"]


@awaited
async def test_work_in_a_transaction_stands_with_its_answer():
    async with an_app() as app:

        @app.serial("f", key=by_key)
        async def f(claim: Claim, case: Case, transaction: Transaction) -> int:
            database = transaction.connection
            rows = database.table("rows")
            database.set(rows, case.name, True)
            if case.name == "bad":
                raise ValueError("no")
            return len(rows)

        answers = await asyncio.gather(*(f(Case("a", name)) for name in ("1", "bad", "2")), return_exceptions=True)
        assert answers[0] == 1 and isinstance(answers[1], FailedError) and answers[2] == 2
        assert set(f._turns.database.table("rows")) == {"1", "2"}
