"""Handlers that write inside the transaction: whatever they do to it, effects and marks stay together."""

import contextlib
from pathlib import Path

import pytest

from app.shop import Shop
from keywise import Change, Transaction
from keywise.core.errors import DatabaseError
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


def use_as_context(connection) -> None:
    with connection:
        connection.execute("insert into log values ('inner', 'x')")


def fail_inside_context(connection) -> None:
    with connection:
        raise ValueError("a handler that relies on the roll-back")


ENDINGS = {
    "commits": lambda connection: connection.commit(),
    "rolls back": lambda connection: connection.rollback(),
    "commits in words": lambda connection: connection.execute("commit"),
    "ends in words": lambda connection: connection.execute("END TRANSACTION"),
    "commits and begins again": lambda connection: connection.executescript("commit; begin"),
    "uses the connection as a context": use_as_context,
    "fails with the connection as a context": fail_inside_context,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_handler_that_ends_the_transaction_is_told_so_and_no_neighbour_is_harmed(tmp_path, ending):
    """Its change becomes a dead letter that says what not to do; all others are applied, once."""
    shop = logging_shop(tmp_path, ENDINGS[ending])
    run(work(shop))
    [letter] = run(shop.letters())
    assert letter.key == f"k{COUNT // 2}"
    assert "leave commit and rollback to keywise" in letter.cause
    assert effects(shop) == marks(shop) == sorted({f"k{number}" for number in range(COUNT)} - {letter.key})


def savepoint_in_vain(connection) -> None:
    connection.execute("savepoint mine")
    connection.execute("insert into log values ('in vain', 'x')")
    connection.execute("rollback to mine")
    connection.execute("release mine")


def test_a_handler_may_use_savepoints_of_its_own(tmp_path):
    shop = logging_shop(tmp_path, savepoint_in_vain)
    run(work(shop))
    assert effects(shop) == marks(shop) == sorted(f"k{number}" for number in range(COUNT))
