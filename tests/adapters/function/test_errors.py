"""What an error of a handler does to its change: dead at once, tried again, or held until its lease has run out."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.function.handler_shop import SHORT, bodies, handle_all, keys, logged, marked, passed, shop_with
from app.shop import Shop
from keywise import Change, Claim, OutcomeUnknownError, PermanentError, Transaction, TransientError
from keywise.core.clock import boot_time
from keywise.core.entry import Entry
from keywise.core.events import DeadLettered, Failed, Refused, TookOver
from running import run

ERRORS: dict[str, Callable[[], Exception]] = {
    "transient": lambda: TransientError("later"),
    "any other": lambda: ValueError("what?"),
    "unknown": lambda: OutcomeUnknownError("no answer"),
    "connection": lambda: ConnectionResetError("gone"),
    "timeout": lambda: TimeoutError("too long"),
}
UNKNOWN = ("unknown", "connection", "timeout")
"""After these a write may still land."""


class Raising:
    """Raises for the key `bad`, so many times; notes when it was called for which key and version."""

    def __init__(self, error: Callable[[], Exception], times: int = 1000) -> None:
        self.calls: list[tuple[str, int]] = []
        self.moments: list[float] = []
        self._error = error
        self._times = times

    def __call__(self, change: Change) -> None:
        self.calls.append((change.key, change.version))
        if change.key == "bad":
            self.moments.append(boot_time())
            if len(self.moments) <= self._times:
                raise self._error()

    def plain(self) -> Callable:
        async def handle(change: Change) -> None:
            self(change)

        return handle

    def transacted(self) -> Callable:
        async def handle(change: Change, transaction: Transaction) -> None:
            transaction.connection.execute("insert into log values (?, ?)", (change.key, change.version))
            self(change)

        return handle


BAD, GOOD = {"key": "bad", "version": 1}, {"key": "good", "version": 1}


async def handled(shop: Shop, *sent: dict) -> tuple[list[str], Entry | None]:
    """The causes of all dead letters, and what is remembered of the bad key."""
    letters = await handle_all(shop, *sent)
    return [letter.cause for letter in letters], await shop.entry("bad")


def test_a_permanent_error_makes_a_dead_letter_at_once(tmp_path):
    raising = Raising(lambda: PermanentError("no such shelf"))
    causes, entry = run(handled(shop_with(raising.plain(), tmp_path), BAD, GOOD))
    line = Raising.__call__.__code__.co_firstlineno + 5
    assert causes == [
        f"PermanentError: no such shelf (tests/adapters/function/test_errors.py, line {line}, in __call__)"
    ]
    assert sorted(raising.calls) == [("bad", 1), ("good", 1)]
    assert entry is None, "nothing was written, so nothing is in doubt"


def in_a_thread(raising: Raising) -> Callable:
    def handle(change: Change) -> None:
        raising(change)

    return handle


@pytest.mark.parametrize("way", [Raising.plain, Raising.transacted, in_a_thread])
def test_a_dead_letter_and_each_failed_attempt_have_the_whole_traceback(tmp_path, way):
    raising = Raising(lambda: ValueError("what?"))
    shop = shop_with(way(raising), tmp_path, attempts_max=2)
    [letter] = run(handle_all(shop, BAD))
    [failed], [dead] = shop.emitted(Failed), shop.emitted(DeadLettered)
    assert failed.traceback == dead.traceback == letter.traceback
    lines = letter.traceback.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: what?")
    assert "in handle" in lines[1], "it begins with the handler, not with the code that calls it"
    assert "in __call__" in letter.traceback


@pytest.mark.parametrize("name", ["transient", "any other"])
def test_other_errors_are_tried_again_without_waiting_for_the_lease(tmp_path, name):
    raising = Raising(ERRORS[name], times=3)
    shop = shop_with(raising.plain(), tmp_path, lease="20s")
    causes, entry = run(handled(shop, BAD, GOOD))
    assert causes == []
    assert raising.calls.count(("bad", 1)) == 4
    assert (entry.mark, entry.suspicions, entry.unknown) == ((0, 1, 0), 0, None)
    assert [event.attempts for event in shop.emitted(Failed)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["transient", "any other"])
def test_a_change_that_fails_too_often_is_a_dead_letter(tmp_path, name):
    """What a handler wrote before an error of its own is unknown to everybody, so the key is suspect then."""
    raising = Raising(ERRORS[name])
    causes, entry = run(handled(shop_with(raising.plain(), tmp_path, attempts_max=3), BAD, GOOD))
    error = ERRORS[name]()
    [cause] = causes
    assert cause.startswith(f"{type(error).__name__}: {error} (tests/")
    assert sorted(raising.calls) == [*[("bad", 1)] * 3, ("good", 1)]
    assert entry is None if name == "transient" else entry.suspicions == 1


@pytest.mark.parametrize("name", UNKNOWN)
def test_after_a_lost_answer_the_lease_runs_out_first_and_the_key_is_suspect(tmp_path, name):
    raising = Raising(ERRORS[name], times=1)
    shop = shop_with(raising.plain(), tmp_path, **SHORT)
    causes, entry = run(handled(shop, BAD, GOOD))
    assert causes == []
    first, second = raising.moments
    assert second - first > 0.45, "the call may land as long as its lease lasts"
    assert (entry.mark, entry.suspicions) == ((0, 1, 0), 1)
    assert [event.key for event in shop.emitted(TookOver)] == ["bad"]


@pytest.mark.parametrize("name", UNKNOWN[:2])
def test_answers_that_are_lost_too_often_make_a_dead_letter_and_a_suspect(tmp_path, name):
    raising = Raising(ERRORS[name])
    causes, entry = run(handled(shop_with(raising.plain(), tmp_path, attempts_max=2, **SHORT), BAD, GOOD))
    assert causes == ["the outcome of the last of 2 attempts is unknown"]
    assert raising.calls.count(("bad", 1)) == 2
    assert (entry.mark, entry.token) == (None, 0)
    assert entry.suspicions > 0


@pytest.mark.parametrize("name", [*ERRORS, "permanent"])
def test_in_the_transaction_every_error_is_clean(tmp_path, name):
    """Whatever was raised, the writes are taken back: no lease is waited for, no key is suspect."""
    error = ERRORS.get(name, lambda: PermanentError("no"))
    raising = Raising(error)
    shop = shop_with(raising.transacted(), tmp_path, attempts_max=3, lease="20s")
    causes, entry = run(handled(shop, BAD, GOOD))
    [cause] = causes
    assert cause.startswith(f"{type(error()).__name__}: {error()} (")
    assert raising.calls.count(("bad", 1)) == (1 if name == "permanent" else 3)
    assert logged(shop) == marked(shop) == [("good", 1)]
    assert entry is None


@pytest.mark.parametrize("name", ["any other", "connection"])
def test_an_older_change_waits_elsewhere_until_the_newer_one_is_committed(tmp_path, name):
    """The newer write may have landed though it failed, so another worker does not write the older one after it."""
    raising = Raising(ERRORS[name], times=2)
    slow = SHORT | {"backoff": "300ms", "backoff_max": "300ms"}
    newer = shop_with(raising.plain(), tmp_path, queue="newer", **slow)
    older = shop_with(raising.plain(), tmp_path, queue="older", **slow)

    async def main() -> list[str]:
        await newer.app.send("shop", {"key": "bad", "version": 2})
        async with asyncio.TaskGroup() as group:
            working = group.create_task(newer.work_until_empty())
            while not raising.calls:
                await passed(0.01)
            causes, _ = await handled(older, BAD, GOOD)
            await working
        await newer.app.close()
        return causes

    assert run(main()) == []
    assert [version for key, version in raising.calls if key == "bad"] == [2, 2, 2]
    assert older.emitted(Refused), "it was asked for meanwhile"
    assert marked(older) == [("bad", 2), ("good", 1)]


@pytest.mark.parametrize("name", ["transient", "any other", "permanent"])
def test_after_a_dead_letter_the_next_older_change_has_its_turn(tmp_path, name):
    error = ERRORS.get(name, lambda: PermanentError("no"))
    raising = Raising(error, times=1)
    shop = shop_with(raising.plain(), tmp_path, attempts_max=1)
    [cause] = run(handled(shop, BAD, {"key": "bad", "version": 2}))[0]
    assert cause.startswith(f"{type(error()).__name__}: {error()} (")
    assert raising.calls == [("bad", 2), ("bad", 1)]
    assert marked(shop) == [("bad", 1)]


COUNT = 40


def batch_shop(folder: Path, refuse: Callable[[str], None], **options: object) -> tuple[Shop, list[set[str]]]:
    """A shop whose handler takes lists; it remembers which it took, and raises for a list with a bad change."""
    taken: list[set[str]] = []

    def handle(changes: list[Change], claims: Claim) -> None:
        assert [change.key for change in changes] == [claim.key for claim in claims]
        for change in changes:
            refuse(change.key)
        taken.append({change.key for change in changes})

    return shop_with(handle, folder, **options), taken


@pytest.mark.parametrize("error", [ValueError("bad"), TransientError("bad"), PermanentError("bad")])
def test_a_bad_change_in_a_list_is_found_by_halving_and_the_others_are_applied(tmp_path, error):
    calls: list[str] = []

    def refuse(key: str) -> None:
        calls.append(key)
        if key in ("k7", "k31"):
            raise error

    shop, taken = batch_shop(tmp_path, refuse, attempts_max=1)
    letters = run(handle_all(shop, *bodies(COUNT)))
    assert sorted(letter.key for letter in letters) == ["k31", "k7"]
    assert all(letter.cause.startswith(f"{type(error).__name__}: bad (") for letter in letters)
    assert set().union(*taken) == {key for key, _ in marked(shop)} == keys(COUNT) - {"k7", "k31"}
    assert sum(map(len, taken)) == COUNT - 2, "no good change was in two lists that went well"


def test_a_list_of_unknown_outcome_is_tried_again_one_by_one(tmp_path):
    """Halving at once would write while the first call may still land."""

    def refuse(key: str) -> None:
        if key == "k7":
            raise ConnectionResetError("gone")

    shop, taken = batch_shop(tmp_path, refuse, attempts_max=2, **SHORT)
    [letter] = run(handle_all(shop, *bodies(10)))
    assert (letter.key, letter.cause) == ("k7", "the outcome of the last of 2 attempts is unknown")
    assert set().union(*taken) == {key for key, _ in marked(shop)} == keys(10) - {"k7"}
    assert all(len(some) == 1 for some in taken if some & keys(10))


def test_a_bad_change_in_a_list_with_the_transaction_is_found_by_halving(tmp_path):
    def handle(changes: list[Change], transaction: Transaction) -> None:
        rows = [(change.key, change.version) for change in changes]
        transaction.connection.executemany("insert into log values (?, ?)", rows)
        if {"k7", "k31"} & {change.key for change in changes}:
            raise OSError("bad")

    shop = shop_with(handle, tmp_path, attempts_max=1)
    letters = run(handle_all(shop, *bodies(COUNT)))
    assert sorted(letter.key for letter in letters) == ["k31", "k7"]
    assert logged(shop) == marked(shop) == sorted((key, 1) for key in keys(COUNT) - {"k7", "k31"})
