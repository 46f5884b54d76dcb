"""Connections over which nothing comes any more, though nobody closed them, cost no claim and no attempt."""

import asyncio

import pytest

from adapters.postgres.benches import fresh
from adapters.postgres.handler_shop import HandlerShop, handler_shop, put
from keywise import Change, Transaction
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.core import events
from keywise.core.entry import LedgerPolicy
from running import run
from servers import shared
from servers.fault_proxy import fault_proxy_thread

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

LEASE_S = 9.0
LOOK_S = 0.05
SHORT = {"lease": LEASE_S, "margin": "1s"}
RENEWED = "select count(*) from keywise_active where token != 0 and lease_until > $1::float8"
NOW = "select extract(epoch from clock_timestamp())::float8"


async def until_renewed(shop: HandlerShop, since: float) -> None:
    """Wait until the worker has renewed a claim after a moment of the server's clock."""
    while not await shop.beside.fetchval(RENEWED, since + LEASE_S):
        await pause_s(LOOK_S)
        assert shop.calls["a"] == 1, "the claim was lost"


async def until_over(shop: HandlerShop, moment: float) -> None:
    """Wait until a moment of the server's clock has passed."""
    while await shop.beside.fetchval(NOW) < moment:
        await pause_s(LOOK_S)


async def pause_s(seconds: float) -> None:
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


def test_a_renewal_finds_a_connection_that_is_not_silent():
    """The handler runs for several leases, and every connection of the ledger goes silent meanwhile."""
    may_end = asyncio.Event()

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        await may_end.wait()

    async def main() -> None:
        with fault_proxy_thread(shared.postgres().port) as proxy:
            async with handler_shop(handle, "a", ledger_port=proxy.port, **SHORT) as shop:
                await shop.until(lambda: shop.calls["a"], "the handler")
                # The heartbeat has connections from here on.
                await until_renewed(shop, await shop.beside.fetchval(NOW))
                proxy.silence()
                silent_at = await shop.beside.fetchval(NOW)
                await until_renewed(shop, silent_at)
                await until_over(shop, silent_at + LEASE_S)
                assert (shop.calls["a"], shop.of(events.ClaimLost)) == (1, [])
                may_end.set()
                await shop.until_empty()
                # Its transaction had a silent connection, so that it ran once more.
                assert (shop.failed, shop.of(events.TookOver), await shop.letters()) == ({}, [], [])
                assert await shop.stored() == {"a": 1}

    run(main(), limit_s=60)


def test_a_claim_and_a_commit_are_repeated_on_a_connection_that_is_not_silent():
    """A session that was left behind in a transaction holds up nobody."""

    async def handle(change: Change[dict], transaction: Transaction) -> None:
        await put(change, transaction)
        if change.key in silenced:
            silenced.remove(change.key)
            silence()

    silenced = {"a", "d"}
    silence = lambda: None  # noqa: E731

    async def main() -> None:
        nonlocal silence
        with fault_proxy_thread(shared.postgres().port) as proxy:
            silence = proxy.silence
            async with handler_shop(handle, ledger_port=proxy.port, **SHORT) as shop:
                for key in "abcd":
                    await shop.send(key)
                    await shop.until_empty()
                    proxy.silence()
                assert (shop.failed, await shop.letters(), shop.of(events.TookOver)) == ({}, [], [])
                assert await shop.stored() == dict.fromkeys("abcd", 1)

    run(main(), limit_s=60)


def test_a_statement_of_a_handler_has_no_time_limit_of_keywise(monkeypatch):
    """Only `runtime_max` limits a handler."""

    async def main() -> None:
        url = shared.postgres().create_database(fresh("database"))
        async with PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy()) as ledger:
            monkeypatch.setattr("keywise.adapters.postgres.database.SLOW_S", 0.2)
            async with ledger.transaction() as transaction, transaction.savepoint():
                await transaction.connection.execute("select pg_sleep(0.5)")

    run(main())


def test_a_connection_that_begins_to_listen_is_not_given_up_with_the_idle_ones():
    """Idle connections are given up again and again while it begins; its statement is not broken off."""

    async def main() -> None:
        url = shared.postgres().create_database(fresh("database"))
        async with PostgresDatabase(url) as database:
            silent = await database.connected("silent")
            beginning = asyncio.create_task(database.bell("shop"))
            while not beginning.done():
                database._give_up(silent)
                await pause_s(0)
            bell = await beginning
            assert bell.is_set(), "the connection does not listen"

    run(main())
