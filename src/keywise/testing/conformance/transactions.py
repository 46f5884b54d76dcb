"""What every ledger promises about its transactions: decisions, marks and dead letters commit together."""

import asyncio

from keywise.core.change import ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Certainty, Commit, Level, Refusal, RefusalReason
from keywise.core.ledger import Failure
from keywise.testing.conformance.claims import (
    CLOCK_S,
    FORGETTING,
    KEYS,
    LEASE_S,
    PLAIN,
    REDELIVERY_S,
    RETENTION_S,
    SAFE,
    VERSIONS,
    LedgerBench,
    granted,
    letters_of,
    refused,
)
from keywise.testing.conformance.promise import Promises, same

TRANSACTION_PROMISES: Promises[LedgerBench] = Promises()

LETTER = DeadLetter("it is bad", b"\x00\xff body", "a", 5)


class _RolledBack(Exception):
    """Leaves a transaction or a savepoint on purpose."""


def headers(*versions: tuple[str, int | None]) -> list[ChangeHeader]:
    return [ChangeHeader(key, order_of(version)) for key, version in versions]


async def decided(bench: LedgerBench, header: ChangeHeader) -> Refusal | None:
    """Return the refusal of one header by a transaction that does nothing else, or None."""
    async with bench.ledger.transaction() as transaction:
        refusals: dict[str, Refusal] = await transaction.decide([header])
    return refusals.get(header.key)


async def marked(bench: LedgerBench, key: str, version: int | None, *, deleted: bool = False) -> None:
    header = ChangeHeader(key, order_of(version), deleted)
    async with bench.ledger.transaction() as transaction:
        same("refusals", await transaction.decide([header]), {})
        await transaction.mark([header])


@TRANSACTION_PROMISES.add(SAFE)
async def a_mark_is_there_after_the_transaction(bench: LedgerBench) -> None:
    """A mark that is set in a transaction commits with it, and so does a deletion."""
    await marked(bench, "a", 5)
    await marked(bench, "b", 7, deleted=True)
    for key, version, deleted in (("a", 5, False), ("b", 7, True)):
        entry = await bench.another.inspect(key)
        same(f"mark and deletion of {key}", (entry.mark, entry.deleted), (order_of(version), deleted))
    refused(await bench.ask(4, "w2"), RefusalReason.STALE, mark=order_of(5))


@TRANSACTION_PROMISES.add(SAFE)
async def any_key_and_any_version_is_marked_exactly(bench: LedgerBench) -> None:
    """Keys are any text of up to 512 bytes; versions use all 64 bits."""
    for key in KEYS:
        await marked(bench, key, 7)
        same(f"the mark of {key[:20]!r}", (await bench.entry(key)).mark, order_of(7))
    for version in VERSIONS:
        await marked(bench, "versions", version)
        same("the mark", (await bench.entry("versions")).mark, order_of(version))


@TRANSACTION_PROMISES.add(SAFE)
async def a_rollback_leaves_nothing(bench: LedgerBench) -> None:
    """A rollback undoes the marks, failed attempts and dead letters of the transaction."""
    await bench.committed(1, key="a")
    before = await bench.entry("a")
    try:
        async with bench.ledger.transaction() as transaction:
            await transaction.decide(headers(("a", 5), ("b", 5), ("c", 5)))
            await transaction.mark(headers(("a", 5)))
            await transaction.fail(headers(("b", 5)))
            await transaction.dead_letter([(ChangeHeader("c", order_of(5)), LETTER), (None, LETTER)])
            raise _RolledBack
    except _RolledBack:
        pass
    same("the marked key", await bench.entry("a"), before)
    same("the failed key", await bench.ledger.inspect("b"), None)
    same("the dead letters", await bench.ledger.dead_letters(10), [])


@TRANSACTION_PROMISES.add(SAFE)
async def others_see_nothing_of_an_open_transaction(bench: LedgerBench) -> None:
    """A mark and a dead letter can be seen only after the commit: a worker acks a message whose letter it finds."""
    async with bench.ledger.transaction() as transaction:
        await transaction.decide(headers(("a", 5), ("b", 5)))
        await transaction.mark(headers(("a", 5)))
        await transaction.dead_letter([(ChangeHeader("b", order_of(5)), LETTER)])
        same("the entry before the commit", await bench.another.inspect("a"), None)
        same("the dead letters before the commit", await bench.another.dead_letters(10), [])
    same("the mark after the commit", (await bench.entry("a")).mark, order_of(5))
    same("the dead letters after the commit", letters_of(await bench.another.dead_letters(10)), [LETTER])


@TRANSACTION_PROMISES.add(SAFE)
async def versioned_and_unversioned_changes_of_an_idle_key_do_not_mix(bench: LedgerBench) -> None:
    """A transaction refuses an unversioned change of a versioned key, also one below zero, and the other way round."""
    marks = {"below zero": -5, "zero": 0, "above zero": 5, "unversioned": None}
    for key, version in marks.items():
        await marked(bench, key, version)
    asked = [(key, None) for key in marks if key != "unversioned"]
    for versions in (asked, [("unversioned", -1)], [("unversioned", 1)]):
        async with bench.ledger.transaction() as transaction:
            refusals = await transaction.decide(headers(*versions))
        seen = {key: refusal.reason for key, refusal in refusals.items()}
        same("the reasons", seen, dict.fromkeys((key for key, _ in versions), RefusalReason.MIXED))


@TRANSACTION_PROMISES.add(FORGETTING)
async def a_transaction_refuses_what_a_claim_would(bench: LedgerBench) -> None:
    """A transaction refuses stale, duplicate, mixed, forgotten and busy changes for the same reasons as a claim."""
    await bench.committed(5)
    await bench.committed(None, key="unversioned")
    await bench.take(5, "w2", key="held")
    # The clock of a ledger in memory begins when the machine is started.
    early = await bench.ledger.now() - RETENTION_S - CLOCK_S
    asked = [
        *headers(("a", 4), ("unversioned", 1), ("held", 9), ("free", 1)),
        ChangeHeader("gone", order_of(1), sent_at=early),
    ]
    async with bench.ledger.transaction() as transaction:
        refusals = await transaction.decide(asked)
    seen = {key: refusal.reason for key, refusal in refusals.items()}
    wanted = {
        "a": RefusalReason.STALE,
        "unversioned": RefusalReason.MIXED,
        "held": RefusalReason.BUSY,
        "gone": RefusalReason.FORGOTTEN,
    }
    same("the refusals", seen, wanted)
    same("the mark of the refusal", refusals["a"].mark, order_of(5))
    same("whether the wait of the refusal is about one lease", LEASE_S - 5 <= refusals["held"].wait_s <= LEASE_S, True)
    equal = await decided(bench, ChangeHeader("a", order_of(5)))
    same("the reason for the mark itself", equal and equal.reason, RefusalReason.DUPLICATE)


@TRANSACTION_PROMISES.add(SAFE)
async def a_row_in_a_transaction_does_not_restore_what_is_deleted(bench: LedgerBench) -> None:
    """A transaction refuses a row of a reindex as removed if its key is deleted at its version, as a claim does."""
    await bench.committed(5, deleted=True)
    await bench.committed(5, key="b")
    rows = [ChangeHeader(key, (0, 5, 1), is_row=True) for key in ("a", "b", "c")]
    removed = Refusal(RefusalReason.REMOVED, mark=order_of(5))
    async with bench.ledger.transaction() as transaction:
        same("the refusals", await transaction.decide(rows), {"a": removed})
    await bench.take(1, key="c")
    async with bench.ledger.transaction() as transaction:
        refusals = await transaction.decide(rows)
    same("the keys that are refused beside a held one", sorted(refusals), ["a", "c"])
    same("the refusal beside a held key", refusals["a"], removed)
    same("the refusal of a forced write", await decided(bench, ChangeHeader("a", (0, 5, 1))), None)
    same("the refusal of a newer row", await decided(bench, ChangeHeader("a", (0, 6, 1), is_row=True)), None)


@TRANSACTION_PROMISES.add(FORGETTING)
async def a_transaction_sets_late_changes_of_unknown_keys_aside(bench: LedgerBench) -> None:
    """A change older than the retention is refused as forgotten if its key is unknown, even in an idle ledger."""
    early = await bench.ledger.now() - RETENTION_S - CLOCK_S
    late = await decided(bench, ChangeHeader("a", order_of(1), sent_at=early))
    same("the reason for an unknown key", late and late.reason, RefusalReason.FORGOTTEN)
    await marked(bench, "a", 1)
    same("the refusal of a known key", await decided(bench, ChangeHeader("a", order_of(2), sent_at=early)), None)
    recent = await decided(bench, ChangeHeader("b", order_of(1), sent_at=early + 2 * CLOCK_S))
    same("the refusal of a change within the retention", recent, None)


@TRANSACTION_PROMISES.add(PLAIN)
async def a_transaction_respects_what_is_unknown(bench: LedgerBench) -> None:
    """An unknown write defers a transaction as it defers a claim; a crashed holder does not, as no user code runs."""
    await bench.take(5, "dead", key="dead")
    await bench.ledger.fail([Failure(await bench.take(7, key="unknown"), Certainty.ENDED, 1.0)])
    bench.expire()
    dead = await decided(bench, ChangeHeader("dead", order_of(5)))
    same("the refusal of a key whose holder crashed", dead, None)
    unknown = await decided(bench, ChangeHeader("unknown", order_of(6)))
    same("the reason for an older change", unknown and unknown.reason, RefusalReason.DEFERRED)
    same("the refusal of a newer change", await decided(bench, ChangeHeader("unknown", order_of(8))), None)
    bench.advance(REDELIVERY_S)
    same(
        "the refusal of an older change, once the unknown one cannot be redelivered",
        await decided(bench, ChangeHeader("unknown", order_of(6))),
        None,
    )


@TRANSACTION_PROMISES.add(SAFE)
async def a_decision_does_not_take_the_key(bench: LedgerBench) -> None:
    """A transaction that only decides stores nothing."""
    same("the refusal", await decided(bench, ChangeHeader("a", order_of(5))), None)
    same("the entry of the key", await bench.ledger.inspect("a"), None)
    await bench.take(5, "w2")


@TRANSACTION_PROMISES.add(SAFE)
async def a_savepoint_is_rolled_back_alone(bench: LedgerBench) -> None:
    """An error inside a savepoint undoes what was done in it and nothing else."""
    async with bench.ledger.transaction() as transaction:
        await transaction.decide(headers(("a", 5), ("b", 5), ("c", 5)))
        await transaction.mark(headers(("a", 5)))
        try:
            async with transaction.savepoint():
                await transaction.mark(headers(("b", 5)))
                await transaction.dead_letter([(None, LETTER)])
                raise _RolledBack
        except _RolledBack:
            pass
        async with transaction.savepoint():
            await transaction.decide(headers(("c", 5)))
            await transaction.mark(headers(("c", 5)))
    found = {key: (await bench.another.inspect(key)) for key in "abc"}
    seen = {key: entry and entry.mark for key, entry in found.items()}
    same("the marks", seen, {"a": order_of(5), "b": None, "c": order_of(5)})
    same("the dead letters", await bench.ledger.dead_letters(10), [])


@TRANSACTION_PROMISES.add(SAFE)
async def failed_attempts_are_counted_inside(bench: LedgerBench) -> None:
    """Failed attempts are counted per key and order; a commit in between, or a newer order, resets the count."""
    for wanted in (1, 2, 3):
        async with bench.ledger.transaction() as transaction:
            same("the counts", await transaction.fail(headers(("a", 5), ("b", wanted))), [wanted, 1])
    same("the attempts of the next claim", (await bench.take(5)).attempts, 3)
    async with bench.ledger.transaction() as transaction:
        same("the count of a newer order", await transaction.fail(headers(("b", 9))), [1])
    await marked(bench, "b", 9)
    entry = await bench.entry("b")
    same("mark and attempts after the commit", (entry.mark, entry.tried, entry.attempts), (order_of(9), None, 0))


@TRANSACTION_PROMISES.add(SAFE)
async def a_dead_letter_inside_is_stored_whole_and_resets_the_attempts(bench: LedgerBench) -> None:
    """A dead letter is stored whole; older changes of its key are granted again, and its attempts are forgotten."""
    async with bench.ledger.transaction() as transaction:
        await transaction.fail(headers(("a", 5)))
        await transaction.dead_letter([(ChangeHeader("a", order_of(5)), LETTER), (None, DeadLetter("unread", b"{"))])
    same("the dead letters", letters_of(await bench.another.dead_letters(10)), [DeadLetter("unread", b"{"), LETTER])
    same("the refusal of an older change", await decided(bench, ChangeHeader("a", order_of(4))), None)
    same("the attempts after the dead letter", (await bench.take(5)).attempts, 0)


@TRANSACTION_PROMISES.add(PLAIN)
async def a_commit_inside_needs_the_claim(bench: LedgerBench) -> None:
    """A claim that was taken over is refused inside a transaction; the caller then rolls back."""
    mine, old = await bench.take(5, key="mine"), await bench.take(5, key="old")
    bench.advance(LEASE_S / 2)
    await bench.ledger.renew([mine], LEASE_S)
    bench.advance(LEASE_S / 2 + 1.0)
    await bench.take(5, "w2", key="old", level=Level.ALONE)
    async with bench.ledger.transaction() as transaction:
        same("refused commits", await transaction.commit([Commit(mine)]), [])
    same("the mark", (await bench.entry("mine")).mark, order_of(5))
    try:
        async with bench.ledger.transaction() as transaction:
            same("refused commits", await transaction.commit([Commit(old)]), [old])
            raise _RolledBack
    except _RolledBack:
        pass
    same("the mark", (await bench.entry("old")).mark, None)


@TRANSACTION_PROMISES.add(SAFE)
async def a_commit_inside_is_never_repeated(bench: LedgerBench) -> None:
    """A commit of an order that is already the mark is refused: its effect exists, and must not happen twice."""
    claim = await bench.take(5)
    async with bench.ledger.transaction() as transaction:
        same("refused commits", await transaction.commit([Commit(claim)]), [])
    try:
        async with bench.ledger.transaction() as transaction:
            same("refused commits the second time", await transaction.commit([Commit(claim)]), [claim])
            raise _RolledBack
    except _RolledBack:
        pass


@TRANSACTION_PROMISES.add(SAFE)
async def others_wait_for_an_open_transaction(bench: LedgerBench) -> None:
    """A claim over another connection is answered as if it had come before the transaction or after it."""
    async with bench.ledger.transaction() as transaction:
        await transaction.decide(headers(("a", 5)))
        elsewhere = asyncio.create_task(bench.ask(5, "w2"))
        await asyncio.wait([elsewhere], timeout=0.05)
        if elsewhere.done():
            granted(await elsewhere)
            raise AssertionError("a claim was granted on a key that an open transaction is about to mark")
        await transaction.mark(headers(("a", 5)))
    refused(await elsewhere, RefusalReason.DUPLICATE)


@TRANSACTION_PROMISES.add(SAFE)
async def concurrent_transactions_mark_each_order_once(bench: LedgerBench) -> None:
    """If many transactions decide and mark the same key at the same time, each order is marked once."""
    applied: list[int] = []

    async def work(ledger: object) -> None:
        for version in range(1, 41):
            async with ledger.transaction() as transaction:  # type: ignore[attr-defined]
                if not await transaction.decide(headers(("a", version))):
                    await transaction.mark(headers(("a", version)))
                    applied.append(version)

    await asyncio.gather(work(bench.ledger), work(bench.another))
    same("the versions that were applied", applied, sorted(set(applied)))
    same("the mark", (await bench.entry()).mark, order_of(40))
