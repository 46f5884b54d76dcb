"""A transaction of a SQLite file that is no longer open marks nothing, and a commit under way is waited for."""

import asyncio
import threading

import pytest

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import UnavailableError


def run(scenario, tmp_path):
    async def main() -> None:
        async with SqliteLedger(SqliteDatabase(str(tmp_path / "shop.db")), "shop", LedgerPolicy()) as ledger:
            await scenario(ledger)

    asyncio.run(main())


def test_a_mark_after_a_rollback_of_the_file_is_refused_and_leaves_nothing(tmp_path):
    """As after a full disk: without a transaction, each statement would be there to stay at once."""

    async def scenario(ledger: SqliteLedger) -> None:
        header = ChangeHeader("a", order_of(1))
        with pytest.raises(UnavailableError):
            async with ledger.transaction() as transaction:
                await transaction.decide([header])
                transaction.connection.execute("rollback")
                await transaction.mark([header])
        assert await ledger.inspect("a") is None

    run(scenario, tmp_path)


def test_a_transaction_that_the_file_rolled_back_does_not_end_as_committed(tmp_path):
    async def scenario(ledger: SqliteLedger) -> None:
        header = ChangeHeader("a", order_of(1))
        with pytest.raises(UnavailableError, match="rolled back"):
            async with ledger.transaction() as transaction:
                await transaction.decide([header])
                await transaction.mark([header])
                transaction.connection.execute("rollback")
        assert await ledger.inspect("a") is None

    run(scenario, tmp_path)


def test_a_cancelled_write_is_waited_for_because_nobody_else_may_use_the_connection(tmp_path):
    async def scenario(ledger: SqliteLedger) -> None:
        begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

        def act(connection: object) -> None:
            begun.set()
            assert may_end.wait(10.0)
            ended.set()

        writing = asyncio.create_task(ledger.database.write(act))
        assert await asyncio.to_thread(begun.wait, 10.0)
        writing.cancel()
        following = asyncio.create_task(ledger.database.write(lambda connection: ended.is_set()))
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert ended.is_set()
        assert await following

    run(scenario, tmp_path)
