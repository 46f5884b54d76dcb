"""What every ledger promises about what an operator sets, what workers agree on, and the history that it keeps."""

import asyncio
from typing import Any

from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Pause
from keywise.core.entry import Certainty, Claim, LeaseTerms, LedgerPolicy, Refusal, RefusalReason
from keywise.core.history import HistoryRecord
from keywise.core.ledger import Commit, Failure
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
from keywise.testing.conformance.promise import Promises, same

CONTROL_STORE_PROMISES: Promises[LedgerBench] = Promises()
GOVERNED_TRANSACTION_PROMISES: Promises[LedgerBench] = Promises()
HISTORY_PROMISES: Promises[LedgerBench] = Promises()

EVERY_S = 60.0
PER_S = 300.0
LIMITED = LedgerPolicy(redelivery_s=REDELIVERY_S, rate=Rate(3, per=PER_S))
"""Three dispatches of a key in five minutes: a burst of three, then one every hundred seconds."""
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
    """Decide and mark, as a batch does that takes no claim; the refusal, if there is one.

    Where there are no transactions, a claim gets the same answer.
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
async def what_is_set_is_seen_by_everybody(bench: LedgerBench) -> None:
    """Pauses stand with who made them, when and why, until they are ended by the name they were made with."""
    control_store, other = bench.ledger.control_store, bench.another.control_store
    same("the controls of a new pipeline", await other.controls(), Controls())
    one = Pause("a*", is_pattern=True, at=12.5, by="ann", why='it\'s "hot"\n🦉')
    key, renewed = Pause("a*", at=13.0, by="bob"), Pause("a*", at=14.0, by="eve")
    for pause in (one, key, renewed):
        await control_store.pause(pause)
    same("what is paused", sorted(p.at for p in (await other.controls()).pauses), [12.5, 14.0])
    same("the pattern", [p for p in (await other.controls()).pauses if p.is_pattern], [one])
    same("ending what was never paused", await other.resume("b", False), False)
    same("ending the pattern", await other.resume("a*", True), True)
    same("what is left", (await control_store.controls()).pauses, (renewed,))
    same("ending it twice", (await control_store.resume("a*", False), await other.resume("a*", False)), (True, False))
    same("the controls after all", await control_store.controls(), Controls())


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_paused_key_is_refused(bench: LedgerBench) -> None:
    """No claim on a paused key is granted and no transaction may write it; stale changes of it are still stale."""
    await bench.committed(5)
    for pause in (Pause("a"), Pause("[ab]", is_pattern=True), Pause(EVERYTHING, is_pattern=True)):
        await bench.another.control_store.pause(pause)
        refused(await bench.ask(6), RefusalReason.PAUSED)
        refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))
        refused(await bench.ask(4), RefusalReason.STALE, mark=order_of(5))
        answer = await in_transaction(bench, ChangeHeader("a", order_of(6)))
        same("the answer in a transaction", answer and answer.reason, RefusalReason.PAUSED)
        await bench.another.control_store.resume(pause.keys, pause.is_pattern)
        await bench.ledger.release([await bench.take(6)])


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_pause_covers_its_keys_only(bench: LedgerBench) -> None:
    """A key is paused by its name or by a pattern, and a name is no pattern."""
    await bench.ledger.control_store.pause(Pause("page-?", is_pattern=True))
    await bench.ledger.control_store.pause(Pause("shop*"))
    for key in ("page-1", "page-?", "shop*"):
        refused(await bench.ask(1, key=key), RefusalReason.PAUSED)
    for key in ("page-", "page-12", "Page-1", "shop", "shops"):
        await bench.take(1, key=key)


@CONTROL_STORE_PROMISES.add(SAFE)
async def claims_that_are_held_go_on_under_a_pause(bench: LedgerBench) -> None:
    """A pause takes nothing away: its holder renews and commits, and nobody follows."""
    claim = await bench.take(5)
    await bench.another.control_store.pause(Pause("a"))
    same("lost renewals", await bench.ledger.renew([claim], LEASE_S), [])
    same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
    refused(await bench.ask(6, "w2"), RefusalReason.PAUSED)


@CONTROL_STORE_PROMISES.add(SAFE)
async def an_operator_works_on_what_is_paused(bench: LedgerBench) -> None:
    """Who asks despite the pause is granted the key, unless somebody holds it."""
    held = await bench.take(5)
    await bench.ledger.control_store.pause(Pause("a"))
    refused(await asked_despite_pause(bench, ChangeHeader("a", None)), RefusalReason.BUSY)
    await bench.ledger.release([held])
    granted(await asked_despite_pause(bench, ChangeHeader("a", None)))


@CONTROL_STORE_PROMISES.add(PLAIN)
async def a_reset_makes_any_version_newer(bench: LedgerBench) -> None:
    """After a reset the next change of any version is granted and marks in the new era; the mark itself stays."""
    for era, version in enumerate(VERSIONS[::-1], start=1):
        await bench.committed(version)
        mark = (await bench.entry()).mark
        same("the era that is told", await reset(bench), era)
        same("the mark", (await bench.entry()).mark, mark)
        same("the key is free", (await bench.entry()).token, 0)
    await bench.take(VERSIONS[0], "w2")
    same("another key's era", (await bench.take(1, key="b")).order, order_of(1))


@CONTROL_STORE_PROMISES.add(SAFE)
async def versions_are_compared_within_an_era(bench: LedgerBench) -> None:
    """In the era after a reset the newest wins again, and refusals name the mark as upstream knows it."""
    await bench.committed(100)
    await reset(bench)
    same("the refusal of a low version", await in_transaction(bench, ChangeHeader("a", order_of(3))), None)
    same("the mark", (await bench.entry()).mark, (1, 3, 0))
    refused(await bench.ask(2, "w2"), RefusalReason.STALE, mark=order_of(3))
    refused(await bench.ask(3, "w2"), RefusalReason.DUPLICATE, mark=order_of(3))
    await bench.committed(4)
    same("the mark", (await bench.entry()).mark, (1, 4, 0))


@GOVERNED_TRANSACTION_PROMISES.add(SAFE)
async def each_decision_of_a_transaction_stands_for_itself(bench: LedgerBench) -> None:
    """What was decided first in a transaction leaves nothing behind that a later decision in it is mixed up with."""
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
    """A claim that is lost raises no era."""
    claim = granted(await asked_despite_pause(bench, ChangeHeader("a", None)))
    bench.expire()
    await bench.take(1, "w2", isolated=True)
    same("the era", await bench.ledger.control_store.reset(claim), None)
    same("the era of the key", (await bench.entry()).era, 0)


@CONTROL_STORE_PROMISES.add(SAFE)
async def the_era_of_all_keys_is_raised_while_nobody_works(bench: LedgerBench) -> None:
    """The era is not raised while a claim is held; then it is above that of every key, known or not."""
    control_store = bench.another.control_store
    for _ in range(3):
        await reset(bench, "reset")
    claim = await bench.take(5)
    same("the era while a claim is held", await control_store.raise_era(), None)
    same("the controls", (await bench.ledger.control_store.controls()).era, 0)
    await bench.ledger.commit([Commit(claim)])
    same("the era above that of a key", await control_store.raise_era(), 4)
    for key in ("a", "reset", "new"):
        same(f"the order of a low version of {key}", (await bench.take(1, key=key)).order, (4, 1, 0))
    bench.expire()
    same("the era above the one that is set", await control_store.raise_era(), 5)
    same("the controls", (await bench.ledger.control_store.controls()).era, 5)


@CONTROL_STORE_PROMISES.add(LIMITED)
async def a_rate_holds_for_all_workers_together(bench: LedgerBench) -> None:
    """So many dispatches of a key in any stretch, whoever asks; other keys have their own."""
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
async def a_dispatch_is_charged_whatever_becomes_of_it(bench: LedgerBench) -> None:
    """The rate is charged when a claim is granted: failures count, refusals do not."""
    for _ in range(3):
        claim = await bench.take(1)
        refused(await bench.ask(1, "w2"), RefusalReason.BUSY)
        await bench.ledger.fail([Failure(claim, Certainty.CLEAN, 0.001)])
        bench.advance(1.0)
    refused(await bench.ask(1), RefusalReason.LIMITED, wait_s=PER_S / 3 - 3.0)


@GOVERNED_TRANSACTION_PROMISES.add(LIMITED)
async def a_transaction_is_charged_at_its_mark(bench: LedgerBench) -> None:
    """In a transaction what is marked counts, and what is only decided does not."""
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
    """Keys that have a mark or are worked on are told in an order of the ledger's own, each once."""
    for key in KEYS:
        await bench.committed(1, key=key)
    await bench.take(2, key="a")
    await bench.take(1, key="only tried")
    wanted, listed, after = sorted([*KEYS, "only tried"]), [], ""
    while page := await bench.another.control_store.keys(after, 5):
        same("the length of a page", len(page) <= 5, True)
        listed += page
        after = page[-1]
    same("all keys", sorted(listed), wanted)


@CONTROL_STORE_PROMISES.add(SAFE)
async def a_chore_has_one_turn_in_an_interval(bench: LedgerBench) -> None:
    """Of all workers one holds the lock for a task, and nobody has it again before the interval is over."""
    for _ in range(3):
        turns = await asyncio.gather(
            *(one.control_store.acquire("sweep", EVERY_S) for one in (bench.ledger, bench.another) * 3)
        )
        same("how many have the turn", sum(turns), 1)
        bench.advance(EVERY_S / 2)
        same("half an interval later", await bench.another.control_store.acquire("sweep", EVERY_S), False)
        bench.advance(EVERY_S)
    same("another task", await bench.ledger.control_store.acquire("dust", EVERY_S), True)


LINES = [
    HistoryRecord(10.5, "stale", "a", VERSIONS[0], "", "w1"),
    HistoryRecord(10.5, "failed", "b", VERSIONS[-1], 'it\'s "bad"\n\x1b[31m🦉', "w2"),
    HistoryRecord(11.0, "paused", "", None, "every key", "ann"),
    HistoryRecord(12.0, "applied", "a", None, "", "w1"),
    HistoryRecord(9.0, "duplicate", "a", 0, "", "w2"),
]


@HISTORY_PROMISES.add(SAFE)
async def lines_are_listed_newest_first(bench: LedgerBench) -> None:
    """The history tells what was recorded last first, of all keys, of one, or of none."""
    same("a new history", await bench.another.history_store.history(None, 10), [])
    await bench.ledger.history_store.record(LINES[:3])
    await bench.another.history_store.record(LINES[3:])
    await bench.ledger.history_store.record([])
    newest = LINES[::-1]
    same("all lines", await bench.another.history_store.history(None, 10), newest)
    same("the newest two", await bench.ledger.history_store.history(None, 2), newest[:2])
    for key in ("a", "b", "", "nobody"):
        of_key = [line for line in newest if line.key == key]
        same(f"the lines of {key!r}", await bench.ledger.history_store.history(key, 10), of_key)
    same("the newest of a key", await bench.another.history_store.history("a", 1), newest[:1])


@HISTORY_PROMISES.add(SAFE)
async def any_key_has_a_history(bench: LedgerBench) -> None:
    """Whatever can be a key can be looked for."""
    await bench.ledger.history_store.record([HistoryRecord(1.0, "stale", key, 1) for key in KEYS])
    for key in KEYS:
        same(
            f"the lines of {key!r}",
            await bench.another.history_store.history(key, 10),
            [HistoryRecord(1.0, "stale", key, 1)],
        )


@HISTORY_PROMISES.add(SAFE)
async def old_lines_are_forgotten(bench: LedgerBench) -> None:
    """Trimming forgets lines that are too old, by the store's clock."""
    history_store, now = bench.ledger.history_store, await bench.ledger.now()
    await history_store.record([HistoryRecord(now - age_s, "stale", "a", age_s) for age_s in (300, 200, 100)])
    same("how many are older than a day", await history_store.trim(86400.0, 10), 0)
    same("how many are older than 150 s", await history_store.trim(150.0, 10), 2)
    same("what is left", [line.version for line in await history_store.history(None, 10)], [100])
    bench.advance(100.0)
    same("how many are older later", await bench.another.history_store.trim(150.0, 10), 1)


@HISTORY_PROMISES.add(SAFE)
async def the_oldest_lines_above_a_count_are_forgotten(bench: LedgerBench) -> None:
    """Trimming keeps at most so many lines, the newest ones."""
    history_store, now = bench.ledger.history_store, await bench.ledger.now()
    await history_store.record([HistoryRecord(now, "stale", "ab"[number % 2], number) for number in range(10)])
    for most, wanted in ((11, 0), (10, 0), (4, 6), (4, 0)):
        same(f"how many are above {most}", await history_store.trim(86400.0, most), wanted)
    same("what is left", [line.version for line in await history_store.history(None, 20)], [9, 8, 7, 6])
