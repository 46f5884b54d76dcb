"""Claims and commits of one statement answer as the rules do, also beside an operator and a takeover."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adapters.postgres.benches import connected, fresh, until_waiting
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Controls, Move, Pause, ReindexRun, RunState, text_of
from keywise.core.entry import Claim, Commit, LeaseTerms, LedgerPolicy, RefusalReason
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

TERMS = LeaseTerms("w1", 30.0)
PAUSED = Controls(pauses=(Pause("*", is_pattern=True),))
MOVING = Controls(move=Move("stock", "stock_7", 1))
MOVED = Controls(target="stock_7", spare="stock", target_epoch=1)


@asynccontextmanager
async def opened(policy: LedgerPolicy | None = None) -> AsyncIterator[PostgresLedger]:
    database = PostgresDatabase(shared.postgres().url)
    async with database, PostgresLedger(database, fresh("scope"), policy or LedgerPolicy()) as ledger:
        yield ledger


async def claim(ledger: PostgresLedger, version: int, **given: Any) -> Claim:
    [granted] = (await ledger.claim([ChangeHeader("a", order_of(version), **given)], TERMS)).granted
    return granted


@pytest.mark.parametrize("controls", [PAUSED, MOVING], ids=["pause", "move"])
def test_a_pause_or_a_move_that_is_being_set_is_not_overtaken(controls):
    async def story() -> None:
        async with opened() as ledger, connected() as operator, connected() as watcher:
            async with operator.transaction():
                await operator.execute(
                    "update keywise_scopes set controls = $2 where id = $1", ledger.scope.number, text_of(controls)
                )
                claiming = asyncio.ensure_future(ledger.claim([ChangeHeader("a", order_of(1))], TERMS))
                await until_waiting(watcher, "keywise_scopes")
            results = await claiming
            assert results.granted == []
            assert results.refused["a"].reason is RefusalReason.PAUSED

    run(story())


@pytest.mark.parametrize(
    ("controls", "is_plain"),
    [
        (Controls(scale="s3-sequencer"), True),
        (Controls(era=1, scale="s3-sequencer"), False),
        (Controls(pauses=(Pause("b"),), scale="s3-sequencer"), False),
        (Controls(resync_at=5.0), True),
        (Controls(resync_at=5.0, scale="s3-sequencer", run=ReindexRun(3)), True),
        (Controls(era=1, run=ReindexRun(3)), False),
        (Controls(pauses=(Pause("b"),), run=ReindexRun(3)), False),
        (msgspec.structs.replace(MOVED, run=ReindexRun(3, RunState.CATCHING_UP, into="stock")), True),
    ],
)
def test_only_an_era_and_a_pause_keep_claims_and_marks_from_one_statement(controls, is_plain):
    async def story() -> None:
        async with opened() as ledger, connected() as watcher:
            scope = ledger.scope.number
            await watcher.execute("update keywise_scopes set controls = $2 where id = $1", scope, text_of(controls))
            await claim(ledger, 1)
            assert await watcher.fetchval("select plain from keywise_active where scope = $1", scope) is (
                is_plain or None
            )
            async with ledger.marking_transaction() as transaction:
                assert await transaction.decide_and_mark([ChangeHeader("c", order_of(1))]) == {}
                assert transaction._marked == ({"c"} if is_plain else set())
                await transaction.mark([ChangeHeader("c", order_of(1))])
            assert (await ledger.inspect("c")).mark == (controls.era, 1, 0)

    run(story())


def test_claims_and_marks_of_one_statement_rest_during_a_move_and_go_on_after_it():
    async def story() -> None:
        async with opened() as ledger, connected() as watcher:
            asked = ChangeHeader("c", order_of(1))
            assert await ledger.replace_controls(Controls(), MOVING)
            assert (await ledger.claim([asked], TERMS)).refused["c"].reason is RefusalReason.PAUSED
            async with ledger.marking_transaction() as transaction:
                assert (await transaction.decide_and_mark([asked]))["c"].reason is RefusalReason.PAUSED
                assert transaction._marked == set()
            assert await ledger.replace_controls(MOVING, MOVED)
            await claim(ledger, 1)
            assert await watcher.fetchval("select plain from keywise_active where scope = $1", ledger.scope.number)
            async with ledger.marking_transaction() as transaction:
                assert await transaction.decide_and_mark([asked]) == {}
                assert transaction._marked == {"c"}

    run(story())


@pytest.mark.parametrize("is_marking", [False, True], ids=["decides", "decides and marks"])
def test_a_move_waits_for_a_transaction_that_has_decided(is_marking):
    """Also if its handler runs for long: the caller ends the swap by its own time limit."""

    async def story() -> None:
        async with opened() as ledger, connected() as watcher:

            async def move() -> bool:
                async with ledger.transaction() as swapping:
                    return await swapping.replace_controls(Controls(), MOVING)

            async with ledger.marking_transaction() if is_marking else ledger.transaction() as transaction:
                decide = transaction.decide_and_mark if is_marking else transaction.decide
                assert await decide([ChangeHeader("a", order_of(1))]) == {}
                moving = asyncio.ensure_future(move())
                await until_waiting(watcher, "pg_advisory_xact_lock(")
                await transaction.mark([ChangeHeader("a", order_of(1))])
            assert await moving
            entry = await ledger.inspect("a")
            assert entry is not None and entry.mark == order_of(1)

    run(story())


def test_a_handler_that_has_not_decided_yet_does_not_hold_up_a_move():
    async def story() -> None:
        async with opened() as ledger, ledger.transaction() as transaction:
            async with ledger.transaction() as swapping:
                assert await swapping.replace_controls(Controls(), MOVING)
            refusals = await transaction.decide([ChangeHeader("a", order_of(1))])
            assert refusals["a"].reason is RefusalReason.PAUSED

    run(story())


def test_an_operator_who_waits_for_running_claims_is_not_overtaken_by_new_ones():
    """Claims that overlap without a gap would keep a pause waiting for ever."""

    async def story() -> None:
        async with opened() as ledger, connected() as other, connected() as watcher:
            async with other.transaction():
                # As a claim does that has locked the controls and not yet ended.
                await other.execute("select from keywise_scopes where id = $1 for share", ledger.scope.number)
                pausing = asyncio.ensure_future(ledger.pause(Pause("*", is_pattern=True)))
                await until_waiting(watcher, "keywise_scopes")
                claiming = asyncio.ensure_future(ledger.claim([ChangeHeader("a", order_of(1))], TERMS))
                await until_waiting(watcher, "pg_advisory_xact_lock_shared")
            await pausing
            assert (await claiming).refused["a"].reason is RefusalReason.PAUSED

    run(story())


def test_an_era_is_not_raised_beside_a_claim_that_is_being_made():
    async def story() -> None:
        async with opened() as ledger, connected() as other, connected() as watcher:
            async with other.transaction():
                # As a claim does that has locked the controls and not yet inserted its row.
                await other.execute("select from keywise_scopes where id = $1 for share", ledger.scope.number)
                raising = asyncio.ensure_future(ledger.raise_era())
                await until_waiting(watcher, "keywise_scopes")
                await other.execute(
                    "insert into keywise_active (scope, key, token, lease_until, suspicions, entry)"
                    " values ($1, 'a', 1, extract(epoch from clock_timestamp()) + 30, 0, '{}')",
                    ledger.scope.number,
                )
            assert await raising is None

    run(story())


def test_a_commit_waits_for_a_takeover_and_is_refused():
    async def story() -> None:
        async with opened(LedgerPolicy(intents=True)) as ledger, connected() as other, connected() as watcher:
            held = await claim(ledger, 1)
            async with other.transaction():
                await other.execute("select from keywise_marks where scope = $1 for update", ledger.scope.number)
                committing = asyncio.ensure_future(ledger.commit([Commit(held)]))
                await until_waiting(watcher, "keywise_marks")
                await other.execute(
                    "update keywise_active set token = token + 1, plain = null, entry = replace(entry, $2, $3)"
                    " where scope = $1",
                    ledger.scope.number,
                    str(held.token),
                    str(held.token + 1),
                )
            assert await committing == [held]
            entry = await ledger.inspect("a")
            assert entry is not None and entry.mark is None and entry.suspicions == 1

    run(story())


def test_an_old_token_commits_nothing():
    async def story() -> None:
        async with opened() as ledger:
            old = await claim(ledger, 1)
            await ledger.release([old])
            new = await claim(ledger, 2)
            assert await ledger.commit([Commit(old)]) == [old]
            entry = await ledger.inspect("a")
            assert entry is not None and entry.mark is None and entry.token == new.token

    run(story())


@pytest.mark.parametrize("deleted", [False, True])
def test_a_commit_leaves_the_mark_of_its_change(deleted: bool):
    async def story() -> None:
        async with opened() as ledger:
            assert await ledger.commit([Commit(await claim(ledger, -5))]) == []
            assert await ledger.commit([Commit(await claim(ledger, 7, deleted=deleted))]) == []
            entry, now = await ledger.inspect("a"), await ledger.now()
            assert entry is not None and entry.is_idle
            assert (entry.mark, entry.deleted) == (order_of(7), deleted)
            assert now - 60 < entry.updated_at <= now + 1

    run(story())


@pytest.mark.parametrize("act", ["release", "renew and commit", "commit twice"])
def test_every_other_step_understands_a_claim_of_one_statement(act: str):
    async def story() -> None:
        async with opened(LedgerPolicy(intents=True)) as ledger:
            held = await claim(ledger, 3)
            entry = await ledger.inspect("a")
            assert entry is not None and entry.mark is None
            assert (entry.token, entry.owner, entry.intent, entry.tried) == (held.token, "w1", (0, 3, 0), (0, 3, 0))
            assert (await ledger.counts()).claims == 1
            match act:
                case "release":
                    await ledger.release([held])
                    assert await ledger.inspect("a") is None
                case "renew and commit":
                    assert await ledger.renew([held], 30.0) == []
                    assert await ledger.commit([Commit(held)]) == []
                case "commit twice":
                    assert await ledger.commit([Commit(held)]) == []
                    assert await ledger.commit([Commit(held)]) == []
            entry = await ledger.inspect("a")
            assert entry is None or (entry.is_idle and entry.mark == order_of(3))

    run(story())


def test_a_change_older_than_the_retention_is_not_claimed_at_once():
    async def story() -> None:
        async with opened(LedgerPolicy(retention_s=60.0)) as ledger:
            now = await ledger.now()
            old, new = (ChangeHeader(key, order_of(1), sent_at=now - age) for key, age in (("old", 70.0), ("new", 5.0)))
            results = await ledger.claim([old, new], TERMS)
            assert [one.key for one in results.granted] == ["new"]
            assert results.refused["old"].reason is RefusalReason.FORGOTTEN

    run(story())


ROWS = {
    "same": ChangeHeader("same", (0, 5, 1), is_row=True),
    "newer": ChangeHeader("newer", (0, 6, 1), is_row=True),
    "older": ChangeHeader("older", (0, 4, 1), is_row=True),
    "removed": ChangeHeader("removed", (0, 5, 1), is_row=True),
    "back": ChangeHeader("back", (0, 6, 1), is_row=True),
    "unseen": ChangeHeader("unseen", (0, 1, 1), is_row=True),
}
"""Rows of a run, most of them of keys that `PUTS` and `DELETIONS` have marked at version 5."""
PUTS, DELETIONS = ("same", "newer", "older"), ("removed", "back")
GRANTED = {key: ROWS[key].order for key in ("same", "newer", "back", "unseen")}
REFUSED = {"older": RefusalReason.STALE, "removed": RefusalReason.REMOVED}


async def mark_at_5(ledger: PostgresLedger) -> None:
    headers = [ChangeHeader(key, order_of(5)) for key in PUTS]
    headers += [ChangeHeader(key, order_of(5), True) for key in DELETIONS]
    async with ledger.marking_transaction() as transaction:
        assert await transaction.decide_and_mark(headers) == {}


async def marks_of(ledger: PostgresLedger) -> dict[str, tuple[Any, bool]]:
    entries = {key: await ledger.inspect(key) for key in ROWS}
    return {key: (entry.mark, entry.deleted) for key, entry in entries.items() if entry is not None and entry.is_idle}


MARKS_AFTER = {key: (order, False) for key, order in GRANTED.items()} | {
    "older": (order_of(5), False),
    "removed": (order_of(5), True),
}


def test_rows_of_a_run_are_judged_and_marked_in_one_statement_at_its_generation():
    async def story() -> None:
        async with opened() as ledger:
            await mark_at_5(ledger)
            async with ledger.marking_transaction() as transaction:
                refusals = await transaction.decide_and_mark(list(ROWS.values()))
                assert {key: refusal.reason for key, refusal in refusals.items()} == REFUSED
                assert transaction._marked == set(GRANTED)
            assert await marks_of(ledger) == MARKS_AFTER
            async with ledger.marking_transaction() as transaction:
                again = await transaction.decide_and_mark([ROWS["same"], ROWS["unseen"]])
                assert {refusal.reason for refusal in again.values()} == {RefusalReason.DUPLICATE}
                live = ChangeHeader("newer", order_of(7))
                assert await transaction.decide_and_mark([live]) == {} and transaction._marked == {"newer"}
            assert (await ledger.inspect("newer")).mark == (0, 7, 0)

    run(story())


def test_rows_of_a_run_are_claimed_and_committed_in_one_statement_each_at_its_generation():
    async def story() -> None:
        async with opened(LedgerPolicy(intents=True)) as ledger, connected() as watcher:
            await mark_at_5(ledger)
            results = await ledger.claim(list(ROWS.values()), TERMS)
            assert {one.key: one.order for one in results.granted} == GRANTED
            assert {key: refusal.reason for key, refusal in results.refused.items()} == REFUSED
            plain = "select count(*) from keywise_active where scope = $1 and plain"
            assert await watcher.fetchval(plain, ledger.scope.number) == len(GRANTED)
            entry = await ledger.inspect("same")
            assert (entry.mark, entry.tried, entry.intent) == ((0, 5, 0), (0, 5, 1), (0, 5, 1))
            assert await ledger.commit([Commit(one) for one in results.granted]) == []
            assert await marks_of(ledger) == MARKS_AFTER

    run(story())


def test_changes_of_several_generations_are_claimed_and_marked_each_at_its_own():
    """A sweep deletes gone keys just above their marks, beside rows that it has found."""

    async def story() -> None:
        async with opened() as ledger:
            await mark_at_5(ledger)
            headers = [ROWS["newer"], ChangeHeader("same", (0, 5, 2), True), ChangeHeader("unseen", order_of(3))]
            results = await ledger.claim(headers, TERMS)
            assert await ledger.commit([Commit(one) for one in results.granted]) == []
            expected = {"newer": ((0, 6, 1), False), "same": ((0, 5, 2), True), "unseen": ((0, 3, 0), False)}
            assert (await marks_of(ledger)).items() >= expected.items()
            headers = [replace(one, order=(0, one.order[1] + 1, one.order[2])) for one in headers]
            async with ledger.marking_transaction() as transaction:
                assert await transaction.decide_and_mark(headers) == {}
                await transaction.mark(headers)
            expected = {"newer": ((0, 7, 1), False), "same": ((0, 6, 2), True), "unseen": ((0, 4, 0), False)}
            assert (await marks_of(ledger)).items() >= expected.items()

    run(story())
