"""A handler of any shape may say "later", in both words; what it wrote in its transaction is not kept."""

import time
from collections.abc import Callable

import pytest

from adapters.function.handler_shop import bodies, handle_all, keys, logged, marked, shop_with
from adapters.function.test_signatures import SHAPES
from keywise import Change, Snooze, Transaction
from keywise.core import events
from running import run

COUNT, DELAY_S = 6, 0.4


class Later:
    """Says "later" when it first meets a key, and notes when it met it."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.met: dict[str, list[float]] = {}

    def __call__(self, changes: list[Change]) -> Snooze | None:
        is_first = any(change.key not in self.met for change in changes)
        for change in changes:
            self.met.setdefault(change.key, []).append(time.monotonic())
        if is_first and self.word == "raise":
            raise Snooze(DELAY_S)
        return Snooze(DELAY_S) if is_first else None


def plain_handlers(later: Later) -> dict[str, Callable]:
    async def async_one(change: Change) -> Snooze | None:
        return later([change])

    def plain_one(change: Change) -> Snooze | None:
        return later([change])

    async def async_many(changes: list[Change]) -> Snooze | None:
        return later(changes)

    def plain_many(changes: list[Change]) -> Snooze | None:
        return later(changes)

    return dict(zip(SHAPES, (async_one, plain_one, async_many, plain_many), strict=True))


def transacted_handlers(later: Later) -> dict[str, Callable]:
    def write(changes: list[Change], transaction: Transaction) -> Snooze | None:
        rows = [(change.key, change.version) for change in changes]
        transaction.connection.executemany("insert into log values (?, ?)", rows)
        return later(changes)

    async def async_one(change: Change, transaction: Transaction) -> Snooze | None:
        return write([change], transaction)

    def plain_one(change: Change, transaction: Transaction) -> Snooze | None:
        return write([change], transaction)

    async def async_many(changes: list[Change], transaction: Transaction) -> Snooze | None:
        return write(changes, transaction)

    def plain_many(changes: list[Change], transaction: Transaction) -> Snooze | None:
        return write(changes, transaction)

    return dict(zip(SHAPES, (async_one, plain_one, async_many, plain_many), strict=True))


@pytest.mark.parametrize("word", ["return", "raise"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("handlers", [plain_handlers, transacted_handlers])
def test_a_snoozed_change_is_handled_again_not_before_its_time(tmp_path, handlers, shape, word):
    """It costs no attempt, though only one is allowed."""
    later = Later(word)
    shop = shop_with(handlers(later)[shape], tmp_path, attempts_max=1)
    assert run(handle_all(shop, *bodies(COUNT))) == []
    assert set(later.met) == keys(COUNT)
    assert all(second - first >= DELAY_S for first, second in later.met.values())
    assert [event.key for event in shop.emitted(events.Snoozed)].count("k1") == 1
    assert shop.emitted(events.Failed) == []
    assert marked(shop) == sorted((key, 1) for key in keys(COUNT))
    if handlers is transacted_handlers:
        assert logged(shop) == marked(shop), "each effect once"
