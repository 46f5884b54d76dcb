"""Newer changes on idle keys pass without a look at their entries, and nothing else does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.core.change import UNVERSIONED_GENERATION, VERSION_MAX, VERSION_MIN, ChangeHeader, Order, order_of
from keywise.core.controls import Controls, Move, Pause
from keywise.core.entry import Claim, Commit, LeaseTerms, LedgerPolicy, RefusalReason
from keywise.core.limits import Rate
from keywise.testing.conformance.benches.sqlite import SqliteBenchDatabase
from running import run

TERMS = LeaseTerms("w1", 60.0)
PLAIN = LedgerPolicy(intents=True)
UNVERSIONED = order_of(None)


@pytest.fixture
def opened(tmp_path):
    @asynccontextmanager
    async def opened(policy: LedgerPolicy = PLAIN) -> AsyncIterator[SqliteLedger]:
        async with SqliteLedger(SqliteBenchDatabase(str(tmp_path / "shop.db")), "shop", policy) as ledger:
            yield ledger

    return opened


def header(order: Order | int, **given) -> ChangeHeader:
    return ChangeHeader("a", order_of(order) if isinstance(order, int) else order, **given)


async def transacted(ledger: SqliteLedger, *headers: ChangeHeader) -> dict[str, RefusalReason]:
    """Decide, and mark what is allowed; the reasons why the others are not."""
    async with ledger.transaction() as transaction:
        refused = await transaction.decide(headers)
        await transaction.mark([one for one in headers if one.key not in refused])
    return {key: refusal.reason for key, refusal in refused.items()}


async def claimed(ledger: SqliteLedger, order: Order | None) -> Claim:
    [claim] = (await ledger.claim([ChangeHeader("a", order)], TERMS)).granted
    return claim


async def mark_of(ledger: SqliteLedger, key: str = "a") -> Order | None:
    entry = await ledger.inspect(key)
    return None if entry is None else entry.mark


def noted(ledger: SqliteLedger) -> list[str]:
    """The statements that write marks from now on."""
    seen: list[str] = []
    assert ledger.database._writer is not None
    ledger.database._writer.set_trace_callback(lambda text: seen.append(text) if " keywise_marks" in text else None)
    return seen


def test_many_changes_are_compared_in_one_statement_and_marked_in_another(opened):
    async def story() -> None:
        async with opened() as ledger:
            for version in (1, 2):
                seen = noted(ledger)
                assert await transacted(ledger, *(ChangeHeader(f"k{n}", order_of(version)) for n in range(50))) == {}
                assert len(seen) == 2
            assert await mark_of(ledger, "k49") == order_of(2)

    run(story())


def test_nothing_is_marked_during_a_move_and_the_fast_statements_run_again_after_it(opened):
    moving, moved = Controls(move=Move("stock", "stock_7", 1)), Controls(target="stock_7", target_epoch=1)

    async def story() -> None:
        async with opened() as ledger:
            asked = [ChangeHeader(f"k{n}", order_of(1)) for n in range(50)]
            assert await ledger.replace_controls(Controls(), moving)
            refused = await transacted(ledger, *asked)
            assert refused == dict.fromkeys((one.key for one in asked), RefusalReason.PAUSED)
            assert await ledger.replace_controls(moving, moved)
            seen = noted(ledger)
            assert await transacted(ledger, *asked) == {}
            assert len(seen) == 2

    run(story())


@pytest.mark.parametrize("version", [VERSION_MIN, -1, 0, 2**53, VERSION_MAX - 1])
def test_versions_are_compared_exactly(opened, version):
    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header(version)) == {}
            assert await transacted(ledger, header(version)) == {"a": RefusalReason.DUPLICATE}
            assert await transacted(ledger, header(version + 1)) == {}
            assert await transacted(ledger, header(version)) == {"a": RefusalReason.STALE}
            assert await mark_of(ledger) == order_of(version + 1)

    run(story())


@pytest.mark.parametrize("key", ['a"b', "ü\\x", "\u2028", "😀", "a\nb", "\x01"])
def test_keys_are_marked_as_they_are_spelled(opened, key):
    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, ChangeHeader(key, order_of(1))) == {}
            assert await ledger.keys("", 10) == [key]

    run(story())


def test_a_key_that_was_reset_is_marked_in_its_era(opened):
    async def story() -> None:
        async with opened() as ledger:
            assert await ledger.reset(await claimed(ledger, None)) == 1
            assert await transacted(ledger, header(5)) == {}
            assert await transacted(ledger, header(6)) == {}
            assert await mark_of(ledger) == (1, 6, 0)

    run(story())


def test_a_change_in_an_era_of_its_own_is_marked_in_it(opened):
    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header(5)) == {}
            assert await transacted(ledger, header((1, 6, 0))) == {}
            assert await mark_of(ledger) == (1, 6, 0)

    run(story())


def test_a_change_of_a_reindex_is_marked_with_its_generation(opened):
    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header((0, 5, 3))) == {}
            assert await mark_of(ledger) == (0, 5, 3)
            assert await transacted(ledger, header(5)) == {"a": RefusalReason.STALE}
            assert await transacted(ledger, header(6)) == {}
            assert await mark_of(ledger) == (0, 6, 0)

    run(story())


@pytest.mark.parametrize(("first", "second"), [(UNVERSIONED, order_of(5)), (order_of(-5), UNVERSIONED)])
def test_versioned_and_unversioned_changes_do_not_mix(opened, first, second):
    assert UNVERSIONED[2] == UNVERSIONED_GENERATION

    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header(first)) == {}
            assert await transacted(ledger, header(second)) == {"a": RefusalReason.MIXED}
            assert await mark_of(ledger) == first

    run(story())


def test_a_key_that_is_claimed_is_busy_also_without_a_mark(opened):
    async def story() -> None:
        async with opened() as ledger:
            await claimed(ledger, order_of(1))
            assert await transacted(ledger, header(2)) == {"a": RefusalReason.BUSY}
            assert await mark_of(ledger) is None

    run(story())


def test_a_paused_key_is_refused_beside_others(opened):
    async def story() -> None:
        async with opened() as ledger:
            await ledger.pause(Pause("a"))
            assert await transacted(ledger, header(1), ChangeHeader("b", order_of(1))) == {"a": RefusalReason.PAUSED}
            assert (await mark_of(ledger, "a"), await mark_of(ledger, "b")) == (None, order_of(1))

    run(story())


def test_a_raised_era_is_marked(opened):
    async def story() -> None:
        async with opened() as ledger:
            assert await ledger.raise_era() == 1
            assert await transacted(ledger, header(7)) == {}
            assert await mark_of(ledger) == (1, 7, 0)

    run(story())


def test_a_rate_is_charged(opened):
    async def story() -> None:
        async with opened(LedgerPolicy(rate=Rate(1, 60.0))) as ledger:
            assert await transacted(ledger, header(1)) == {}
            assert await transacted(ledger, header(2)) == {"a": RefusalReason.LIMITED}

    run(story())


def test_a_forgotten_key_takes_only_what_was_sent_within_the_retention(opened):
    async def story() -> None:
        async with opened(LedgerPolicy(retention_s=100.0)) as ledger:
            now = await ledger.now()
            late, known = header(1, sent_at=now - 200.0), ChangeHeader("b", order_of(2), sent_at=now - 200.0)
            assert await transacted(ledger, ChangeHeader("b", order_of(1), sent_at=now)) == {}
            assert await transacted(ledger, late, known) == {"a": RefusalReason.FORGOTTEN}
            assert (await mark_of(ledger, "a"), await mark_of(ledger, "b")) == (None, order_of(2))

    run(story())


def test_a_deletion_leaves_a_tombstone_beside_plain_marks(opened):
    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header(1, deleted=True), ChangeHeader("b", order_of(1))) == {}
            counts = await ledger.counts()
            assert (counts.keys, counts.tombstones) == (2, 1)
            assert await transacted(ledger, header(2)) == {}
            assert (await ledger.counts()).tombstones == 0

    run(story())


def test_a_claim_writes_no_mark_and_a_commit_reads_none(opened):
    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header(1)) == {}
            seen = noted(ledger)
            claim = await claimed(ledger, order_of(2))
            assert [text for text in seen if text.startswith("insert")] == []
            seen.clear()
            assert await ledger.commit([Commit(claim)]) == []
            assert [text.split()[0] for text in seen] == ["select", "insert"]
            assert "json_each('[]')" in seen[0]
            assert await mark_of(ledger) == order_of(2)

    run(story())


def test_the_row_of_marks_says_when_a_claim_was_that_left_the_mark_as_it_is(opened):
    """A key is pruned by its age, and the row of the claim that knew it is gone."""

    async def story() -> None:
        async with opened() as ledger:
            assert await transacted(ledger, header(1)) == {}
            ledger.database.move_clock(1000.0)
            await ledger.release([await claimed(ledger, None)])
            entry = await ledger.inspect("a")
            assert entry is not None and entry.is_idle and entry.mark == order_of(1)
            assert entry.updated_at > await ledger.now() - 60.0

    run(story())


def test_a_commit_that_leaves_its_key_suspect_raises_the_mark(opened):
    async def story() -> None:
        async with opened() as ledger:
            claim = await claimed(ledger, order_of(1))
            await ledger.mark_suspect([ChangeHeader("a", None)])
            assert await ledger.commit([Commit(claim)]) == []
            counts = await ledger.counts()
            assert (counts.keys, counts.suspects) == (1, 1)

    run(story())
