"""What every ledger promises about an operator's controls, rates and locks that workers share, and the history."""

import asyncio
from typing import Any

from msgspec.structs import replace

from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Pause, ReindexRun
from keywise.core.entry import Certainty, Claim, Commit, LeaseTerms, LedgerPolicy, Level, Refusal, RefusalReason
from keywise.core.history import HistoryRecord
from keywise.core.ledger import Failure
from keywise.core.limits import Rate
from keywise.testing.conformance.claims import (
    KEYS,
    LEASE_S,
    PLAIN,
    REDELIVERY_S,
    SAFE,
    VERSIONS,
    LedgerBench,
    granted,
    refused,
)
from keywise.testing.conformance.promise import Promises, UncheckedError, same

CONTROL_STORE_PROMISES: Promises[LedgerBench] = Promises()
GOVERNED_TRANSACTION_PROMISES: Promises[LedgerBench] = Promises()
HISTORY_PROMISES: Promises[LedgerBench] = Promises()

EVERY_S = 60.0
PER_S = 300.0
LIMITED = LedgerPolicy(redelivery_s=REDELIVERY_S, rate=Rate(3, per=PER_S))
"""Three dispatches of a key in five minutes: a burst of three, then one every hundred seconds."""
SPACED = LedgerPolicy(redelivery_s=REDELIVERY_S, rate=Rate(1, per=PER_S))
"""One dispatch of a key in five minutes."""
LAST_PART_S = 0.9
"""The last part of a limit, in which it must still hold."""
TRIES = 10
"""How often to try to reach that part in time."""
BY_OPERATOR = LeaseTerms("operator", LEASE_S, despite_pause=True)


async def asked_despite_pause(bench: LedgerBench, header: ChangeHeader) -> Claim | Refusal:
    results = await bench.ledger.claim([header], BY_OPERATOR)
    return results.granted[0] if results.granted else results.refused[header.key]  # type: ignore[no-any-return]


async def reset(bench: LedgerBench, key: str = "a") -> int | None:
    """Raise the era of one key, as an operator does."""
    claim = granted(await asked_despite_pause(bench, ChangeHeader(key, None)))
    era: int | None = await bench.ledger.control_store.reset(claim)
    return era


async def in_transaction(bench: LedgerBench, header: ChangeHeader, *, another: bool = False) -> Refusal | None:
    """Decide and mark in a transaction, without a claim; return the refusal, if there is one.

    A ledger without transactions gives the same answer to a claim.
    """
    ledger: Any = bench.another if another else bench.ledger
    if not bench.has_transactions:
        results = await ledger.claim([header], LeaseTerms("w1", LEASE_S))
        await ledger.commit([Commit(claim) for claim in results.granted])
        refusal: Refusal | None = results.refused.get(header.key)
        return refusal
    async with ledger.transaction() as transaction:
        refusals: dict[str, Refusal] = await transaction.decide([header])
        await transaction.mark([header] if not refusals else [])
    return refusals.get(header.key)


@CONTROL_STORE_PROMISES.add(SAFE)
async def pauses_are_seen_on_all_connections(bench: LedgerBench) -> None:
    """A pause is seen on all connections, with its author, time and reason, until it is resumed by the same name."""
    control_store, other = bench.ledger.control_store, bench.another.control_store
    same("the controls of a new pipeline", await other.controls(), Controls())
    one = Pause("a*", is_pattern=True, at=12.5, by="ann", why='it\'s "hot"\n🦉')
    key, renewed = Pause("a*", at=13.0, by="bob"), Pause("a*", at=14.0, by="eve")
    for pause in (one, key, renewed):
        await control_store.pause(pause)
    same("the times of the pauses", sorted(p.at for p in (await other.controls()).pauses), [12.5, 14.0])
    same("the pauses of patterns", [p for p in (await other.controls()).pauses if p.is_pattern], [one])
    same("whether a key that was never paused was resumed", await other.resume("b", False), False)
    same("whether the pattern was resumed", await other.resume("a*", True), True)
    same("the pauses that are left", (await control_store.controls()).pauses, (renewed,))
    same(
        "whether each of two resumes found the pause",
        (await control_store.resume("a*", False), await other.resume("a*", False)),
        (True, False),
    )
    same("the controls after the last pause", await control_store.controls(), Controls())


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_paused_key_is_refused(bench: LedgerBench) -> None:
    """A paused key is refused to claims and transactions; its stale changes are still refused as stale."""
    await bench.committed(5)
    for pause in (Pause("a"), Pause("[ab]", is_pattern=True), Pause(EVERYTHING, is_pattern=True)):
        await bench.another.control_store.pause(pause)
        refused(await bench.ask(6), RefusalReason.PAUSED)
        refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))
        refused(await bench.ask(4), RefusalReason.STALE, mark=order_of(5))
        answer = await in_transaction(bench, ChangeHeader("a", order_of(6)))
        same("the reason in a transaction", answer and answer.reason, RefusalReason.PAUSED)
        await bench.another.control_store.resume(pause.keys, pause.is_pattern)
        await bench.ledger.release([await bench.take(6)])


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_pause_covers_its_keys_only(bench: LedgerBench) -> None:
    """A pause covers the key that it names or the keys that match its pattern; a name is not a pattern."""
    await bench.ledger.control_store.pause(Pause("page-?", is_pattern=True))
    await bench.ledger.control_store.pause(Pause("shop*"))
    for key in ("page-1", "page-?", "shop*"):
        refused(await bench.ask(1, key=key), RefusalReason.PAUSED)
    for key in ("page-", "page-12", "Page-1", "shop", "shops"):
        await bench.take(1, key=key)


@CONTROL_STORE_PROMISES.add(SAFE)
async def claims_that_are_held_go_on_under_a_pause(bench: LedgerBench) -> None:
    """A pause ends no claim: the holder renews and commits, and the next claim is refused."""
    claim = await bench.take(5)
    await bench.another.control_store.pause(Pause("a"))
    same("lost renewals", await bench.ledger.renew([claim], LEASE_S), [])
    same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
    refused(await bench.ask(6, "w2"), RefusalReason.PAUSED)


@CONTROL_STORE_PROMISES.add(SAFE)
async def an_operator_works_on_what_is_paused(bench: LedgerBench) -> None:
    """A claim with `despite_pause` is granted, unless another worker holds the key."""
    held = await bench.take(5)
    await bench.ledger.control_store.pause(Pause("a"))
    refused(await asked_despite_pause(bench, ChangeHeader("a", None)), RefusalReason.BUSY)
    await bench.ledger.release([held])
    granted(await asked_despite_pause(bench, ChangeHeader("a", None)))


@CONTROL_STORE_PROMISES.add(PLAIN)
async def a_reset_makes_any_version_newer(bench: LedgerBench) -> None:
    """After a reset, the next change of any version is granted in the new era; the reset leaves the mark alone."""
    for era, version in enumerate(VERSIONS[::-1], start=1):
        await bench.committed(version)
        mark = (await bench.entry()).mark
        same("the returned era", await reset(bench), era)
        same("the mark", (await bench.entry()).mark, mark)
        same("the token after the reset", (await bench.entry()).token, 0)
    await bench.take(VERSIONS[0], "w2")
    same("the order of another key", (await bench.take(1, key="b")).order, order_of(1))


@CONTROL_STORE_PROMISES.add(SAFE)
async def versions_are_compared_within_an_era(bench: LedgerBench) -> None:
    """After a reset, the newest version of the new era wins, and refusals name the mark as upstream knows it."""
    await bench.committed(100)
    await reset(bench)
    same("the refusal of a low version", await in_transaction(bench, ChangeHeader("a", order_of(3))), None)
    same("the mark", (await bench.entry()).mark, (1, 3, 0))
    refused(await bench.ask(2, "w2"), RefusalReason.STALE, mark=order_of(3))
    refused(await bench.ask(3, "w2"), RefusalReason.DUPLICATE, mark=order_of(3))
    await bench.committed(4)
    same("the mark", (await bench.entry()).mark, (1, 4, 0))


@GOVERNED_TRANSACTION_PROMISES.add(SAFE)
async def a_scale_is_fixed_beside_a_transaction(bench: LedgerBench) -> None:
    """A transaction of another connection that rolls back does not take a fixed scale with it."""
    fixing: asyncio.Task[str] | None = None
    try:
        async with bench.ledger.transaction() as transaction:
            await transaction.mark([ChangeHeader("a", order_of(1))])
            fixing = asyncio.create_task(bench.another.control_store.fix_scale("event-time"))
            await asyncio.sleep(0)
            raise _RolledBackBeside
    except _RolledBackBeside:
        pass
    assert fixing is not None, "the transaction has begun"
    same("the fixed scale", await fixing, "event-time")
    same("the scale", (await bench.ledger.control_store.controls()).scale, "event-time")


class _RolledBackBeside(Exception):
    """Leaves a transaction on purpose."""


@GOVERNED_TRANSACTION_PROMISES.add(SAFE)
async def decisions_of_a_transaction_are_independent(bench: LedgerBench) -> None:
    """A decision in a transaction does not affect a later decision about another key."""
    for key in ("a", "b"):
        same("a refusal", await in_transaction(bench, ChangeHeader(key, order_of(100))), None)
    await reset(bench, "a")
    same("a refusal", await in_transaction(bench, ChangeHeader("a", order_of(1))), None)
    await reset(bench, "b")
    async with bench.ledger.transaction() as transaction:
        for key in ("a", "b"):
            same("the refusals", await transaction.decide([ChangeHeader(key, order_of(3))]), {})
            await transaction.mark([ChangeHeader(key, order_of(3))])
    for key in ("a", "b"):
        same("the mark", (await bench.ledger.admin.inspect(key)).mark, (1, 3, 0))


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_reset_needs_its_claim(bench: LedgerBench) -> None:
    """A lost claim raises no era."""
    claim = granted(await asked_despite_pause(bench, ChangeHeader("a", None)))
    bench.expire()
    await bench.take(1, "w2", level=Level.ALONE)
    same("the era", await bench.ledger.control_store.reset(claim), None)
    same("the era of the key", (await bench.entry()).era, 0)


@CONTROL_STORE_PROMISES.add(SAFE)
async def the_era_of_all_keys_is_raised_while_no_claim_is_held(bench: LedgerBench) -> None:
    """The era is raised only while no claim is held; it is then above the era of every key, known or unknown."""
    control_store = bench.another.control_store
    for _ in range(3):
        await reset(bench, "reset")
    claim = await bench.take(5)
    same("the era while a claim is held", await control_store.raise_era(), None)
    same("the era of the pipeline", (await bench.ledger.control_store.controls()).era, 0)
    await bench.ledger.commit([Commit(claim)])
    same("the era above that of a key", await control_store.raise_era(), 4)
    for key in ("a", "reset", "new"):
        same(f"the order of a low version of {key}", (await bench.take(1, key=key)).order, (4, 1, 0))
    bench.expire()
    same("the era above that of the pipeline", await control_store.raise_era(), 5)
    same("the era of the pipeline", (await bench.ledger.control_store.controls()).era, 5)


@CONTROL_STORE_PROMISES.add(SAFE)
async def the_first_scale_of_versions_stays(bench: LedgerBench) -> None:
    """The first scale that is fixed stays, on all connections, and changes nothing else that an operator has set."""
    control_store, other = bench.ledger.control_store, bench.another.control_store
    pause = Pause("b", at=1.0, by="ann")
    await other.pause(pause)
    found = await asyncio.gather(control_store.fix_scale("event-time"), other.fix_scale("s3-sequencer"))
    same("whether both got the same scale", len(set(found)), 1)
    for scale in ("gcs-generation", "event-time", "s3-sequencer"):
        same("the scale", await other.fix_scale(scale), found[0])
    same("the controls", await control_store.controls(), Controls(pauses=(pause,), scale=found[0]))
    await control_store.resume("b", False)
    same("the era", await control_store.raise_era(), 1)
    same("the scale after all that", await other.fix_scale("event-time"), found[0])
    same("the controls", await other.controls(), Controls(1, scale=found[0]))


@CONTROL_STORE_PROMISES.add(SAFE)
async def controls_are_replaced_only_as_the_caller_knows_them(bench: LedgerBench) -> None:
    """The controls are replaced if they are as the caller says; otherwise nothing changes, and the answer is False."""
    control_store, other = bench.ledger.control_store, bench.another.control_store
    plain, started = Controls(), Controls(resync_at=2.5, scale="event-time", run=ReindexRun(3, by="ann", why="🦉"))
    same("whether unknown controls were replaced", await control_store.replace_controls(started, plain), False)
    same("whether they were replaced", await control_store.replace_controls(plain, started), True)
    same("the controls", await other.controls(), started)
    same("whether older ones were replaced", await other.replace_controls(plain, started), False)
    same("whether equal ones were replaced", await other.replace_controls(started, started), True)
    await other.pause(Pause("b", at=1.0))
    same("whether they were replaced beside a pause", await control_store.replace_controls(started, plain), False)
    paused = await control_store.controls()
    same("the controls with a pause", paused, started.with_pause(Pause("b", at=1.0)))
    same("whether all of them were replaced", await control_store.replace_controls(paused, plain), True)
    same("the controls", await other.controls(), plain)


@CONTROL_STORE_PROMISES.add(SAFE)
async def one_of_several_replacements_at_once_is_made(bench: LedgerBench) -> None:
    """Of several replacements of the same controls at once, exactly one is made."""
    stores = [bench.ledger.control_store, bench.another.control_store] * 4
    before = Controls()
    for turn in range(3):
        runs = [Controls(run=ReindexRun(10 * turn + number + 1)) for number in range(len(stores))]
        done = await asyncio.gather(
            *(store.replace_controls(before, after) for store, after in zip(stores, runs, strict=True))
        )
        same("how many replacements were made", sum(done), 1)
        before = await bench.ledger.control_store.controls()
        same("the controls", before, runs[done.index(True)])


@CONTROL_STORE_PROMISES.add(SAFE)
async def claims_follow_replaced_controls_at_once(bench: LedgerBench) -> None:
    """A reindex in the controls decides no claim; a pause or an era that comes with it does, from that moment on."""
    control_store = bench.another.control_store
    await bench.committed(5)
    run = Controls(run=ReindexRun(1, by="ann"))
    same("whether the reindex was set", await control_store.replace_controls(Controls(), run), True)
    same("the order of a claim", (await bench.take(1, key="b")).order, order_of(1))
    refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))
    same("a refusal", await in_transaction(bench, ChangeHeader("a", order_of(6))), None)
    paused = run.with_pause(Pause("[ac]", is_pattern=True))
    same("whether the pause was set", await control_store.replace_controls(run, paused), True)
    refused(await bench.ask(7), RefusalReason.PAUSED)
    answer = await in_transaction(bench, ChangeHeader("a", order_of(7)))
    same("the reason in a transaction", answer and answer.reason, RefusalReason.PAUSED)
    raised = replace(run, era=2)
    same("whether the era was raised", await control_store.replace_controls(paused, raised), True)
    same("the order of a claim in the new era", (await bench.take(1, key="c")).order, (2, 1, 0))


@CONTROL_STORE_PROMISES.add(SAFE)
async def the_highest_generation_is_that_of_any_mark(bench: LedgerBench) -> None:
    """The highest generation is that of the marks now, also of keys that are held; a claim has none yet."""
    control_store = bench.another.control_store
    same("the highest generation of a new pipeline", await control_store.highest_generation(), 0)
    await bench.committed(None, key="unversioned")
    await bench.committed(5)
    same("the highest generation without a reindex", await control_store.highest_generation(), 0)
    await _commit(bench, ChangeHeader("a", (0, 5, 3)))
    await _commit(bench, ChangeHeader("b", (0, 1, 7), deleted=True))
    granted(await bench.ask_for(ChangeHeader("c", (0, 1, 9))))
    same("the highest generation", await control_store.highest_generation(), 7)
    held = granted(await bench.ask_for(ChangeHeader("b", (0, 2, 0))))
    same("the highest generation while its key is held", await control_store.highest_generation(), 7)
    await bench.ledger.commit([Commit(held)])
    same("the highest generation after a newer version", await control_store.highest_generation(), 3)


@CONTROL_STORE_PROMISES.add(PLAIN)
async def the_highest_generation_follows_a_suspect_key(bench: LedgerBench) -> None:
    """The highest generation is also read from the marks of suspect keys, whose entries are not idle."""
    for order in ((0, 1, 4), (0, 2, 2)):
        await _commit(bench, ChangeHeader("a", order))
        await bench.ledger.mark_suspect([ChangeHeader("a", (0, 1, 0))])
        same("the highest generation", await bench.another.control_store.highest_generation(), order[2])
    await bench.ledger.mark_suspect([ChangeHeader("b", None)])
    await _commit(bench, ChangeHeader("b", (0, 1, 6)))
    same("the generation of a new key", await bench.another.control_store.highest_generation(), 6)


async def _commit(bench: LedgerBench, header: ChangeHeader) -> None:
    same("refused commits", await bench.ledger.commit([Commit(granted(await bench.ask_for(header)))]), [])


@CONTROL_STORE_PROMISES.add(LIMITED)
async def a_rate_holds_for_all_workers_together(bench: LedgerBench) -> None:
    """A rate limits the dispatches of one key by all workers together; other keys are not affected."""
    for number, owner in enumerate(("w1", "w2", "w1"), start=1):
        claim = await bench.take(number, owner)
        await (bench.another if owner == "w2" else bench.ledger).commit([Commit(claim)])
    for owner in ("w1", "w2"):
        refused(await bench.ask(4, owner), RefusalReason.LIMITED, wait_s=PER_S / 3)
    refused(await bench.ask(3), RefusalReason.DUPLICATE)
    await bench.take(1, key="b")
    bench.advance(PER_S / 3)
    await bench.ledger.commit([Commit(await bench.take(4, "w2"))])
    refused(await bench.ask(5), RefusalReason.LIMITED, wait_s=PER_S / 3)
    bench.advance(PER_S)
    for version in (5, 6, 7):
        await bench.committed(version)
    refused(await bench.ask(8), RefusalReason.LIMITED)


@CONTROL_STORE_PROMISES.add(LIMITED)
async def a_dispatch_is_charged_even_if_it_fails(bench: LedgerBench) -> None:
    """A granted claim is charged to the rate, even if its attempt fails; a refusal is not charged."""
    for _ in range(3):
        claim = await bench.take(1)
        refused(await bench.ask(1, "w2"), RefusalReason.BUSY)
        await bench.ledger.fail([Failure(claim, Certainty.CLEAN, 0.001)])
        bench.advance(1.0)
    refused(await bench.ask(1), RefusalReason.LIMITED, wait_s=PER_S / 3 - 3.0)


@CONTROL_STORE_PROMISES.add(SPACED)
async def a_charge_limits_its_key_until_it_is_over(bench: LedgerBench) -> None:
    """A ledger may forget what was charged to a key once it limits nothing any more, and not a moment earlier."""
    for number in range(TRIES):
        key = f"a{number}"
        await bench.committed(1, key=key)
        limited_until = (await bench.entry(key)).rate_at
        bench.advance(PER_S - LAST_PART_S)
        # A store forgets old charges when it stores new ones.
        await bench.committed(1, key=f"b{number}")
        answer = await bench.ask(2, "w2", key=key)
        if await bench.ledger.now() < limited_until:
            refused(answer, RefusalReason.LIMITED)
            return
    raise UncheckedError(f"the store takes longer than {LAST_PART_S} seconds for a few steps")


@GOVERNED_TRANSACTION_PROMISES.add(LIMITED)
async def a_transaction_is_charged_at_its_mark(bench: LedgerBench) -> None:
    """In a transaction, a mark is charged to the rate; a decision alone is not."""
    for version in (1, 2, 3):
        async with bench.ledger.transaction() as transaction:
            same("refusals", await transaction.decide([ChangeHeader("a", order_of(version))]), {})
        answer = await in_transaction(bench, ChangeHeader("a", order_of(version)), another=version == 2)
        same("the refusal", answer, None)
    answer = await in_transaction(bench, ChangeHeader("a", order_of(4)))
    if answer is None:
        raise AssertionError("a fourth mark was allowed")
    refused(answer, RefusalReason.LIMITED, wait_s=PER_S / 3)
    refused(await bench.ask(4, "w2"), RefusalReason.LIMITED, wait_s=PER_S / 3)


@CONTROL_STORE_PROMISES.add(SAFE)
async def known_keys_are_listed_page_by_page(bench: LedgerBench) -> None:
    """Keys with a mark or a claim are listed in an order of the ledger's own, each once."""
    for key in KEYS:
        await bench.committed(1, key=key)
    await bench.take(2, key="a")
    await bench.take(1, key="only tried")
    wanted, listed, after = sorted([*KEYS, "only tried"]), [], ""
    while page := await bench.another.control_store.keys(after, 5):
        same("whether a page keeps the limit", len(page) <= 5, True)
        listed += page
        after = page[-1]
    same("all keys", sorted(listed), wanted)


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_periodic_lock_is_acquired_once_per_interval(bench: LedgerBench) -> None:
    """One worker acquires the lock of a periodic job, and none acquires it again before the interval is over."""
    for _ in range(3):
        acquired = await asyncio.gather(
            *(one.control_store.acquire("sweep", EVERY_S) for one in (bench.ledger, bench.another) * 3)
        )
        same("the number of workers with the lock", sum(acquired), 1)
        bench.advance(EVERY_S / 2)
        same(
            "whether the lock was acquired half an interval later",
            await bench.another.control_store.acquire("sweep", EVERY_S),
            False,
        )
        bench.advance(EVERY_S)
    same(
        "whether the lock of another job was acquired", await bench.ledger.control_store.acquire("dust", EVERY_S), True
    )


RECORDS = [
    HistoryRecord(10.5, "stale", "a", VERSIONS[0], "", "w1"),
    HistoryRecord(10.5, "failed", "b", VERSIONS[-1], 'it\'s "bad"\n\x1b[31m🦉', "w2"),
    HistoryRecord(11.0, "paused", "", None, "every key", "ann"),
    HistoryRecord(12.0, "applied", "a", None, "", "w1"),
    HistoryRecord(9.0, "duplicate", "a", 0, "", "w2"),
]


@HISTORY_PROMISES.add(SAFE)
async def records_are_listed_newest_first(bench: LedgerBench) -> None:
    """The history lists the newest record first: of all keys, of one key, or of the pipeline itself."""
    same("the history of a new pipeline", await bench.another.history_store.history(None, 10), [])
    await bench.ledger.history_store.record(RECORDS[:3])
    await bench.another.history_store.record(RECORDS[3:])
    await bench.ledger.history_store.record([])
    newest = RECORDS[::-1]
    same("all records", await bench.another.history_store.history(None, 10), newest)
    same("the newest two records", await bench.ledger.history_store.history(None, 2), newest[:2])
    for key in ("a", "b", "", "unknown"):
        of_key = [record for record in newest if record.key == key]
        same(f"the records of {key!r}", await bench.ledger.history_store.history(key, 10), of_key)
    same("the newest record of a key", await bench.another.history_store.history("a", 1), newest[:1])


@HISTORY_PROMISES.add(SAFE)
async def any_key_has_a_history(bench: LedgerBench) -> None:
    """The history can be read for any key."""
    await bench.ledger.history_store.record([HistoryRecord(1.0, "stale", key, 1) for key in KEYS])
    for key in KEYS:
        same(
            f"the records of {key!r}",
            await bench.another.history_store.history(key, 10),
            [HistoryRecord(1.0, "stale", key, 1)],
        )


@HISTORY_PROMISES.add(SAFE)
async def old_records_are_trimmed(bench: LedgerBench) -> None:
    """Trimming deletes records that are too old by the store's clock."""
    history_store, now = bench.ledger.history_store, await bench.ledger.now()
    await history_store.record([HistoryRecord(now - age_s, "stale", "a", age_s) for age_s in (300, 200, 100)])
    same("the number of trimmed records older than a day", await history_store.trim(86400.0, 10), 0)
    same("the number of trimmed records older than 150 s", await history_store.trim(150.0, 10), 2)
    same("the versions that are left", [one.version for one in await history_store.history(None, 10)], [100])
    bench.advance(100.0)
    same("the number of records trimmed later", await bench.another.history_store.trim(150.0, 10), 1)


@HISTORY_PROMISES.add(SAFE)
async def the_oldest_records_above_a_count_are_trimmed(bench: LedgerBench) -> None:
    """Trimming keeps the newest records, up to the given count."""
    history_store, now = bench.ledger.history_store, await bench.ledger.now()
    await history_store.record([HistoryRecord(now, "stale", "ab"[number % 2], number) for number in range(10)])
    for most, wanted in ((11, 0), (10, 0), (4, 6), (4, 0)):
        same(f"the number of trimmed records above {most}", await history_store.trim(86400.0, most), wanted)
    same("the versions that are left", [one.version for one in await history_store.history(None, 20)], [9, 8, 7, 6])
