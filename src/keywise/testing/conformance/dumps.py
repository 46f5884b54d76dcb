"""What a ledger that can be copied promises: its pages hold the whole scope, and added entries decide claims."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from keywise.core.change import ChangeHeader, above, order_of
from keywise.core.controls import EVERYTHING, Controls, Pause, ReindexRun
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import NOTE_MAX_BYTES, Advance, Certainty, Commit, Entry, Level, Position, RefusalReason
from keywise.core.ledger import Failure
from keywise.core.transfer import LedgerTransfer, TransferPage
from keywise.testing.conformance.claims import (
    CLOCK_S,
    KEYS,
    LEASE_S,
    PLAIN,
    SAFE,
    VERSIONS,
    LedgerBench,
    granted,
    refused,
)
from keywise.testing.conformance.controls import LIMITED, PER_S, RECORDS, asked_despite_pause, reset
from keywise.testing.conformance.promise import Promises, UncheckedError, near, same

TRANSFER_PROMISES: Promises[LedgerBench] = Promises()

LETTERS = [
    DeadLetter('it\'s "bad"\n🦉', b"\x00\xff{}", "a", VERSIONS[0], {"x-é": 'say "hi"\n\0'}, 12.25, "sqlite:///a.db"),
    DeadLetter("cause", b"", "", None),
    DeadLetter("cause", b"x" * 70_000, "🦉", VERSIONS[-1], None, 0.0, "", "Traceback\n  🦉 'line'\n" * 1000, "🦉"),
]
RETRY_S = 500.0
NOTE = bytes(range(256)) * (NOTE_MAX_BYTES // 256)


def transfer_of(bench: LedgerBench, *, another: bool = False) -> LedgerTransfer:
    """Return the transfer of the ledger. A ledger may have none; then it cannot be copied."""
    transfer: LedgerTransfer | None = getattr(bench.another if another else bench.ledger, "transfer", None)
    if transfer is None:
        raise UncheckedError("this ledger has no transfer, so `keywise ledger copy` refuses it")
    return transfer


async def pages_of(transfer: LedgerTransfer, limit: int = 3) -> list[TransferPage]:
    """Read all pages, and raise if one exceeds the limit."""
    pages, cursor = [], ""
    while True:
        page = await transfer.page(cursor, limit)
        same(
            "whether a page keeps the limit",
            len(page.entries) + len(page.dead_letters) + len(page.records) <= limit,
            True,
        )
        pages.append(page)
        if not page.cursor:
            return pages
        if page.cursor == cursor:
            raise AssertionError(f"the cursor {cursor!r} leads to itself")
        cursor = page.cursor


def joined(pages: Sequence[TransferPage]) -> TransferPage:
    """Join the pages into one, with the entries sorted by key and their times in whole seconds."""
    entries = sorted((key, rounded(entry)) for page in pages for key, entry in page.entries)
    return TransferPage(
        entries=entries,
        dead_letters=[letter for page in pages for letter in page.dead_letters],
        records=[record for page in pages for record in page.records],
    )


def rounded(entry: Entry) -> Entry:
    return replace(entry, updated_at=float(math.ceil(entry.updated_at)))


async def filled(bench: LedgerBench) -> None:
    """Fill a scope with some of everything that it can hold."""
    ledger = bench.ledger
    for version, key in zip(VERSIONS, KEYS, strict=False):
        await bench.committed(version, key=key, deleted=version % 2 == 0)
    await bench.committed(None, key="once")
    failed, unknown, dead = [await bench.take(2**40, key=key) for key in ("failed", "unknown", "dead")]
    await ledger.fail([Failure(failed, Certainty.ENDED, RETRY_S), Failure(unknown, Certainty.UNKNOWN, RETRY_S)])
    await bench.take(7, key="abandoned by a worker")
    late = await bench.take(8, key="taken over")
    bench.expire()
    await bench.take(8, key="taken over", owner="w2", level=Level.ALONE)
    await ledger.commit([Commit(late)])
    bench.expire()
    await reset(bench, "once")
    await ledger.dead_letter(
        [DeadLetterRequest(LETTERS[0], dead), *(DeadLetterRequest(letter) for letter in LETTERS[1:])]
    )
    await ledger.history_store.record(RECORDS)
    part = Advance(await bench.take(3, key="in parts"), Position(2**63 - 1, NOTE), 70)
    await ledger.advance([part])
    await ledger.release([part.claim])
    await ledger.commit([Commit(await bench.take(3, key="with records"), extent=2**62, note=NOTE)])
    again = Advance(await bench.take(3, key="started again"), Position(0), restart=above(order_of(3)))
    await ledger.advance([again])
    await ledger.release([again.claim_after])


@TRANSFER_PROMISES.add(PLAIN)
async def all_of_a_scope_can_be_carried_away_and_back(bench: LedgerBench) -> None:
    """A scope that is read page by page, cleared and added again holds what it held before."""
    await filled(bench)
    before = joined(await pages_of(transfer_of(bench)))
    known = [*KEYS[: len(VERSIONS)], "once", "failed", "unknown", "abandoned by a worker", "taken over"]
    known += ["in parts", "with records", "started again"]
    same("the keys", sorted(key for key, _ in before.entries), sorted(known))
    for key, entry in before.entries:
        same(f"the entry of {key!r}", entry, rounded(await bench.entry(key)))
    same("the dead letters", [letter for _, letter in before.dead_letters], LETTERS)
    same("the history", before.records, RECORDS)
    for letter in await bench.ledger.dead_letters(10):
        same("whether a page has the time of a dead letter", letter[1] in [at for at, _ in before.dead_letters], True)
    counts = await bench.ledger.counts()
    await transfer_of(bench, another=True).clear()
    same(
        "what a cleared scope holds",
        joined(await pages_of(transfer_of(bench))),
        TransferPage(entries=[], dead_letters=[], records=[]),
    )
    same("an entry of a cleared scope", await bench.ledger.inspect("once"), None)
    for limit in (2, 100):
        page = joined(await pages_of(transfer_of(bench), limit))
        same("the number of entries of a cleared scope", len(page.entries), 0)
    for number in range(0, len(before.entries), 2):
        await transfer_of(bench).add(TransferPage(entries=before.entries[number : number + 2]))
    await transfer_of(bench, another=True).add(TransferPage(dead_letters=before.dead_letters, records=before.records))
    for limit in (1, 4, 1000):
        same("what was added", joined(await pages_of(transfer_of(bench, another=True), limit)), before)
    same("the counts", await bench.another.counts(), counts)


@TRANSFER_PROMISES.add(PLAIN)
async def added_entries_decide_claims(bench: LedgerBench) -> None:
    """Marks, claims, attempts, suspicions and unknown writes that were added decide as if they were made here."""
    now = await bench.ledger.now()
    entries = {
        "marked": Entry(order_of(5), updated_at=now),
        "gone": Entry(order_of(5), True, now),
        "held": Entry(None, False, now, 1 << 30, "w9", now + LEASE_S, intent=order_of(3), tried=order_of(3)),
        "failed": Entry(order_of(1), False, now, tried=order_of(4), tried_at=now, attempts=2, not_before=now + RETRY_S),
        "unsure": Entry(None, False, now, unknown=order_of(9), unknown_until=now + RETRY_S),
        "suspect": Entry(order_of(5), False, now, suspicions=3, suspected_at=now - 1.0),
        "reset": Entry(order_of(50), False, now, era=2),
    }
    await transfer_of(bench).add(TransferPage(entries=list(entries.items())))
    for key in ("marked", "gone", "suspect"):
        refused(await bench.ask(5, key=key), RefusalReason.DUPLICATE, mark=order_of(5))
        refused(await bench.ask(4, "w2", key=key), RefusalReason.STALE, mark=order_of(5))
    refused(await bench.ask(6, key="held"), RefusalReason.BUSY, wait_s=LEASE_S)
    refused(await bench.ask(4, key="failed"), RefusalReason.BUSY, wait_s=RETRY_S)
    refused(await bench.ask(8, "w2", key="unsure"), RefusalReason.DEFERRED, wait_s=RETRY_S)
    same("the suspects", await bench.another.suspects(10, 0.0), ["suspect"])
    same("the held keys", await bench.another.control_store.held("", 10), ["held"])
    counts = await bench.ledger.counts()
    same("the counts", (counts.keys, counts.tombstones, counts.claims, counts.suspects), (5, 1, 1, 1))
    same("an order in a new era", granted(await bench.ask(1, key="reset")).order, (2, 1, 0))
    bench.advance(RETRY_S)
    same("the failed attempts before", granted(await bench.ask(4, key="failed")).attempts, 2)
    dead = granted(await bench.ask(6, key="held", level=Level.ALONE))
    same("whether the claim is a takeover", dead.took_over, True)
    near("the time of the suspicion", (await bench.entry("held")).suspected_at, now + RETRY_S, within=CLOCK_S)


@TRANSFER_PROMISES.add(LIMITED)
async def charges_of_a_rate_are_carried_too(bench: LedgerBench) -> None:
    """A key that has used up its rate is limited in the target too, even if the ledger stores nothing else about it."""
    for version in (1, 2, 3):
        await bench.committed(version, key="marked")
        await bench.ledger.release([await bench.take(version, key="charged")])
    before = joined(await pages_of(transfer_of(bench)))
    same("the keys", [key for key, _ in before.entries], ["charged", "marked"])
    await transfer_of(bench).clear()
    granted(await bench.ask(4, key="charged"))
    await transfer_of(bench).clear()
    await transfer_of(bench, another=True).add(before)
    same("what was added", joined(await pages_of(transfer_of(bench))), before)
    for key in ("charged", "marked"):
        refused(await bench.ask(4, key=key), RefusalReason.LIMITED, wait_s=PER_S / 3)


@TRANSFER_PROMISES.add(SAFE)
async def many_keys_are_listed_each_once(bench: LedgerBench) -> None:
    """Pages list each of many keys once, and no page is longer than the limit."""
    entries = [(f"k{number}", Entry(order_of(number), updated_at=float(number))) for number in range(2500)]
    await transfer_of(bench).add(TransferPage(entries=entries[:2000]))
    await transfer_of(bench, another=True).add(TransferPage(entries=entries[2000:]))
    # No pipeline accepts such a key, but the pages must list every key that the store holds.
    entries.append(("k\0", Entry(order_of(1), updated_at=1.0)))
    await transfer_of(bench).add(TransferPage(entries=entries[-1:]))
    for limit in (400, 10_000):
        same("all entries", joined(await pages_of(transfer_of(bench), limit)).entries, sorted(entries))


@TRANSFER_PROMISES.add(SAFE)
async def the_controls_are_replaced_as_a_whole(bench: LedgerBench) -> None:
    """Copied pauses, a copied era, a copied scale of versions and a reindex apply at once, on all connections."""
    await bench.ledger.control_store.pause(Pause("b"))
    pauses = (Pause(EVERYTHING, True, 1.5, "ann", "moving"), Pause("a", at=2.0))
    controls = Controls(3, pauses, scale="s3-sequencer", run=ReindexRun(2, started_at=1.5))
    await transfer_of(bench).set_controls(controls)
    same("the controls", await bench.another.control_store.controls(), controls)
    refused(await bench.ask(1, "w2", key="c"), RefusalReason.PAUSED)
    await transfer_of(bench).clear()
    same("the controls of a cleared scope", await bench.another.control_store.controls(), controls)
    same("the scale", await bench.another.control_store.fix_scale("event-time"), "s3-sequencer")
    claim = granted(await asked_despite_pause(bench, ChangeHeader("c", order_of(1))))
    same("the order in the era", claim.order, (3, 1, 0))
    await transfer_of(bench, another=True).set_controls(Controls())
    same("the controls after the second replacement", await bench.ledger.control_store.controls(), Controls())


@TRANSFER_PROMISES.add(SAFE)
async def scopes_are_listed_that_hold_something(bench: LedgerBench) -> None:
    """A scope is listed once it holds anything, even only a pause, and no longer after it was cleared."""
    transfer = transfer_of(bench)
    others = set(await transfer.scopes())
    named = set[str]()
    for page in (
        TransferPage(entries=[("a", Entry(order_of(1), updated_at=1.0))]),
        TransferPage(entries=[("a", Entry(rate_at=2.0**40))]),
        TransferPage(dead_letters=[(1.0, LETTERS[1])]),
        TransferPage(records=RECORDS[:1]),
    ):
        await transfer.add(page)
        found = set(await transfer_of(bench, another=True).scopes()) - others
        same("the number of new scopes", len(found), 1)
        named |= found
        await transfer.clear()
        same("whether a cleared scope is listed", named & set(await transfer.scopes()), set())
    await bench.ledger.control_store.pause(Pause("a"))
    same("the new scope", set(await transfer.scopes()) - others, named)


@TRANSFER_PROMISES.add(SAFE)
async def tokens_are_granted_above_a_floor(bench: LedgerBench) -> None:
    """After a floor is set, every new token is above it and above all earlier tokens."""
    first = (await bench.take(1, key="a")).token
    ceiling = await transfer_of(bench).tokens_above(0)
    same("whether the earlier token is at or below the returned number", first <= ceiling, True)
    floor = ceiling + 2**44 + 12345
    found = await transfer_of(bench, another=True).tokens_above(floor)
    same("whether the returned number is at or above the floor", found >= floor, True)
    tokens = [(await bench.take(1, owner, key=f"{owner} {n}")).token for n in range(3) for owner in ("w1", "w2")]
    same("whether all tokens are above the floor", min(tokens) > floor, True)
    same("the number of different tokens", len(set(tokens)), len(tokens))
    await transfer_of(bench).tokens_above(first)
    same("whether tokens still rise after a lower floor", (await bench.take(1, key="last")).token > max(tokens), True)
