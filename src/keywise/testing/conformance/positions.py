"""What every ledger promises about work in parts: positions, and the extent of a key."""

from msgspec.structs import replace

from keywise.core.change import VERSION_MAX, ChangeHeader, above, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import (
    NOTE_MAX_BYTES,
    Advance,
    Certainty,
    Claim,
    Commit,
    Entry,
    Level,
    Phase,
    Position,
    RefusalReason,
)
from keywise.core.ledger import Failure
from keywise.testing.conformance.claims import (
    CLOCK_S,
    LEASE_S,
    PLAIN,
    REDELIVERY_S,
    RETENTION_S,
    SAFE,
    LedgerBench,
    granted,
    refused,
)
from keywise.testing.conformance.promise import Promises, near, same

POSITION_PROMISES: Promises[LedgerBench] = Promises()
POSITION_TRANSACTION_PROMISES: Promises[LedgerBench] = Promises()

AT_3 = Position(3, b'\x00\xff "etag"')
RESTARTED = above(order_of(5))
"""The order of version 5 after one restart."""
NOTES = [b"", b"\x00", bytes(range(256)), b"\xff" * NOTE_MAX_BYTES]
LETTER = DeadLetter("it is bad", b"", "a", 5)


async def advanced(bench: LedgerBench, version: int = 5, position: Position = AT_3, *, key: str = "a") -> Claim:
    """Take a claim and come to a position with it; return the claim as its holder goes on with it."""
    one = Advance(await bench.take(version, key=key, level=Level.ALONE), position)
    same("refused advances", await bench.ledger.advance([one]), [])
    return one.claim_after


async def restarted(bench: LedgerBench, *, key: str = "a", extent: int = 0) -> Claim:
    """Take a claim of version 5, come to a position, and start again; return the claim as its holder goes on."""
    one = Advance(await advanced(bench, key=key), Position(0, b"again"), extent, above(order_of(5)))
    same("refused advances", await bench.ledger.advance([one]), [])
    return one.claim_after


async def advances(bench: LedgerBench, claim: Claim, place: int, *, another: bool = False) -> bool:
    """Try to come to a place; return whether the ledger accepted it."""
    refusals = await (bench.another if another else bench.ledger).advance([Advance(claim, Position(place))])
    same("the refused claims", refusals, [claim] if refusals else [])
    return not refusals


@POSITION_PROMISES.add(PLAIN)
async def any_position_is_kept_exactly(bench: LedgerBench) -> None:
    """A place uses 63 bits, and a note is any bytes of up to 8 KiB."""
    for number, note in enumerate(NOTES):
        position = Position(VERSION_MAX - number, note)
        await bench.ledger.release([await advanced(bench, 5, position, key=f"k{number}")])
        same("the position of the entry", (await bench.entry(f"k{number}")).position, position)
        same("the position of the claim", (await bench.take(5, "w2", key=f"k{number}")).position, position)


@POSITION_PROMISES.add(PLAIN)
async def a_takeover_resumes_at_the_position(bench: LedgerBench) -> None:
    """A claim over an expired lease has the position of the last holder, under a fresh token."""
    claim = await advanced(bench)
    bench.expire()
    again = await bench.take(5, "w2", level=Level.ALONE)
    same("the position", again.position, AT_3)
    same("whether the token is fresh", again.token != claim.token, True)
    same("whether the new holder advances", await advances(bench, again, 4, another=True), True)


@POSITION_PROMISES.add(PLAIN)
async def only_the_holder_advances(bench: LedgerBench) -> None:
    """A claim that was taken over, released or abandoned advances nothing, and neither does a key without a claim."""
    old = await advanced(bench)
    bench.expire()
    holder = await bench.take(5, "w2", level=Level.ALONE)
    before = await bench.entry()
    same("whether an old token advances", await advances(bench, old, 9), False)
    same("the entry", await bench.entry(), before)
    await bench.ledger.release([holder])
    same("whether a released claim advances", await advances(bench, holder, 9), False)
    same("whether an unknown key advances", await advances(bench, replace(old, key="never seen"), 1), False)
    same("the entry of an unknown key", await bench.ledger.inspect("never seen"), None)
    unsure = await bench.take(5, level=Level.ALONE)
    await bench.ledger.fail([Failure(unsure, Certainty.UNKNOWN, 1.0)])
    same("whether an abandoned claim advances", await advances(bench, unsure, 9), False)
    same("the position", (await bench.entry()).position, AT_3)


@POSITION_PROMISES.add(PLAIN)
async def a_place_never_falls(bench: LedgerBench) -> None:
    """An advance to a lower place is refused; one to the same place may be repeated after a lost answer."""
    claim = await advanced(bench)
    same("whether a lower place is accepted", await advances(bench, claim, 2), False)
    same("the position", (await bench.entry()).position, AT_3)
    for _ in range(3):
        same("refused advances", await bench.ledger.advance([Advance(claim, AT_3)]), [])
    same("the position", (await bench.entry()).position, AT_3)


@POSITION_PROMISES.add(PLAIN)
async def each_claim_of_a_call_advances_by_itself(bench: LedgerBench) -> None:
    """A refused claim does not affect the others of the same call, and a call may name a key twice."""
    held, lost = await bench.take(5, key="held"), await bench.take(5, key="lost")
    await bench.ledger.release([lost])
    calls = [Advance(lost, Position(1)), Advance(held, Position(1)), Advance(held, Position(2))]
    same("the refused claims", await bench.ledger.advance(calls), [lost])
    same("the position", (await bench.entry("held")).position, Position(2))
    same("the refused claims of an empty call", await bench.ledger.advance([]), [])


@POSITION_PROMISES.add(PLAIN)
async def a_newer_order_starts_at_the_beginning(bench: LedgerBench) -> None:
    """A claim of a newer change, or of a higher generation, has no position, and drops the kept one."""
    for number, order in enumerate((order_of(6), (0, 5, 1))):
        key = f"k{number}"
        claim = await advanced(bench, key=key)
        await bench.ledger.dead_letter([DeadLetterRequest(replace(LETTER, key=key), claim)])
        other = granted(await bench.ask_for(ChangeHeader(key, order), "w2"))
        same(f"the position of {order}", other.position, None)
        await bench.another.release([other])
        again = await bench.take(5, key=key)
        same("order and position of the first message", (again.order, again.position), (order, None))


@POSITION_PROMISES.add(PLAIN)
async def an_older_change_continues_a_newer_one_that_was_begun(bench: LedgerBench) -> None:
    """The content is read under the claim, so an older change does the work of the newer one, from its position on."""
    for ending in ("released", "dead"):
        claim = await advanced(bench, key=ending)
        if ending == "released":
            await bench.ledger.release([claim])
        else:
            await bench.ledger.dead_letter([DeadLetterRequest(replace(LETTER, key=ending), claim)])
        older = await bench.take(4, "w2", key=ending)
        same(f"order and position after it was {ending}", (older.order, older.position), (order_of(5), AT_3))
        same("refused commits", await bench.another.commit([Commit(older)]), [])
        refused(await bench.ask(4, key=ending), RefusalReason.STALE, mark=order_of(5))


@POSITION_PROMISES.add(PLAIN)
async def a_stale_change_does_not_continue_a_newer_one(bench: LedgerBench) -> None:
    """A change at or below the mark is acked, though work on a newer one was begun."""
    await bench.committed(4)
    await bench.ledger.release([await advanced(bench)])
    refused(await bench.ask(4, "w2"), RefusalReason.DUPLICATE, mark=order_of(4))
    refused(await bench.ask(3, "w2"), RefusalReason.STALE, mark=order_of(4))
    same("the position", (await bench.take(5, "w2")).position, AT_3)


@POSITION_PROMISES.add(PLAIN)
async def a_release_and_a_failure_keep_the_position(bench: LedgerBench) -> None:
    """A release and a failed attempt, at every certainty, leave the position to the next claim of the same change."""
    await bench.ledger.release([await advanced(bench, key="released")])
    for certainty in Certainty:
        await bench.ledger.fail([Failure(await advanced(bench, key=certainty.value), certainty, 1.0)])
    bench.expire()
    for key in ("released", *(certainty.value for certainty in Certainty)):
        same(f"the position after {key!r}", (await bench.take(5, "w2", key=key)).position, AT_3)


@POSITION_PROMISES.add(PLAIN)
async def a_dead_letter_keeps_the_position(bench: LedgerBench) -> None:
    """If the same change comes back after it became a dead letter, it resumes."""
    for certainty in Certainty:
        key = certainty.value
        request = DeadLetterRequest(replace(LETTER, key=key), await advanced(bench, key=key), certainty)
        same("lost claims", await bench.ledger.dead_letter([request]), [])
        same("the position", (await bench.take(5, "w2", key=key)).position, AT_3)


@POSITION_PROMISES.add(PLAIN)
async def a_commit_drops_the_position(bench: LedgerBench) -> None:
    """A commit leaves nothing of the position in the entry, and the next change starts at the beginning."""
    claim = await advanced(bench)
    for _ in range(2):
        same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
        entry = await bench.entry()
        same("the entry after a commit", replace(entry, updated_at=0.0), Entry(order_of(5)))
    same("the position of a newer change", (await bench.take(6, "w2")).position, None)


@POSITION_PROMISES.add(PLAIN)
async def a_reset_and_a_repair_drop_the_position(bench: LedgerBench) -> None:
    """A reset, a repair that has written, and a write without the ledger drop the position; a mere claim does not."""
    for key in ("reset", "repaired", "written"):
        await bench.ledger.release([await advanced(bench, key=key)])
        same("the position of an exclusion", (exclusion := await _excluded(bench, key)).position, None)
        await bench.ledger.finish_repair(exclusion, None)
        same("the position after a repair without a write", (await bench.entry(key)).position, AT_3)
    await bench.ledger.control_store.reset(await _excluded(bench, "reset"))
    await bench.ledger.finish_repair(await _excluded(bench, "repaired"), ChangeHeader("repaired", order_of(4)))
    await bench.ledger.mark_suspect([ChangeHeader("written", order_of(4))])
    for key in ("reset", "repaired", "written"):
        same(f"the position of the {key} key", (await bench.entry(key)).position, None)


async def _excluded(bench: LedgerBench, key: str) -> Claim:
    return granted(await bench.ask_for(ChangeHeader(key, None), level=Level.ALONE))


@POSITION_PROMISES.add(PLAIN)
async def progress_forgives_attempts_and_crashes(bench: LedgerBench) -> None:
    """A higher place sets failed attempts, crashes and the level of the key back to zero, and touches the entry."""
    await bench.ledger.fail([Failure(await bench.take(5), Certainty.CLEAN, 0.001)])
    bench.advance(1.0)
    for number in range(5):
        claim = await bench.take(5, f"w{number + 3}", level=Level.ALONE)
        await bench.ledger.renew([claim], LEASE_S, Phase.BEGUN)
        bench.expire()
    claim = await bench.take(5, level=Level.ALONE)
    same("attempts, crashes and level", (claim.attempts, claim.crashes > 0, claim.level), (1, True, Level.ALONE))
    bench.advance(LEASE_S / 2)
    same("whether it advances", await advances(bench, claim, 1), True)
    entry, now = await bench.entry(), await bench.ledger.now()
    same("attempts, crashes and level", (entry.attempts, entry.crashes, entry.deaths), (0, 0, Level.USUAL))
    near("the time of the entry", entry.updated_at, now, within=CLOCK_S)
    bench.expire()
    again = await bench.take(5, "w2", level=Level.ALONE)
    same("what the next holder is blamed for", (again.attempts, again.crashes, again.level), (0, 0, Level.PROBATION))


@POSITION_PROMISES.add(PLAIN)
async def a_place_that_was_kept_before_is_no_progress(bench: LedgerBench) -> None:
    """A repeated place and a first place of zero forgive nothing: a change that kills its workers is still found."""
    for place in (0, 3):
        claim = await advanced(bench, place + 1, Position(place), key=f"k{place}")
        for number in range(6):
            await bench.ledger.renew([claim], LEASE_S, Phase.BEGUN)
            bench.expire()
            claim = await bench.take(place + 1, f"w{number + 3}", key=f"k{place}", level=Level.ALONE)
            same("whether it advances", await advances(bench, claim, place), True)
        same("crashes and level", (claim.crashes, claim.level), (3, Level.ALONE))


@POSITION_PROMISES.add(SAFE)
async def a_position_is_pruned_with_its_key(bench: LedgerBench) -> None:
    """The position of a change that is not claimed lasts as long as an idle key, and no longer."""
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await advanced(bench))])
    bench.advance(RETENTION_S + REDELIVERY_S - 10.0)
    same("pruned keys", await bench.ledger.prune(RETENTION_S), 0)
    bench.advance(20.0)
    same("pruned keys", await bench.ledger.prune(RETENTION_S), 1)
    same("the entry", await bench.ledger.inspect("a"), None)
    same("the position", (await bench.take(5)).position, None)


@POSITION_PROMISES.add(SAFE)
async def an_extent_falls_only_at_a_commit_that_says_so(bench: LedgerBench) -> None:
    """The highest reserved ordinal survives other orders, dead letters, resets and commits, until a commit sets it."""
    claim = await bench.take(5)
    for extent in (1000, 700):
        same("refused advances", await bench.ledger.advance([Advance(claim, AT_3, extent)]), [])
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, claim)])
    newer = await bench.take(6, "w2")
    same("the extent of a newer claim", newer.extent, 1000)
    same("refused commits", await bench.another.commit([Commit(newer)]), [])
    same("the extent after a commit without one", (await bench.take(7)).extent, 1000)
    await bench.ledger.release([replace(newer, token=(await bench.entry()).token)])
    await bench.ledger.control_store.reset(await _excluded(bench, "a"))
    last = await bench.take(8)
    same("the extent after a reset", last.extent, 1000)
    same("refused commits", await bench.ledger.commit([Commit(last, extent=300)]), [])
    same("the extent after a commit that sets it", (await bench.take(9, "w2")).extent, 300)


@POSITION_PROMISES.add(SAFE)
async def the_first_commit_can_set_an_extent(bench: LedgerBench) -> None:
    """The extent of a commit is kept even if nothing was reserved, and a commit with the extent zero leaves none."""
    for version in (5, 6):
        claims = [await bench.take(version, key=key) for key in ("a", "b")]
        commits = [Commit(claims[0], extent=version), Commit(claims[1])]
        same("refused commits", await bench.ledger.commit(commits), [])
        same("the extents", [(await bench.entry(key)).extent for key in ("a", "b")], [version, 0])
        same("the marks", [(await bench.entry(key)).mark for key in ("a", "b")], [order_of(version)] * 2)
    claim = await bench.take(7, "w2")
    same("the extent of the next claim", claim.extent, 6)
    same("refused commits", await bench.another.commit([Commit(claim, extent=0)]), [])
    same("the entry", replace(await bench.entry(), updated_at=0.0), Entry(order_of(7)))


@POSITION_PROMISES.add(SAFE)
async def a_key_with_an_extent_is_not_pruned(bench: LedgerBench) -> None:
    """Its records are in the sink, and some day a commit has to delete them; without an extent, the key is pruned."""
    same("refused commits", await bench.ledger.commit([Commit(await bench.take(5), extent=10)]), [])
    bench.advance(RETENTION_S + REDELIVERY_S + 10.0)
    same("pruned keys", await bench.ledger.prune(RETENTION_S), 0)
    gone = await bench.take(6, deleted=True)
    same("the extent", gone.extent, 10)
    same("refused commits", await bench.ledger.commit([Commit(gone, extent=0)]), [])
    bench.advance(RETENTION_S + REDELIVERY_S + 10.0)
    same("pruned keys", await bench.ledger.prune(RETENTION_S), 1)


@POSITION_PROMISES.add(SAFE)
async def a_lost_commit_leaves_the_extent(bench: LedgerBench) -> None:
    """A commit that is refused, or was repeated after a newer claim reserved more, does not change the extent."""
    old = await bench.take(5)
    same("refused commits", await bench.ledger.commit([Commit(old, extent=10)]), [])
    newer = await bench.take(6, "w2")
    same("refused advances", await bench.another.advance([Advance(newer, AT_3, 500)]), [])
    same("refused commits", await bench.ledger.commit([Commit(old, extent=10)]), [])
    bench.expire()
    last = await bench.take(6, level=Level.ALONE)
    same("refused commits", await bench.another.commit([Commit(newer, extent=20)]), [newer])
    same("the extent", (await bench.entry()).extent, 500)
    same("the holder", (await bench.entry()).token, last.token)


@POSITION_PROMISES.add(PLAIN)
async def a_restart_begins_again_at_a_higher_order(bench: LedgerBench) -> None:
    """A restart sets the position back under the same token, and everything goes on at the order that it names."""
    claim = await restarted(bench)
    entry = await bench.entry()
    same("position and order", (entry.position, entry.advanced), (Position(0, b"again"), RESTARTED))
    same("what is tried and intended", (entry.tried, entry.intent), (RESTARTED, RESTARTED))
    same("token and order of the claim", (entry.token, claim.order), (claim.token, RESTARTED))
    same("whether it advances", await advances(bench, claim, 1), True)
    same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
    same("the mark", (await bench.entry()).mark, RESTARTED)


@POSITION_PROMISES.add(PLAIN)
async def a_restart_can_be_repeated(bench: LedgerBench) -> None:
    """A restart that is repeated after a lost answer changes nothing, and does not undo the places after it."""
    one = Advance(await advanced(bench), Position(0), restart=RESTARTED)
    for _ in range(3):
        same("refused advances", await bench.ledger.advance([one]), [])
    same("the position", (await bench.entry()).position, Position(0))
    same("whether it advances", await advances(bench, one.claim_after, 2), True)
    same("the refused restarts", await bench.another.advance([one]), [one.claim])
    same("the position", (await bench.entry()).position, Position(2))


@POSITION_PROMISES.add(PLAIN)
async def a_late_advance_from_before_a_restart_is_refused(bench: LedgerBench) -> None:
    """An advance at the old order arrives late: it is refused, at any place, and so is one by an old token."""
    before = await advanced(bench)
    same("refused restarts", await bench.ledger.advance([Advance(before, Position(0), restart=RESTARTED)]), [])
    for place in (0, 3, 9):
        same(f"whether {place} is accepted", await advances(bench, before, place, another=True), False)
    bench.expire()
    holder = await bench.take(5, "w2", level=Level.ALONE)
    late = Advance(before, Position(0), restart=above(RESTARTED))
    same("the refused restarts of an old token", await bench.ledger.advance([late]), [before])
    entry = await bench.entry()
    same(
        "order, place and token", (entry.advanced, entry.position, entry.token), (RESTARTED, Position(0), holder.token)
    )


@POSITION_PROMISES.add(PLAIN)
async def a_restart_forgives_nothing(bench: LedgerBench) -> None:
    """A change that is started again keeps its failed attempts and crashes, until it comes to a place above zero."""
    await bench.ledger.fail([Failure(await bench.take(5), Certainty.CLEAN, 0.001)])
    bench.advance(1.0)
    claim = await bench.take(5)
    one = Advance(claim, Position(0), restart=RESTARTED)
    same("refused advances", await bench.ledger.advance([one]), [])
    same("attempts", ((await bench.entry()).attempts, one.claim_after.attempts), (1, 1))
    await bench.ledger.release([one.claim_after])
    again = await bench.take(5, "w2")
    same("the attempts of the next claim", (again.order, again.attempts), (RESTARTED, 1))
    same("whether it advances", await advances(bench, again, 1, another=True), True)
    same("attempts", (await bench.entry()).attempts, 0)


@POSITION_PROMISES.add(PLAIN)
async def the_same_version_continues_a_restart(bench: LedgerBench) -> None:
    """The message brings the old order: its claim continues at that of the restart, however the last claim ended."""
    for key in ("released", "failed", "expired", "dead"):
        claim = await restarted(bench, key=key)
        one = Advance(claim, Position(7, b"on"))
        same("refused advances", await bench.ledger.advance([one]), [])
        if key == "released":
            await bench.ledger.release([claim])
        elif key == "failed":
            await bench.ledger.fail([Failure(claim, Certainty.ENDED, 0.0)])
        elif key == "expired":
            bench.expire()
        else:
            await bench.ledger.dead_letter([DeadLetterRequest(replace(LETTER, key=key), claim)])
        again = await bench.take(5, "w2", key=key, level=Level.ALONE)
        same(f"order and position of the {key} one", (again.order, again.position), (RESTARTED, Position(7, b"on")))
        same("refused commits", await bench.another.commit([Commit(again)]), [])


@POSITION_PROMISES.add(SAFE)
async def a_committed_restart_makes_its_message_stale(bench: LedgerBench) -> None:
    """After the commit at the higher order, the old order of the same version is stale, and a newer one is not."""
    same("refused commits", await bench.ledger.commit([Commit(await restarted(bench), extent=4)]), [])
    refused(await bench.ask(5, "w2"), RefusalReason.STALE, mark=RESTARTED)
    newer = await bench.take(6, "w2")
    same(
        "order, position and extent of a newer version",
        (newer.order, newer.position, newer.extent),
        (order_of(6), None, 4),
    )


@POSITION_PROMISES.add(SAFE)
async def a_newer_version_does_not_continue_a_restart(bench: LedgerBench) -> None:
    """A newer version starts at the beginning, and the old one continues it, and not the restart."""
    await bench.ledger.release([await restarted(bench, extent=9)])
    newer = await bench.take(6, "w2")
    same("order, position and extent", (newer.order, newer.position, newer.extent), (order_of(6), None, 9))
    await bench.another.dead_letter([DeadLetterRequest(replace(LETTER, version=6), newer)])
    old = await bench.take(5)
    same("order and position of the old version", (old.order, old.position), (order_of(6), None))


@POSITION_PROMISES.add(SAFE)
async def the_note_of_a_commit_lasts_until_the_next_one(bench: LedgerBench) -> None:
    """Claims, positions, failures, releases and dead letters keep the note of a commit; the next commit replaces it."""
    for number, note in enumerate(NOTES):
        key = f"k{number}"
        same("refused commits", await bench.ledger.commit([Commit(await bench.take(4, key=key), note=note)]), [])
        same("the note", (await bench.another.inspect(key)).note, note)
        await bench.ledger.release([await advanced(bench, key=key)])
        await bench.ledger.fail([Failure(await bench.take(5, key=key), Certainty.CLEAN)])
        letter = DeadLetterRequest(replace(LETTER, key=key), await bench.take(5, "w2", key=key))
        await bench.another.dead_letter([letter])
        same("the note after all that", (await bench.entry(key)).note, note)
        same("refused commits", await bench.ledger.commit([Commit(await bench.take(5, key=key), note=b"next")]), [])
        same("the next note", (await bench.entry(key)).note, b"next")
        await bench.committed(6, key=key)
        same("the entry without a note", replace(await bench.entry(key), updated_at=0.0), Entry(order_of(6)))


@POSITION_PROMISES.add(SAFE)
async def a_commit_that_is_refused_leaves_the_note(bench: LedgerBench) -> None:
    """Neither an old token nor a repeated commit replaces a note."""
    first = await bench.take(4)
    same("refused commits", await bench.ledger.commit([Commit(first, note=b"first")]), [])
    same("refused commits", await bench.ledger.commit([Commit(first, note=b"again")]), [])
    old = await bench.take(5)
    bench.expire()
    await bench.take(5, "w2", level=Level.ALONE)
    same("the refused commits", await bench.ledger.commit([Commit(old, note=b"late")]), [old])
    same("the note", (await bench.entry()).note, b"first")


@POSITION_PROMISES.add(PLAIN)
async def a_commit_that_repairs_ends_the_suspicion(bench: LedgerBench) -> None:
    """The suspicion ends if it has not grown since the claim; a commit that repairs nothing never ends it."""
    for key, repairs, grows, wanted in (("a", True, False, 0), ("b", True, True, 2), ("c", False, False, 1)):
        await bench.ledger.mark_suspect([ChangeHeader(key, order_of(3))])
        claim = await bench.take(5, key=key)
        same("the suspicions of the claim", claim.suspicions, 1)
        if grows:
            await bench.ledger.commit([Commit(replace(claim, token=1), overdue=True)])
        same("refused commits", await bench.ledger.commit([Commit(claim, repairs=repairs)]), [])
        entry = await bench.entry(key)
        same(f"the suspicions of {key!r}", entry.suspicions, wanted)
        same("the mark", entry.mark, order_of(5))
    same("the suspects", sorted(await bench.another.suspects(10, 0.0)), ["b", "c"])


class _PartRolledBack(Exception):
    """Leaves a transaction on purpose."""


@POSITION_TRANSACTION_PROMISES.add(SAFE)
async def a_position_commits_with_its_transaction(bench: LedgerBench) -> None:
    """An advance inside a transaction is there when the transaction commits, and gone when it rolls back."""
    claim = await advanced(bench)
    try:
        async with bench.ledger.transaction() as transaction:
            same("refused advances", await transaction.advance([Advance(claim, Position(4))]), [])
            raise _PartRolledBack
    except _PartRolledBack:
        pass
    same("the position after a rollback", (await bench.entry()).position, AT_3)
    async with bench.ledger.transaction() as transaction:
        same("refused advances", await transaction.advance([Advance(claim, Position(4, b"x"), 7)]), [])
    entry = await bench.another.inspect("a")
    same("position and extent", (entry.position, entry.extent), (Position(4, b"x"), 7))
    async with bench.ledger.transaction() as transaction:
        same("refused commits", await transaction.commit([Commit(claim)]), [])
    same("the entry", replace(await bench.entry(), updated_at=0.0), Entry(order_of(5), extent=7))


@POSITION_TRANSACTION_PROMISES.add(SAFE)
async def a_part_is_not_repeated_in_a_transaction(bench: LedgerBench) -> None:
    """Inside a transaction, a place that is already kept is refused: the effect of the part exists."""
    claim = await bench.take(5)
    for place, wanted in ((0, []), (0, [claim]), (1, []), (1, [claim]), (0, [claim]), (2, [])):
        async with bench.ledger.transaction() as transaction:
            same(f"refused advances to {place}", await transaction.advance([Advance(claim, Position(place))]), wanted)
    same("the position", (await bench.entry()).position, Position(2))


@POSITION_TRANSACTION_PROMISES.add(SAFE)
async def an_old_token_advances_nothing_in_a_transaction(bench: LedgerBench) -> None:
    """A claim that was taken over is refused inside a transaction too, at any place."""
    old = await advanced(bench)
    bench.expire()
    await bench.take(5, "w2", level=Level.ALONE)
    before = await bench.entry()
    async with bench.ledger.transaction() as transaction:
        same("refused advances", await transaction.advance([Advance(old, Position(9))]), [old])
    same("the entry", await bench.entry(), before)


@POSITION_TRANSACTION_PROMISES.add(SAFE)
async def a_mark_without_a_claim_drops_the_position(bench: LedgerBench) -> None:
    """A change that is applied in a transaction without a claim leaves no position, and no failed one ends it."""
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await advanced(bench))])
    header = ChangeHeader("a", order_of(6))
    async with bench.ledger.transaction() as transaction:
        same("refusals", await transaction.decide([header]), {})
        await transaction.fail([header])
    async with bench.ledger.transaction() as transaction:
        await transaction.dead_letter([(header, LETTER)])
    same("the position", (await bench.entry()).position, AT_3)
    async with bench.ledger.transaction() as transaction:
        same("refusals", await transaction.decide([header]), {})
        await transaction.mark([header])
    same("the entry", replace(await bench.entry(), updated_at=0.0), Entry(order_of(6)))


@POSITION_TRANSACTION_PROMISES.add(SAFE)
async def a_restart_and_a_note_commit_with_their_transaction(bench: LedgerBench) -> None:
    """A restart, and the note and the extent of a commit, are gone when their transaction rolls back."""
    claim = await advanced(bench)
    restart = Advance(claim, Position(0), restart=RESTARTED)
    for commits in (False, True):
        try:
            async with bench.ledger.transaction() as transaction:
                same("refused advances", await transaction.advance([restart]), [])
                last = Commit(restart.claim_after, extent=2, note=NOTES[2])
                same("refused commits", await transaction.commit([last]), [])
                if not commits:
                    raise _PartRolledBack
        except _PartRolledBack:
            entry = await bench.entry()
            same("order and position after a rollback", (entry.advanced, entry.position), (order_of(5), AT_3))
    entry = replace(await bench.another.inspect("a"), updated_at=0.0)
    same("the entry", entry, Entry(RESTARTED, extent=2, note=NOTES[2]))
