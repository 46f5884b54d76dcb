"""Handlers that write inside the transaction: whatever they do to it, effects and marks stay together."""

import contextlib
from pathlib import Path

import pytest

from integration.shops import Shop
from keywise import Change, Transaction
from keywise.errors import DatabaseError
from running import run

COUNT = 50


def logging_shop(folder: Path, act) -> Shop:
    """A shop whose handler appends each change to a log, and does something more to the one in the middle."""
    shop = Shop(folder)
    shop.execute("create table log (key text, body text)")
    pipeline = shop.app.pipeline("shop", key="key", version="version", poll="50ms", backoff="10ms", batch_max=COUNT)

    @pipeline.source(shop.url).apply
    async def handle(change: Change, transaction: Transaction) -> None:
        transaction.connection.execute("insert into log values (?, 'x')", (change.key,))
        if change.key == f"k{COUNT // 2}":
            act(transaction.connection)

    return shop


def effects(shop: Shop) -> list[str]:
    return sorted(key for (key,) in shop.rows("select key from log"))


def marks(shop: Shop) -> list[str]:
    return sorted(key for (key,) in shop.rows("select key from keywise_marks"))


async def work(shop: Shop, *, limit_s: float = 20.0) -> None:
    await shop.app.send("shop", *({"key": f"k{number}", "version": 1} for number in range(COUNT)))
    try:
        await shop.work_until_empty(limit_s=limit_s)
    finally:
        await shop.app.close()


def test_a_disk_that_is_full_for_one_handler_loses_nothing_of_the_batch(tmp_path):
    """SQLite rolls the whole transaction back by itself; none of its changes may be marked then."""
    shop = logging_shop(
        tmp_path, lambda connection: connection.execute("insert into log values (?, ?)", ("big", "x" * 1_000_000))
    )

    async def main() -> None:
        async with shop.opened() as pipeline:
            async with pipeline.ledger.database.transaction() as connection:
                [pages] = connection.execute("pragma page_count").fetchone()
                connection.execute(f"pragma max_page_count = {pages + 20}")
            with contextlib.suppress(TimeoutError, DatabaseError):
                await work(shop, limit_s=3.0)

    run(main())
    assert effects(shop) == marks(shop)


ENDINGS = {
    "commits": lambda connection: connection.commit(),
    "rolls back": lambda connection: connection.rollback(),
    "commits and begins again": lambda connection: connection.executescript("commit; begin"),
    "uses the connection as a context": lambda connection: connection.__exit__(None, None, None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_handler_that_ends_the_transaction_is_told_so_and_no_neighbour_is_lost(tmp_path, ending):
    """The error says what not to do, and nothing is marked whose effect is not there."""
    shop = logging_shop(tmp_path, ENDINGS[ending])
    told: list[str] = []
    try:
        run(work(shop, limit_s=5.0))
    except (DatabaseError, TimeoutError) as error:
        told.append(str(error))
    told += [event.cause for event in shop.events if hasattr(event, "cause")]
    assert any("leave commit and rollback to keywise" in cause for cause in told), told[:3]
    lost = set(marks(shop)) - set(effects(shop))
    assert lost == set(), "marked without an effect"
