"""Many who change the same things of one Redis ledger at once, and more keys at once than one step tells."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import RedisError

from adapters.redis.benches import fresh
from keywise.adapters.redis.database import RedisDatabase, redis_errors
from keywise.adapters.redis.ledger import ledger as redis_ledger
from keywise.adapters.redis.ledger import scope as redis_scope
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Commit, LeaseTerms, LedgerPolicy, RefusalReason
from keywise.core.errors import UnavailableError
from keywise.core.limits import Rate
from keywise.testing.conformance.benches.redis import RedisBench
from running import run
from servers import shared

pytestmark = pytest.mark.server("redis")

TERMS = LeaseTerms("w1", 60.0)
POLICY = LedgerPolicy()


@asynccontextmanager
async def two_ledgers(policy: LedgerPolicy = POLICY) -> AsyncIterator[tuple[RedisLedger, RedisLedger]]:
    name, url = fresh("crowd"), shared.redis().url
    async with (
        RedisLedger(RedisDatabase(url), name, policy) as one,
        RedisLedger(RedisDatabase(url), name, policy) as other,
    ):
        yield one, other


def headers(*keys: str, version: int = 1) -> list[ChangeHeader]:
    return [ChangeHeader(key, order_of(version)) for key in keys]


def test_what_many_set_at_once_is_all_there():
    async def story() -> None:
        async with two_ledgers() as ledgers:
            pausing = [ledgers[n % 2].control_store.pause(Pause(f"k{n}")) for n in range(30)]
            raising = [ledgers[n % 2].control_store.raise_era() for n in range(6)]
            told = await asyncio.gather(*pausing, *raising)
            controls = await ledgers[0].control_store.controls()
            assert {pause.keys for pause in controls.pauses} == {f"k{n}" for n in range(30)}
            assert sorted(told[30:]) == [1, 2, 3, 4, 5, 6], "each raised it for itself"
            assert controls.era == 6

    run(story())


def test_more_keys_than_one_step_tells_are_told_and_pruned():
    keys = [str(uuid.uuid4()) for _ in range(700)]

    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            held = (await ledger.claim(headers(*keys), TERMS)).granted
            assert len(await other.control_store.held("", 1000)) == 700
            found, after = [], ""
            while page := await other.control_store.keys(after, 300):
                found += page
                after = page[-1]
            assert sorted(found) == sorted(keys)
            assert await ledger.commit([Commit(claim) for claim in held]) == []
            assert (await other.counts()).keys == 700
            RedisBench().move_clock((ledger, other), 10_000_000.0)
            assert await other.prune(1.0) == 700
            assert (await ledger.counts()).keys == 0

    run(story())


def test_a_dispatch_that_ended_between_the_two_steps_of_another_is_charged():
    """The state of the key is as it was read, but its rate is used up."""
    policy = LedgerPolicy(rate=Rate(1, per=300.0))

    async def story() -> None:
        async with two_ledgers(policy) as (ledger, other):
            read = other._entries.read

            async def overtaken(*arguments, **options):
                other._entries.read = read
                found = await read(*arguments, **options)
                [claim] = (await ledger.claim(headers("a"), TERMS)).granted
                assert await ledger.dead_letter([DeadLetterRequest(DeadLetter("bad", b""), claim)]) == []
                return found

            other._entries.read = overtaken
            results = await other.claim(headers("a"), TERMS)
            assert {key: one.reason for key, one in results.refused.items()} == {"a": RefusalReason.LIMITED}

    run(story())


def test_a_worker_that_remembers_few_of_its_claims_looks_for_the_others(monkeypatch):
    monkeypatch.setattr(redis_ledger, "KNOWN_MAX", 2)

    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            held = (await ledger.claim(headers(*"abcde"), TERMS)).granted
            assert await ledger.commit([Commit(claim) for claim in held]) == []
            assert (await ledger.counts()).keys == 5

    run(story())


def test_a_scope_that_is_forgotten_leaves_nothing_behind():
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            await ledger.commit([Commit(one) for one in (await ledger.claim(headers("a", "k" * 300), TERMS)).granted])
            await ledger.claim(headers("b"), TERMS)
            await ledger.control_store.pause(Pause("a"))
            name = ledger._scope.name
            await RedisBench().remove(ledger, name)
            server = shared.redis()
            assert server.command("KEYS", f"keywise:{{{name}}}:*") == "*0\r\n"
            assert name not in server.command("SMEMBERS", "keywise:scopes")

    run(story())


def test_a_server_that_loses_everything_again_and_again_counts_as_unavailable(monkeypatch):
    monkeypatch.setattr(redis_scope, "RECOVERIES_MAX", 0)

    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            with pytest.raises(UnavailableError, match="keeps losing"):
                await ledger.counts()

    run(story())


def test_what_the_client_library_cannot_explain_may_pass():
    with pytest.raises(UnavailableError, match="odd"), redis_errors("redis://…"):
        raise RedisError("odd")
