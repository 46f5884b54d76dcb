"""What every ledger promises about keys that workers wrote while they could not reach it."""

from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Controls
from keywise.core.entry import Certainty, Commit, Level, RefusalReason
from keywise.core.ledger import Failure
from keywise.testing.conformance.claims import (
    CLOCK_S,
    KEYS,
    LEASE_S,
    PLAIN,
    REDELIVERY_S,
    SAFE,
    LedgerBench,
    granted,
    refused,
)
from keywise.testing.conformance.promise import Promises, near, same

SUSPECT_PROMISES: Promises[LedgerBench] = Promises()


@SUSPECT_PROMISES.add(PLAIN)
async def keys_written_without_a_claim_are_suspect(bench: LedgerBench) -> None:
    """Any key can be marked suspect, known or unknown, and its mark stays."""
    await bench.committed(5)
    await bench.ledger.admin.mark_suspect([ChangeHeader(key, order_of(7)) for key in KEYS])
    same("the suspicions of each key", [(await bench.entry(key)).suspicions for key in KEYS], [1] * len(KEYS))
    near(
        "the time of the suspicion", (await bench.entry()).suspected_at, await bench.ledger.admin.now(), within=CLOCK_S
    )
    same("the mark", (await bench.entry()).mark, order_of(5))
    bench.advance(100.0)
    same("the suspects", sorted(await bench.another.admin.suspects(100, 50.0)), sorted(KEYS))


@SUSPECT_PROMISES.add(PLAIN)
async def older_changes_wait_for_what_was_written_without_a_claim(bench: LedgerBench) -> None:
    """After a write without a claim, older changes wait; the same order and newer ones do not."""
    await bench.committed(5)
    await bench.ledger.admin.mark_suspect([ChangeHeader("a", order_of(7))])
    refused(await bench.ask(6), RefusalReason.DEFERRED, wait_s=REDELIVERY_S)
    refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))
    same("the refused commits of the same order", await bench.ledger.commit([Commit(await bench.take(7))]), [])
    same("the suspicions", (await bench.entry()).suspicions, 1)
    refused(await bench.ask(6), RefusalReason.STALE, mark=order_of(7))


@SUSPECT_PROMISES.add(PLAIN)
async def what_was_written_below_the_mark_makes_nothing_wait(bench: LedgerBench) -> None:
    """A write below the mark makes the key suspect, but no change waits: the mark already decides what is stale."""
    await bench.committed(5)
    await bench.ledger.admin.mark_suspect([ChangeHeader("a", order_of(4)), ChangeHeader("b", None)])
    same("the unknown order", (await bench.entry()).unknown, None)
    same("the suspicions of both keys", [(await bench.entry(key)).suspicions for key in "ab"], [1, 1])
    await bench.take(6)


@SUSPECT_PROMISES.add(PLAIN)
async def marking_suspect_leaves_claims_and_attempts_alone(bench: LedgerBench) -> None:
    """Marking a key suspect keeps its claim and its failed attempts; only the count of suspicions grows."""
    failed = await bench.take(6, key="b")
    await bench.ledger.fail([Failure(failed, Certainty.CLEAN, 0.0)])
    claim = await bench.take(6)
    for _ in range(2):
        await bench.another.admin.mark_suspect([ChangeHeader("a", order_of(5)), ChangeHeader("b", order_of(6))])
    same("lost renewals", await bench.ledger.renew([claim], LEASE_S), [])
    same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
    same("the suspicions of both keys", [(await bench.entry(key)).suspicions for key in "ab"], [2, 2])
    same("the failed attempts", (await bench.entry("b")).attempts, 1)


@SUSPECT_PROMISES.add(PLAIN)
async def a_repair_need_not_wait_for_a_holder_whose_change_was_written_without_it(bench: LedgerBench) -> None:
    """Once the lease has expired, a repair gets the key if the holder's order or a newer one was written without it."""
    for key in "abc":
        await bench.take(6, key=key)
    await bench.ledger.admin.mark_suspect([ChangeHeader("a", order_of(6))])
    refused(await bench.ask_for(ChangeHeader("a", None), "w2", level=Level.ALONE), RefusalReason.BUSY)
    bench.expire()
    granted(await bench.ask_for(ChangeHeader("a", None), "w2", level=Level.ALONE))
    await bench.ledger.admin.mark_suspect([ChangeHeader("b", order_of(6)), ChangeHeader("c", order_of(5))])
    same("the token after the suspicion", (await bench.entry("b")).token, 0)
    same("the order of the last attempt", (await bench.entry("b")).tried, order_of(6))
    refused(await bench.ask_for(ChangeHeader("c", None), "w2", level=Level.ALONE), RefusalReason.DEFERRED)
    granted(await bench.ask_for(ChangeHeader("b", None), "w2", level=Level.ALONE))


@SUSPECT_PROMISES.add(SAFE)
async def a_sink_that_refuses_older_changes_has_no_suspects(bench: LedgerBench) -> None:
    """If the sink itself refuses older changes, a write without a claim does not make a key suspect."""
    await bench.committed(5)
    await bench.ledger.admin.mark_suspect([ChangeHeader("a", order_of(7)), ChangeHeader("b", order_of(7))])
    same("the suspects", (await bench.ledger.admin.counts()).suspects, 0)
    await bench.take(6)


@SUSPECT_PROMISES.add(SAFE)
async def a_full_resync_is_due_until_it_is_taken_back(bench: LedgerBench) -> None:
    """A full resync is due from the first request on, all connections see it, and claims are still granted."""
    admin, control_store = bench.ledger.admin, bench.another.control_store
    await admin.mark_suspect([], True)
    since = (await control_store.controls()).resync_at
    near("when the resync became due", since, await admin.now(), within=CLOCK_S)
    bench.advance(100.0)
    await admin.mark_suspect([ChangeHeader("a", order_of(1))], True)
    await admin.mark_suspect([], None)
    same("when the resync became due, after a second request", (await control_store.controls()).resync_at, since)
    await bench.take(1)
    await admin.mark_suspect([], False)
    same("the controls after the resync was taken back", await control_store.controls(), Controls())
