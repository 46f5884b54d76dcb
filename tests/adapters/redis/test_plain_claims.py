"""Plain changes are claimed in one step of a Redis server and committed in another, as the rules would do it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from adapters.redis.benches import fresh
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.entry_encoding import ACTIVE, IDLE, state_of
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.adapters.redis.ledger.scripts import CLAIM_PLAIN, COMMIT_PLAIN
from keywise.core import rules
from keywise.core.change import VERSION_MAX, VERSION_MIN, ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Move, Pause, ReindexRun, RunState
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Claim, Commit, Entry, LeaseTerms, LedgerPolicy, RefusalReason
from keywise.core.key_encoding import encoded
from keywise.core.ledger import ClaimResults
from keywise.testing.conformance.benches.redis import RedisBench
from running import run
from servers import shared
from servers.redis import redis_server

pytestmark = pytest.mark.server("redis")

TERMS = LeaseTerms("wörker", 60.1)
SAFE, PLAIN = LedgerPolicy(), LedgerPolicy(intents=True)
PAUSED = Controls(pauses=(Pause(EVERYTHING, is_pattern=True),))
MOVING = Controls(move=Move("stock", "stock-7", 1))
MOVED = Controls(target="stock-7", spare="stock", target_epoch=1, run=ReindexRun(3, RunState.COMPLETE, into="stock-7"))
BOTH_POLICIES = pytest.mark.parametrize("policy", [SAFE, PLAIN], ids=["safe", "plain"])


@asynccontextmanager
async def two_ledgers(policy: LedgerPolicy = SAFE, url: str = "") -> AsyncIterator[tuple[RedisLedger, RedisLedger]]:
    name, url = fresh("plain"), url or shared.redis().url
    async with (
        RedisLedger(RedisDatabase(url), name, policy) as one,
        RedisLedger(RedisDatabase(url), name, policy) as other,
    ):
        yield one, other


def headers(*keys: str, version: int = 1, deleted: bool = False) -> list[ChangeHeader]:
    return [ChangeHeader(key, order_of(version), deleted) for key in keys]


async def committed(ledger: RedisLedger, *wanted: ChangeHeader) -> list[Claim]:
    granted = (await ledger.claim(wanted, TERMS)).granted
    assert len(granted) == len(wanted)
    assert await ledger.commit([Commit(claim) for claim in granted]) == []
    return granted


def reasons(results: ClaimResults) -> dict[str, RefusalReason]:
    return {key: refusal.reason for key, refusal in results.refused.items()}


def before_the_next_step(ledger: RedisLedger, act: Callable[[], Awaitable[object]]) -> None:
    """Do something when the next step of a ledger is on its way to the server."""
    call = ledger._server.call

    async def overtaken(*arguments):
        ledger._server.call = call
        await act()
        return await call(*arguments)

    ledger._server.call = overtaken


def counted_steps(ledger: RedisLedger) -> list[object]:
    call, steps = ledger._server.call, []

    async def counted(script, *arguments):
        steps.append(script)
        return await call(script, *arguments)

    ledger._server.call = counted
    return steps


async def stored(ledger: RedisLedger, name: str, key: str) -> bytes:
    return await ledger._server.run("HGET", ledger._scope.key(name), encoded(key))


@BOTH_POLICIES
def test_many_plain_changes_are_claimed_in_one_step_and_committed_in_another(policy):
    keys = [f"k{n}" for n in range(900)]

    async def story() -> None:
        async with two_ledgers(policy) as (ledger, _):
            for version in (1, 2):
                steps = counted_steps(ledger)
                await committed(ledger, *headers(*keys, version=version))
                assert len(steps) == 2
            assert (await ledger.counts()).keys == 900

    run(story())


def test_more_plain_changes_than_one_step_takes_are_claimed_and_committed():
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            RedisBench().move_clock([ledger], 1.0)
            claims = await committed(ledger, *headers(*(f"k{n}" for n in range(4321))))
            assert len({claim.token for claim in claims}) == 4321
            assert (await ledger.counts()).keys == 4321

    run(story())


@pytest.mark.parametrize(
    ("controls", "is_plain"),
    [
        (Controls(resync_at=5.0, scale="s3-sequencer"), True),
        (Controls(run=ReindexRun(3)), True),
        (MOVED, True),
        (Controls(era=1, run=ReindexRun(3)), False),
        (Controls(pauses=(Pause("b"),), run=ReindexRun(3)), False),
    ],
)
def test_only_an_era_and_a_pause_leave_claims_to_the_rules(controls, is_plain):
    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            assert await other.replace_controls(Controls(), controls)
            for version in (1, 2):
                steps = counted_steps(ledger)
                await committed(ledger, *headers("a", "c", version=version))
                assert (steps == [CLAIM_PLAIN, COMMIT_PLAIN]) is is_plain
            # What the rules have read tells the worker as well whether the step is worth trying.
            assert reasons(await ledger.claim(headers("a"), TERMS)) == {"a": RefusalReason.STALE}
            assert ledger._plain_claims.is_worth_trying is is_plain

    run(story())


@BOTH_POLICIES
@pytest.mark.parametrize("deletes", [False, True], ids=["put", "deletion"])
@pytest.mark.parametrize("known", ["new", "marked", "tombstone"])
def test_a_step_stores_byte_for_byte_what_the_rules_store(policy, known, deletes):
    async def story() -> None:
        async with two_ledgers(policy) as (ledger, _):
            if known != "new":
                await committed(ledger, *headers("a", version=-7, deleted=known == "tombstone"))
            before, [header] = await ledger.inspect("a"), headers("a", version=2**60 + 1, deleted=deletes)
            [claim] = (await ledger.claim([header], TERMS)).granted
            held = await ledger.inspect("a")
            granted, same = rules.grant(before, header, claim.token, held.updated_at, TERMS, policy)
            assert (held, claim) == (granted, same)
            assert ACTIVE + await stored(ledger, "active", "a") == state_of(granted)
            assert await indexed(ledger, "a") == (granted.lease_until, rules.suspect_since(granted, policy))
            assert await ledger.commit([Commit(claim)]) == []
            marked = await ledger.inspect("a")
            assert marked == rules.commit(granted, Commit(claim), marked.updated_at, policy)[0]
            bucket = ledger._scope.bucket(encoded("a"))
            assert IDLE + await stored(ledger, str(bucket), "a") == state_of(marked)
            assert (await indexed(ledger, "a"), await stored(ledger, "active", "a")) == ((None, None), None)
            counts = await ledger.counts()
            assert (counts.keys, counts.tombstones, counts.claims, counts.suspects) == (1, int(deletes), 0, 0)

    run(story())


async def indexed(ledger: RedisLedger, key: str) -> tuple[float | None, ...]:
    """The places of a key in the two indexes."""
    scores = [await ledger._server.run("ZSCORE", ledger._scope.key(name), encoded(key)) for name in ("held", "suspect")]
    return tuple(None if score is None else float(score) for score in scores)


def test_what_is_not_plain_is_stored_whole():
    order = order_of(3)
    claimed = Entry(order_of(2), False, 7.0, 5, "w1", 67.0, tried=order, tried_at=7.0)
    entries = [
        claimed,
        *(Entry(order_of(2), False, 7.0, 5, "w1", 67.0, tried=order, tried_at=7.0, **more) for more in VARIANTS),
    ]
    assert [len(state_of(entry)) < 60 for entry in entries] == [True, *(False for _ in VARIANTS)]


VARIANTS = (
    {"attempts": 1},
    {"abandoned": True},
    {"phase": 1},
    {"unknown": (0, 3, 0), "unknown_until": 9.0},
    {"intent": (0, 4, 0)},
    {"suspicions": 1},
    {"era": 1},
    {"not_before": 8.0},
)


@pytest.mark.parametrize("version", [VERSION_MIN, -1, 0, 1, 2**53, VERSION_MAX - 1])
def test_versions_are_compared_exactly(version):
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            await committed(ledger, *headers("a", version=version))
            assert reasons(await ledger.claim(headers("a", version=version), TERMS)) == {"a": RefusalReason.DUPLICATE}
            if version > VERSION_MIN:
                older = await ledger.claim(headers("a", version=version - 1), TERMS)
                assert reasons(older) == {"a": RefusalReason.STALE}
            await committed(ledger, *headers("a", version=version + 1))

    run(story())


def test_a_mark_without_a_version_is_left_to_the_rules():
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            await committed(ledger, ChangeHeader("a", order_of(None)), ChangeHeader("b", (0, 5, 3)))
            results = await ledger.claim([*headers("a", "b", version=6), *headers("c")], TERMS)
            assert reasons(results) == {"a": RefusalReason.MIXED}
            assert sorted(claim.key for claim in results.granted) == ["b", "c"]

    run(story())


def test_tokens_rise_though_the_clock_falls_back():
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            before = [claim.token for claim in await committed(ledger, *headers("a", "b", "c"))]
            RedisBench().move_clock([ledger], -60.0)
            after = [claim.token for claim in await committed(ledger, *headers("d", "e"))]
            assert [*before, *after] == sorted({*before, *after})

    run(story())


def test_a_pause_is_seen_by_a_worker_that_has_not_heard_of_it():
    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            await committed(ledger, *headers("a", "b"))
            await other.control_store.pause(Pause("a"))
            results = await ledger.claim(headers("a", "b", version=2), TERMS)
            assert reasons(results) == {"a": RefusalReason.PAUSED}
            assert [claim.key for claim in results.granted] == ["b"]
            await other.control_store.resume("a", is_pattern=False)
            await committed(ledger, *headers("a", version=2))

    run(story())


def test_an_era_is_seen_by_a_worker_that_has_not_heard_of_it():
    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            await committed(ledger, *headers("a", version=5))
            assert await other.control_store.raise_era() == 1
            [claim] = await committed(ledger, *headers("a", version=6))
            assert claim.order == (1, 6, 0)

    run(story())


def test_a_move_is_seen_by_a_worker_that_has_not_heard_of_it_and_so_is_its_end():
    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            await committed(ledger, *headers("a"))
            assert await other.replace_controls(Controls(), MOVING)
            steps = counted_steps(ledger)
            refused = {"a": RefusalReason.PAUSED, "b": RefusalReason.PAUSED}
            assert reasons(await ledger.claim(headers("a", "b", version=2), TERMS)) == refused
            assert steps[0] is CLAIM_PLAIN
            steps.clear()
            assert reasons(await ledger.claim(headers("a", "b", version=2), TERMS)) == refused
            assert CLAIM_PLAIN not in steps, "the worker asks the rules at once while the move is under way"
            assert await other.replace_controls(MOVING, MOVED)
            await committed(ledger, *headers("a", version=2))
            steps.clear()
            await committed(ledger, *headers("a", "b", version=3))
            assert steps == [CLAIM_PLAIN, COMMIT_PLAIN]

    run(story())


@pytest.mark.parametrize("controls", [PAUSED, MOVING], ids=["pause", "move"])
def test_what_is_set_while_a_claim_is_on_its_way_is_not_overtaken(controls):
    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            await committed(ledger, *headers("a"))
            before_the_next_step(ledger, lambda: other.control_store.replace_controls(Controls(), controls))
            assert reasons(await ledger.claim(headers("a", version=2), TERMS)) == {"a": RefusalReason.PAUSED}
            assert (await ledger.counts()).claims == 0

    run(story())


def test_nothing_is_claimed_once_a_pause_is_set():
    """Many claims race with a pause; those that are granted were granted before."""

    async def story() -> None:
        async with two_ledgers() as (ledger, other):

            async def claim(n: int) -> ClaimResults:
                return await ledger.claim(headers(f"k{n}"), TERMS)

            for rounds in range(5):
                claiming = [asyncio.create_task(claim(100 * rounds + n)) for n in range(100)]
                await asyncio.wait(claiming, return_when=asyncio.FIRST_COMPLETED)
                await other.control_store.pause(Pause(EVERYTHING, is_pattern=True))
                held = (await other.counts()).claims
                granted = [one for task in claiming for one in (await task).granted]
                assert (await other.counts()).claims == held
                await ledger.release(granted)
                await other.control_store.resume(EVERYTHING, is_pattern=True)

    run(story())


def test_two_commits_of_one_key_are_judged_in_their_order():
    """The first is refused since another holder has the key, whatever becomes of the second."""

    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            [lost] = (await ledger.claim(headers("a"), LeaseTerms("w1", 10.0))).granted
            RedisBench().move_clock((ledger, other), 20.0)
            [held] = (await other.claim(headers("a"), LeaseTerms("w1", 10.0))).granted
            assert await ledger.commit([Commit(lost), Commit(held)]) == [lost]
            assert (await ledger.inspect("a")).mark == order_of(1)

    run(story())


def test_of_two_headers_of_one_key_the_rules_decide():
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            results = await ledger.claim([*headers("a", version=1), *headers("a", version=2), *headers("b")], TERMS)
            assert sorted(claim.key for claim in results.granted) == ["a", "b"]
            assert await ledger.commit([Commit(claim) for claim in results.granted]) == []

    run(story())


def test_a_claim_that_was_renewed_and_lost_to_another_is_not_committed():
    async def story() -> None:
        async with two_ledgers() as (ledger, other):
            [claim] = (await ledger.claim(headers("a"), LeaseTerms("w1", 10.0))).granted
            assert await ledger.renew([claim], 10.0) == []
            RedisBench().move_clock((ledger, other), 20.0)
            [newer] = (await other.claim(headers("a", version=2), LeaseTerms("w1", 10.0))).granted
            assert await ledger.commit([Commit(claim)]) == [claim]
            assert await other.commit([Commit(newer)]) == []
            assert (await ledger.inspect("a")).mark == order_of(2)

    run(story())


def test_a_commit_whose_answer_was_lost_is_repeated():
    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            [claim] = await committed(ledger, *headers("a"))
            assert await ledger.commit([Commit(claim)]) == []
            assert await ledger.commit([Commit(claim, overdue=True)]) == [claim]

    run(story())


def test_a_key_that_is_not_there_is_claimed_only_by_what_was_sent_within_the_retention():
    policy = LedgerPolicy(retention_s=100.0)

    async def story() -> None:
        async with two_ledgers(policy) as (ledger, _):
            now = await ledger.now()
            await committed(ledger, *headers("known"))
            sent = {"late": now - 200.0, "fresh": now, "known": now - 200.0}
            wanted = [ChangeHeader(key, order_of(2), sent_at=sent_at) for key, sent_at in sent.items()]
            results = await ledger.claim(wanted, TERMS)
            assert reasons(results) == {"late": RefusalReason.FORGOTTEN}
            assert sorted(claim.key for claim in results.granted) == ["fresh", "known"]

    run(story())


def test_claims_of_both_kinds_end_in_one_commit():
    """A key that failed before is claimed by the rules, and another one plainly."""

    async def story() -> None:
        async with two_ledgers() as (ledger, _):
            [dead] = (await ledger.claim([ChangeHeader("a", (0, 1, 1))], TERMS)).granted
            assert await ledger.dead_letter([DeadLetterRequest(DeadLetter("bad", b""), dead)]) == []
            wanted = [ChangeHeader("a", (0, 1, 2)), *headers("b", "c")]
            assert sorted(claim.key for claim in await committed(ledger, *wanted)) == ["a", "b", "c"]
            assert (await ledger.inspect("a")).mark == (0, 1, 2)
            assert (await ledger.counts()).keys == 3

    run(story())


def test_what_is_stale_is_refused_also_when_all_memory_is_used():
    """Its message can be acked; only what needs memory waits."""
    with redis_server() as server:

        async def story() -> None:
            async with two_ledgers(url=server.url) as (ledger, _):
                await committed(ledger, *headers("a", version=5))
                assert server.command("CONFIG", "SET", "maxmemory", "1kb").startswith("+OK")
                assert reasons(await ledger.claim(headers("a", version=4), TERMS)) == {"a": RefusalReason.STALE}

        run(story())
