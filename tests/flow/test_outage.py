"""When the ledger counts as down, and when as back; and a ledger that is opened late."""

from contextlib import AsyncExitStack

import pytest

from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.limits import PACED_KEYS_MAX, Pace, Rate
from keywise.flow.degraded.lazy_ledger import LazyLedger
from keywise.flow.outage import Outage
from running import awaited


class Watch:
    """An outage with a clock of its own, and what it told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[tuple[object, ...]] = []
        self.outage = Outage(
            5.0,
            lambda: self.now,
            down=lambda seconds, cause: self.told.append(("down", seconds, cause)),
            back=lambda seconds: self.told.append(("back", seconds)),
        )


def test_it_is_down_after_the_grace_and_told_once():
    watch = Watch()
    for watch.now in (10.0, 12.0, 15.0, 20.0):
        watch.outage.failed("gone")
    assert (watch.told, watch.outage.seconds) == ([("down", 5.0, "gone")], 10.0)
    watch.now = 30.0
    watch.outage.answered()
    watch.outage.answered()
    assert watch.told == [("down", 5.0, "gone"), ("back", 20.0)]
    assert (watch.outage.is_down, watch.outage.seconds) == (False, 0.0)


def test_an_answer_within_the_grace_begins_it_anew():
    watch = Watch()
    for watch.now in (0.0, 4.0):
        watch.outage.failed("gone")
    watch.outage.answered()
    for watch.now in (4.5, 9.0):
        watch.outage.failed("gone")
    assert watch.told == []


def test_a_ledger_that_can_only_be_read_is_not_back():
    watch = Watch()
    watch.outage.failed("read-only")
    watch.outage.answered(at_write=False)
    watch.now = 6.0
    watch.outage.failed("read-only")
    assert watch.outage.is_down
    watch.outage.answered(at_write=False)
    assert watch.outage.is_down
    watch.outage.answered()
    assert not watch.outage.is_down


def test_what_only_a_look_has_missed_a_look_can_find_again():
    watch = Watch()
    watch.outage.failed("gone", at_write=False)
    watch.outage.answered(at_write=False)
    assert watch.outage.seconds == 0.0


class Server:
    """A ledger that cannot be opened a few times."""

    losses = 3

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.opened = 0

    async def __aenter__(self) -> "Server":
        if self.errors:
            raise self.errors.pop(0)
        self.opened += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        self.opened -= 1

    async def now(self) -> float:
        return 7.0


@awaited
async def test_a_ledger_is_opened_by_the_first_call_that_reaches_it():
    server = Server(UnavailableError("down"), UnavailableError("down"))
    async with AsyncExitStack() as stack:
        lazy = LazyLedger(server, stack)
        await lazy.try_to_open()
        with pytest.raises(UnavailableError):
            await lazy.part(server).now()
        assert (await lazy.part(server).now(), await lazy.part(server).now(), server.opened) == (7.0, 7.0, 1)
        assert lazy.part(server).losses == 3
    assert server.opened == 0


@awaited
async def test_any_other_trouble_is_told_at_start():
    async with AsyncExitStack() as stack:
        with pytest.raises(DatabaseError):
            await LazyLedger(Server(DatabaseError("corrupt")), stack).try_to_open()


def test_a_pace_without_a_rate_is_none():
    pace = Pace(None)
    pace.charge("a", 0.0)
    assert pace.wait_s("a", 0.0) == 0.0


def test_a_pace_lets_a_burst_through_and_forgets_what_is_over():
    pace = Pace(Rate(2, per="10s"))
    for _ in range(2):
        assert pace.wait_s("a", 0.0) <= 0
        pace.charge("a", 0.0)
    assert pace.wait_s("a", 0.0) == 5.0
    for number in range(PACED_KEYS_MAX):
        pace.charge(f"k{number}", 20.0)
    assert pace.wait_s("a", 0.0) <= 0
