"""Modes of keys as one process sees them: what is off works without a store, and a switch is seen all the same."""

import asyncio
import threading

import pytest

import keywise
from keywise import Claim
from keywise.core.errors import DatabaseError, LostError, SettingsError, UnavailableError
from keywise.core.events import Alarmed
from keywise.core.serial.contract import Mode, Switch
from keywise.serial import modes
from keywise.serial.modes import Modes
from running import awaited, run

ON = Switch(keys="a", mode=Mode.ON, at=1.0)


class Store:
    """Reads switches as it is told to, and counts how often."""

    def __init__(self, *switches: Switch) -> None:
        self.switches = switches
        self.trouble: Exception | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.now = 0.0
        self.reads = 0
        self.alarms: list[str] = []

    async def read(self):
        self.reads += 1
        await self.is_open.wait()
        if self.trouble is not None:
            raise self.trouble
        return self.now, self.switches

    def modes(self, default: Mode = Mode.OFF) -> Modes:
        return Modes(default, self.read, 2.0, lambda: self.now, lambda cause, advice: self.alarms.append(cause))


@pytest.fixture(autouse=True)
def short_looks(monkeypatch):
    monkeypatch.setattr(modes, "LOOK_S", 0.02)


@awaited
async def test_a_view_is_renewed_when_it_is_old():
    store = Store()
    view = store.modes()
    assert await view.of("a") is Mode.OFF
    store.switches = (ON,)
    store.now = 1.9
    assert (await view.of("a"), store.reads) == (Mode.OFF, 1)
    store.now = 2.1
    assert (await view.of("a"), store.reads) == (Mode.ON, 2)


@awaited
async def test_a_store_that_opens_slowly_is_waited_for_beside_the_calls():
    store = Store(ON)
    store.is_open.clear()
    view = store.modes()
    assert await asyncio.gather(view.of("a"), view.of("a")) == [Mode.OFF] * 2
    assert (await view.of("a"), store.reads) == (Mode.OFF, 1)
    store.is_open.set()
    await asyncio.wait([view._looking])
    assert (await view.of("a"), store.reads) == (Mode.ON, 1)


@awaited
async def test_a_caller_with_little_time_does_not_spend_it_on_a_look(monkeypatch):
    monkeypatch.setattr(modes, "LOOK_S", 60.0)
    store = Store(ON)
    store.is_open.clear()
    view = store.modes()
    async with asyncio.timeout(10):
        assert await view.of("a", 0.02) is Mode.OFF
    await view.close()
    assert view._looking.cancelled()


@pytest.mark.parametrize("trouble", [UnavailableError("away"), DatabaseError("broken"), TimeoutError()])
@awaited
async def test_a_look_that_fails_is_made_again_soon(trouble):
    store = Store(ON)
    store.trouble = trouble
    view = store.modes()
    assert [await view.of("a"), await view.of("a")] == [Mode.OFF] * 2
    assert store.reads == 1
    store.trouble = None
    store.now = 0.3
    assert await view.of("a") is Mode.ON


@awaited
async def test_a_store_that_is_broken_is_an_alarm_for_each_cause():
    store = Store(ON)
    view = store.modes()
    for store.now, store.trouble in ((0.0, DatabaseError("1")), (1.0, DatabaseError("1")), (2.0, DatabaseError("2"))):
        assert await view.of("a") is Mode.OFF
    assert [alarm.partition(" (")[0] for alarm in store.alarms] == ["DatabaseError: 1", "DatabaseError: 2"]


@awaited
async def test_settings_that_cannot_work_are_told_to_the_caller():
    store = Store()
    store.trouble = SettingsError("no such store")
    with pytest.raises(SettingsError, match="no such store"):
        await store.modes().of("a")


@awaited
async def test_off_works_while_the_store_is_broken(tmp_path):
    (tmp_path / "broken.db").write_text("this is no database " * 500)
    told = []
    async with keywise.App(f"sqlite:///{tmp_path}/broken.db", observers=[told.append]) as app:

        @app.serial("f", key=lambda request: request, mode="off")
        async def f(claim: Claim, request: str) -> int:
            return claim.token

        assert await f("a") == 0
    assert [event.pipeline for event in told if isinstance(event, Alarmed)] == ["f"]


@awaited
async def test_off_ends_with_the_deadline():
    async with keywise.App("memory://", observers=[]) as app:
        cancelled = []

        @app.serial("f", key=lambda request: request, mode="off", timeout="500ms")
        async def f(claim: Claim, request: str) -> None:
            if request == "own":
                raise TimeoutError("of the function")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(claim.key)
                raise

        with pytest.raises(LostError, match="deadline passed"):
            await f("a")
        assert cancelled == ["a"]
        with pytest.raises(TimeoutError, match="of the function"):
            await f("own")


@awaited
async def test_who_is_off_in_a_thread_waits_until_its_deadline_alone():
    async with keywise.App("memory://", observers=[]) as app:
        began, go_on = [], threading.Event()

        @app.serial("f", key=lambda request: request, mode="off", timeout="300ms", concurrency=1)
        def f(claim: Claim, request: str) -> None:
            began.append(request)
            go_on.wait(10)

        async with asyncio.timeout(5):
            for key in ("a", "b"):
                with pytest.raises(LostError, match="in its thread"):
                    await f(key)
        go_on.set()
        assert await f("c", timeout="10s") is None
        assert began == ["a", "c"]


def test_an_app_that_was_left_open_in_another_loop_can_be_closed():
    app = keywise.App("memory://", observers=[])

    @app.serial("f", key=lambda request: request, mode="off")
    async def f(claim: Claim, request: str) -> str:
        return request

    assert run(f("a")) == "a"
    run(f._modes.close())


@awaited
async def test_callers_that_have_waited_for_long_enough_go_on_in_their_order():
    store, order = Store(), []
    store.is_open.clear()
    view = store.modes()

    async def call(number: int) -> None:
        await view.of("a", 60.0)
        order.append(number)

    await asyncio.gather(*map(call, range(500)))
    assert order == sorted(order)
    await view.close()
