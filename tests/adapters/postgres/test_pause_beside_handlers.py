"""An operator does not wait for handlers that write in the ledger's transaction, and holds up nobody."""

import asyncio

import pytest

from adapters.postgres.handler_shop import handler_shop, put
from keywise import Change, Transaction
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.entry import LeaseTerms, LedgerPolicy
from running import run

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]


def test_a_pause_returns_while_a_handler_runs_and_other_keys_are_claimed():
    may_end = asyncio.Event()

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        await may_end.wait()

    async def main() -> None:
        async with handler_shop(handle, "a") as shop:
            await shop.until(lambda: shop.calls["a"], "the handler")
            async with PostgresLedger(PostgresDatabase(shop.url), "shop", LedgerPolicy()) as ledger:
                await ledger.pause(Pause("b"))
                # Another worker gets a key, and an operator resumes the first one.
                results = await ledger.claim([ChangeHeader("c", order_of(1))], LeaseTerms("another", 30.0))
                assert [claim.key for claim in results.granted] == ["c"]
                results = await ledger.claim([ChangeHeader("b", order_of(1))], LeaseTerms("another", 30.0))
                assert results.granted == []
                assert await ledger.resume("b", False)
            may_end.set()
            await shop.until_empty()
            assert (shop.calls["a"], shop.failed, shop.outages, await shop.stored()) == (1, {}, [], {"a": 1})

    run(main(), limit_s=60)


def test_the_era_is_not_raised_while_a_handler_runs_under_a_claim():
    may_end = asyncio.Event()

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        await may_end.wait()

    async def main() -> None:
        async with handler_shop(handle, "a") as shop:
            await shop.until(lambda: shop.calls["a"], "the handler")
            async with PostgresLedger(PostgresDatabase(shop.url), "shop", LedgerPolicy()) as ledger:
                assert await ledger.raise_era() is None
                may_end.set()
                await shop.until_empty()
                assert await ledger.raise_era() == 1

    run(main(), limit_s=60)
