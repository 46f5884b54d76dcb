"""Dead letters in Redis: more and larger ones at once than a server takes in one step."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from adapters.redis.benches import fresh
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger import ledger as redis_ledger
from keywise.adapters.redis.ledger import working_set as redis_book
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import LeaseTerms, LedgerPolicy
from keywise.core.transfer import TransferPage
from running import run
from servers import shared
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

LARGE = DeadLetter(cause="broken", body=b"b" * 600_000, key="a")
SMALL = DeadLetter(cause="broken", body=b"", key="a")


@pytest.fixture
def narrow(monkeypatch) -> Iterator[RedisServer]:
    """One that takes 1 MB in one argument."""
    monkeypatch.setattr(redis_book, "LETTER_BYTES_MAX", 1_000_000)
    with redis_server(**{"proto-max-bulk-len": "1mb"}) as server:
        yield server


@asynccontextmanager
async def ledger_on(server: RedisServer, name: str = "shop") -> AsyncIterator[RedisLedger]:
    async with RedisLedger(RedisDatabase(server.url), name, LedgerPolicy()) as ledger:
        yield ledger


def test_large_letters_are_kept_a_few_at_a_time(narrow):
    async def story() -> None:
        async with ledger_on(narrow) as ledger:
            assert await ledger.dead_letter([DeadLetterRequest(LARGE)] * 4) == []
            claims = (
                await ledger.claim([ChangeHeader(key, order_of(1)) for key in "abcd"], LeaseTerms("w1", 60.0))
            ).granted
            assert await ledger.dead_letter([DeadLetterRequest(LARGE, claim) for claim in claims]) == []
            assert (await ledger.counts()).dead == 8
            await ledger.transfer.add(TransferPage(dead_letters=[(1.0, LARGE)] * 3))
            assert (await ledger.counts()).dead == 11
            assert [letter for _, _, letter in await ledger.dead_letters(20)] == [LARGE] * 11

    run(story())


def test_many_letters_are_kept_and_dropped_a_few_at_a_time(narrow, monkeypatch):
    monkeypatch.setattr(redis_book, "LETTERS_MAX", 7)
    monkeypatch.setattr(redis_ledger, "DELETE_AT_ONCE", 7)

    async def story() -> None:
        async with ledger_on(narrow) as ledger:
            assert await ledger.dead_letter([DeadLetterRequest(SMALL)] * 30) == []
            assert (await ledger.counts()).dead == 30
            assert await ledger.delete_dead_letters(range(1, 50)) == 30
            assert (await ledger.counts()).dead == 0

    run(story())


def test_a_letter_that_is_dropped_while_letters_are_carried_off_is_left_out():
    async def story() -> None:
        async with ledger_on(shared.redis(), fresh("scope")) as ledger:
            await ledger.dead_letter([DeadLetterRequest(SMALL)] * 3)
            real = ledger._server.run

            async def run(*command):
                if command[0] == "HMGET":
                    await ledger.delete_dead_letters([2])
                return await real(*command)

            ledger._server.run = run
            page = await ledger.transfer.page("letters:0", 10)
            assert [letter for _, letter in page.dead_letters] == [SMALL] * 2

    run(story())
