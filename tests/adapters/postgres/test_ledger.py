"""What a Postgres ledger leaves in its tables, and how its claims and an operator's controls wait for each other."""

import asyncio

import asyncpg
import pytest

from adapters.postgres.benches import fresh
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Certainty, Claim, Commit, LeaseTerms, LedgerPolicy
from keywise.core.key_encoding import encoded
from keywise.core.ledger import Failure
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

TERMS = LeaseTerms("w1", 60.0)
PLAIN = LedgerPolicy(intents=True)

WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


@pytest.fixture
def url() -> str:
    """A new, empty database."""
    return shared.postgres().create_database(fresh("database"))


def test_a_pause_waits_for_a_claim_that_was_decided_before_it(url):
    """Rule 20: nothing is granted after a pause, so an operator may rely on it."""
    order: list[str] = []

    async def claim(ledger: PostgresLedger) -> None:
        results = await ledger.claim([ChangeHeader("a", order_of(1))], TERMS)
        order.append("granted" if results.granted else "refused")

    async def pause(ledger: PostgresLedger) -> None:
        await ledger.control_store.pause(Pause("a"))
        order.append("paused")

    async def main() -> None:
        async with (
            PostgresLedger(PostgresDatabase(url), "shop", PLAIN) as ledger,
            PostgresLedger(PostgresDatabase(url), "shop", PLAIN) as operator,
        ):
            blocker, watcher = await asyncpg.connect(url), await asyncpg.connect(url)
            # The row that the claim is about to insert: it decides, and then waits with its grant.
            await blocker.execute("begin")
            await blocker.execute(
                "insert into keywise_active (scope, key, token, lease_until, suspicions, entry) "
                "values ($1, $2, 0, 0, 0, '{}')",
                ledger.scope.number,
                encoded("a"),
            )

            async with asyncio.TaskGroup() as group:
                group.create_task(claim(ledger))
                while await watcher.fetchval(WAITING) < 1:
                    pass
                pausing = group.create_task(pause(operator))
                while not pausing.done() and await watcher.fetchval(WAITING) < 2:
                    pass
                await blocker.execute("rollback")
            assert order == ["granted", "paused"]
            await blocker.close()
            await watcher.close()

    run(main())


async def _commit(ledger: PostgresLedger, claim: Claim) -> None:
    assert await ledger.commit([Commit(claim)]) == []


async def _release(ledger: PostgresLedger, claim: Claim) -> None:
    await ledger.release([claim])


async def _dead_letter(ledger: PostgresLedger, claim: Claim) -> None:
    assert await ledger.dead_letter([DeadLetterRequest(DeadLetter("bad", b""), claim)]) == []


async def _fail_and_commit(ledger: PostgresLedger, claim: Claim) -> None:
    await ledger.fail([Failure(claim, Certainty.CLEAN)])
    [again] = (await ledger.claim([ChangeHeader(claim.key, claim.order)], TERMS)).granted
    await _commit(ledger, again)


@pytest.mark.parametrize("end", [_commit, _release, _dead_letter, _fail_and_commit])
def test_a_key_is_not_marked_as_active_once_nothing_goes_on(url, end):
    """Its next change would otherwise need the slow steps for ever, and a prune would look at it each time."""

    async def main() -> None:
        async with PostgresLedger(PostgresDatabase(url), "shop", PLAIN) as ledger:
            for version in (1, 2):
                [claim] = (await ledger.claim([ChangeHeader("a", order_of(version))], TERMS)).granted
                assert await ledger.database.read("select key from keywise_marks where active") != []
                await end(ledger, claim)
                assert await ledger.database.read("select key from keywise_marks where active") == []
                assert await ledger.database.read("select key from keywise_active") == []

    run(main())
