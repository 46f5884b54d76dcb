"""What every ledger promises about the end of a claim: commit, failure, release, dead letter, repair and pruning."""

from collections.abc import Sequence

from msgspec.structs import replace

from keywise.core.change import ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Certainty, Commit, LeaseTerms, Level, RefusalReason
from keywise.core.ledger import Failure
from keywise.testing.conformance.claims import (
    CLOCK_S,
    LEASE_S,
    PLAIN,
    REDELIVERY_S,
    SAFE,
    LedgerBench,
    granted,
    letters_of,
    refused,
)
from keywise.testing.conformance.promise import Promises, near, same

ENDING_PROMISES: Promises[LedgerBench] = Promises()

LETTER = DeadLetter(
    "it is bad",
    b"\x00\xff body",
    "a",
    -(2**63),
    {"h": "é", "empty": ""},
    1234.5,
    "sqlite:///x.db?queue=q",
    'Traceback (most recent call last):\n  File "shop.py", line 3, in index\nValueError: é',
    "pages.é.#",
)


@ENDING_PROMISES.add(PLAIN)
async def only_a_commit_raises_the_mark(bench: LedgerBench) -> None:
    """Claims, renewals, failures, releases and dead letters leave the mark where it is."""
    await bench.committed(1)
    for version, certainty in enumerate(Certainty, start=2):
        claim = await bench.take(version)
        await bench.ledger.renew([claim], LEASE_S)
        await bench.ledger.fail([Failure(claim, certainty, 1.0)])
        same("the mark after a failure", (await bench.entry()).mark, order_of(1))
        bench.expire()
    claim = await bench.take(10)
    await bench.ledger.release([claim])
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await bench.take(11))])
    same("the mark after a release and a dead letter", (await bench.entry()).mark, order_of(1))


@ENDING_PROMISES.add(PLAIN)
async def a_commit_frees_the_key(bench: LedgerBench) -> None:
    """After a commit, the entry holds nothing but the mark, the deletion and the time."""
    await bench.ledger.fail([Failure(await bench.take(5), Certainty.CLEAN, 0.001)])
    bench.advance(1.0)
    await bench.committed(5)
    entry, now = await bench.entry(), await bench.ledger.now()
    same("holder, intent and attempts", (entry.token, entry.owner, entry.intent, entry.tried, entry.attempts), _IDLE)
    near("the time of the commit", entry.updated_at, now, within=CLOCK_S)
    await bench.take(6, "w2")


_IDLE = (0, "", None, None, 0)


@ENDING_PROMISES.add(PLAIN)
async def a_commit_may_be_repeated(bench: LedgerBench) -> None:
    """A commit that is repeated after a lost answer succeeds, and does not affect a later holder of the key."""
    claim = await bench.take(5)
    for _ in range(3):
        same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
    later = await bench.take(6, "w2")
    same("refused commits", await bench.ledger.commit([Commit(claim)]), [])
    same("the holder", (await bench.entry()).token, later.token)


@ENDING_PROMISES.add(PLAIN)
async def a_commit_that_is_overdue_is_refused(bench: LedgerBench) -> None:
    """If the sink answered too late, the commit is refused, even if another holder has committed the same order."""
    mine = await bench.take(5)
    bench.expire()
    theirs = await bench.take(5, "w2", level=Level.ALONE)
    same("refused commits", await bench.another.commit([Commit(theirs)]), [])
    same("refused commits", await bench.ledger.commit([Commit(mine, overdue=True)]), [mine])
    if (await bench.entry()).suspicions == 0:
        raise AssertionError("the key is not suspect, though a late write may have followed the commit")


@ENDING_PROMISES.add(PLAIN)
async def the_mark_never_falls(bench: LedgerBench) -> None:
    """A commit below the mark is refused, even from the holder of the key."""
    old = await bench.take(5)
    bench.expire()
    await bench.another.commit([Commit(await bench.take(9, "w2", level=Level.ALONE))])
    same("refused commits", await bench.ledger.commit([Commit(old)]), [old])
    same("the mark", (await bench.entry()).mark, order_of(9))
    lower = replace(await bench.take(10), order=order_of(8))
    same("refused commits of a holder", await bench.ledger.commit([Commit(lower)]), [lower])
    same("the mark", (await bench.entry()).mark, order_of(9))


@ENDING_PROMISES.add(PLAIN)
async def a_failure_that_is_reported_twice_counts_once(bench: LedgerBench) -> None:
    """A failure that is reported again after a lost answer costs one attempt, at every certainty."""
    for version, certainty in enumerate(Certainty):
        claim = await bench.take(version, key=certainty.value)
        for _ in range(3):
            await bench.ledger.fail([Failure(claim, certainty, 1.0)])
        bench.expire()
        same("the attempts", (await bench.take(version, key=certainty.value)).attempts, 1)


@ENDING_PROMISES.add(PLAIN)
async def a_failure_is_counted_and_waits(bench: LedgerBench) -> None:
    """A failure costs an attempt, and the change waits for its retry; a newer change does not wait."""
    for attempts in range(1, 4):
        await bench.ledger.fail([Failure(await bench.take(5), Certainty.CLEAN, 30.0)])
        refused(await bench.ask(5, "w2"), RefusalReason.BUSY, wait_s=30.0)
        refused(await bench.ask(4, "w2"), RefusalReason.BUSY, wait_s=30.0)
        bench.advance(31.0)
        claim = await bench.take(5)
        same("the attempts of the claim", claim.attempts, attempts)
        await bench.ledger.release([claim])
    await bench.ledger.fail([Failure(await bench.take(5), Certainty.CLEAN, 30.0)])
    newer = await bench.take(6, "w2")
    same("the attempts of a newer change", newer.attempts, 0)


@ENDING_PROMISES.add(PLAIN)
async def a_refusal_costs_no_attempt(bench: LedgerBench) -> None:
    """A refusal as busy costs no attempt, and neither does a release."""
    claim = await bench.take(5)
    for _ in range(5):
        refused(await bench.ask(5, "w2"), RefusalReason.BUSY)
    await bench.ledger.release([claim])
    claim = await bench.take(5, "w2")
    same("attempts and crashes", (claim.attempts, claim.crashes), (0, 0))


@ENDING_PROMISES.add(PLAIN)
async def an_unknown_outcome_holds_the_key_until_its_lease_ends(bench: LedgerBench) -> None:
    """After a failure of unknown certainty, the key is held until the lease ends; after that, older changes wait."""
    claim = await bench.take(5)
    await bench.ledger.fail([Failure(claim, Certainty.UNKNOWN, 1.0)])
    for version in (4, 5, 6):
        refused(await bench.ask(version, "w2"), RefusalReason.BUSY, wait_s=LEASE_S)
    same("lost renewals", await bench.ledger.renew([claim], LEASE_S), [claim])
    bench.expire()
    refused(await bench.ask(4, "w2"), RefusalReason.DEFERRED, wait_s=REDELIVERY_S - 1.0)
    again = await bench.take(5, "w2")
    same("the attempts", again.attempts, 1)


@ENDING_PROMISES.add(PLAIN)
async def a_write_that_may_be_there_keeps_older_ones_away(bench: LedgerBench) -> None:
    """A change that may have been written keeps older ones waiting until it is committed or cannot be redelivered."""
    await bench.ledger.fail([Failure(await bench.take(5), Certainty.ENDED, 1.0)])
    bench.advance(2.0)
    refused(await bench.ask(4), RefusalReason.DEFERRED, wait_s=REDELIVERY_S - 2.0)
    await bench.committed(5)
    refused(await bench.ask(4), RefusalReason.STALE)


@ENDING_PROMISES.add(PLAIN)
async def a_takeover_inherits_what_is_unknown(bench: LedgerBench) -> None:
    """Older changes wait even if the new holder fails cleanly, because the previous holder may have written."""
    await bench.take(7)
    bench.expire()
    claim = await bench.take(7, "w2", level=Level.ALONE)
    await bench.another.fail([Failure(claim, Certainty.CLEAN, 1.0)])
    bench.advance(2.0)
    refused(await bench.ask(6, "w2", level=Level.ALONE), RefusalReason.DEFERRED)


@ENDING_PROMISES.add(PLAIN)
async def no_key_waits_for_ever(bench: LedgerBench) -> None:
    """Once the unknown change can no longer be redelivered, older changes are granted and the key is suspect."""
    await bench.ledger.fail([Failure(await bench.take(7), Certainty.ENDED, 1.0)])
    bench.advance(REDELIVERY_S + 1.0)
    await bench.take(6, "w2")
    same("the suspicions", (await bench.entry()).suspicions, 1)


@ENDING_PROMISES.add(PLAIN)
async def a_dead_letter_is_stored_whole_and_frees_the_key(bench: LedgerBench) -> None:
    """A dead letter keeps every byte; older changes are granted again, and the attempts are forgotten."""
    claim = await bench.take(5)
    same(
        "lost claims",
        await bench.ledger.dead_letter(
            [DeadLetterRequest(LETTER, claim), DeadLetterRequest(DeadLetter("unread", b""))]
        ),
        [],
    )
    found = await bench.another.dead_letters(10)
    same("the dead letters, newest first", letters_of(found), [DeadLetter("unread", b""), LETTER])
    for _, stored_at, _ in found:
        near("when the dead letter was stored", stored_at, await bench.ledger.now(), within=CLOCK_S)
    same("the attempts of an older change", (await bench.take(4, "w2")).attempts, 0)


@ENDING_PROMISES.add(PLAIN)
async def a_dead_letter_needs_its_claim(bench: LedgerBench) -> None:
    """A worker that has lost the claim cannot dead-letter the change: the next holder decides."""
    old = await bench.take(5)
    bench.expire()
    new = await bench.take(5, "w2", level=Level.ALONE)
    same("lost claims", await bench.ledger.dead_letter([DeadLetterRequest(LETTER, old)]), [old])
    same("the dead letters", await bench.ledger.dead_letters(10), [])
    same("the holder", (await bench.entry()).token, new.token)


@ENDING_PROMISES.add(PLAIN)
async def a_dead_letter_that_may_have_been_written_makes_its_key_suspect(bench: LedgerBench) -> None:
    """A dead letter after an attempt that may have written makes its key suspect."""
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await bench.take(5), Certainty.ENDED)])
    same("the suspicions", (await bench.entry()).suspicions, 1)
    await bench.take(4)


@ENDING_PROMISES.add(PLAIN)
async def dead_letters_are_listed_and_deleted_by_number(bench: LedgerBench) -> None:
    """Dead letters are listed newest first, up to the limit; a deletion returns how many it deleted."""
    await bench.ledger.dead_letter([DeadLetterRequest(DeadLetter(f"cause {number}", b"")) for number in range(5)])
    found = await bench.ledger.dead_letters(3)
    same("the newest three", [letter.cause for letter in letters_of(found)], ["cause 4", "cause 3", "cause 2"])
    numbers = [number for number, _, _ in found]
    same("the number of deleted letters", await bench.another.delete_dead_letters([numbers[0], numbers[2], -1]), 2)
    same("the number of letters deleted twice", await bench.another.delete_dead_letters([numbers[0]]), 0)
    left = [letter.cause for letter in letters_of(await bench.ledger.dead_letters(10))]
    same("the letters that are left", left, ["cause 3", "cause 1", "cause 0"])
    same("the count of dead letters", (await bench.ledger.counts()).dead, 3)


@ENDING_PROMISES.add(PLAIN)
async def dead_letters_are_found_by_time_and_cause(bench: LedgerBench) -> None:
    """`since` is inclusive, `until` is exclusive, and `cause` matches a part; the limit counts only matches."""
    for cause in ("first 50%", "second", "first again"):
        await bench.ledger.dead_letter([DeadLetterRequest(DeadLetter(cause, b""))])
        bench.advance(100.0)
    [(_, last, _), (_, middle, _), (_, first, _)] = await bench.ledger.dead_letters(10)
    for matching, wanted in (
        (DeadLetterFilter(since=middle), ["first again", "second"]),
        (DeadLetterFilter(until=middle), ["first 50%"]),
        (DeadLetterFilter(since=first, until=last), ["second", "first 50%"]),
        (DeadLetterFilter(cause="first"), ["first again", "first 50%"]),
        (DeadLetterFilter(cause="0%"), ["first 50%"]),
        (DeadLetterFilter(cause="%"), ["first 50%"]),
        (DeadLetterFilter(since=middle, cause="second"), ["second"]),
        (DeadLetterFilter(cause="third"), []),
    ):
        same(f"what {matching} matches", _causes(await bench.another.dead_letters(10, matching)), wanted)
    same(
        "the newest match",
        _causes(await bench.ledger.dead_letters(1, DeadLetterFilter(cause="first"))),
        ["first again"],
    )


@ENDING_PROMISES.add(PLAIN)
async def keys_that_are_held_are_listed(bench: LedgerBench) -> None:
    """A key is listed while its claim is held, in the order of keys, and no longer once the lease has expired."""
    for key in ("c", "a", "b"):
        await bench.take(1, key=key)
    await bench.committed(1, key="idle")
    control_store = bench.another.control_store
    same("all held keys", await control_store.held("", 10), ["a", "b", "c"])
    same("the first two", await control_store.held("", 2), ["a", "b"])
    same("the keys after the first", await control_store.held("a", 10), ["b", "c"])
    await bench.ledger.fail([Failure(await bench.take(1, key="d"), Certainty.UNKNOWN, 0.0)])
    same("the held keys, with one of unknown outcome", await control_store.held("b", 10), ["c", "d"])
    bench.expire()
    same("the held keys after their leases", await control_store.held("", 10), [])


@ENDING_PROMISES.add(PLAIN)
async def suspects_are_listed_after_a_while(bench: LedgerBench) -> None:
    """A key is suspect at once, and listed once it has been quiet for the requested time."""
    for key in ("x", "y", "z"):
        await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await bench.take(5, key=key), Certainty.ENDED)])
    same("the suspects before the quiet time", await bench.ledger.suspects(10, 100.0), [])
    bench.advance(101.0)
    same("the suspects after the quiet time", sorted(await bench.ledger.suspects(10, 100.0)), ["x", "y", "z"])
    same("the number of suspects with a limit of two", len(await bench.ledger.suspects(2, 100.0)), 2)
    same("the count of suspects", (await bench.ledger.counts()).suspects, 3)


@ENDING_PROMISES.add(PLAIN)
async def a_repair_clears_a_suspicion_that_has_not_grown(bench: LedgerBench) -> None:
    """A repair under an exclusive claim clears the suspicions; it may raise the mark, and never lowers it."""
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await bench.take(5), Certainty.ENDED)])
    claim = granted(await bench.ask_for(ChangeHeader("a", None), level=Level.ALONE))
    await bench.ledger.finish_repair(claim, ChangeHeader("a", order_of(6)))
    entry = await bench.entry()
    same("suspicion, mark and holder", (entry.suspicions, entry.mark, entry.token), (0, order_of(6), 0))
    claim = granted(await bench.ask_for(ChangeHeader("a", None), level=Level.ALONE))
    await bench.ledger.finish_repair(claim, ChangeHeader("a", order_of(3)))
    same("the mark", (await bench.entry()).mark, order_of(6))


@ENDING_PROMISES.add(PLAIN)
async def a_repair_leaves_a_suspicion_that_has_grown(bench: LedgerBench) -> None:
    """A commit that was refused during the repair may have written after it, so the key stays suspect."""
    late = await bench.take(5, "w2")
    bench.expire()
    claim = granted(await bench.ask_for(ChangeHeader("a", None), "w2", level=Level.ALONE))
    same("refused commits", await bench.another.commit([Commit(late)]), [late])
    await bench.ledger.finish_repair(claim, None)
    entry = await bench.entry()
    same("whether it is suspect, and free", (entry.suspicions > 0, entry.token), (True, 0))


@ENDING_PROMISES.add(PLAIN)
async def only_idle_old_keys_are_forgotten(bench: LedgerBench) -> None:
    """Pruning keeps every key that is young, held, suspect or has an unknown write; a pruned key is new again."""
    await bench.committed(5, key="old")
    await bench.committed(5, key="old and gone", deleted=True)
    await bench.ledger.dead_letter([DeadLetterRequest(LETTER, await bench.take(5, key="suspect"), Certainty.ENDED)])
    await bench.ledger.fail([Failure(await bench.take(5, key="unknown"), Certainty.ENDED, 1.0)])
    bench.advance(1000.0)
    await bench.ledger.claim([ChangeHeader("held", order_of(5))], LeaseTerms("w1", 5000.0))
    bench.advance(500.0 + REDELIVERY_S)
    await bench.committed(5, key="young")
    same("the number of forgotten keys", await bench.ledger.prune(500.0), 2)
    for key in ("suspect", "unknown", "held", "young"):
        if await bench.another.inspect(key) is None:
            raise AssertionError(f"the {key} key was forgotten")
    same("the entry of a forgotten key", await bench.another.inspect("old"), None)
    await bench.take(1, key="old")


@ENDING_PROMISES.add(SAFE)
async def keys_are_remembered_for_the_longest_redelivery_on_top(bench: LedgerBench) -> None:
    """A key is kept for retention plus redelivery, because an older version may be sent that long after a commit."""
    await bench.committed(5)
    bench.advance(500.0 + REDELIVERY_S - CLOCK_S)
    same("the number of forgotten keys", await bench.ledger.prune(500.0), 0)
    bench.advance(2 * CLOCK_S)
    same("the number of keys forgotten later", await bench.ledger.prune(500.0), 1)


@ENDING_PROMISES.add(SAFE)
async def failed_attempts_of_a_key_without_a_mark_are_forgotten_too(bench: LedgerBench) -> None:
    """A key without a committed change is not kept for ever because an attempt failed."""
    await bench.ledger.fail([Failure(await bench.take(5), Certainty.CLEAN, 1.0)])
    bench.advance(500.0 + REDELIVERY_S + CLOCK_S)
    same("the number of forgotten keys", await bench.ledger.prune(500.0), 1)
    same("the entry of the key", await bench.ledger.inspect("a"), None)


@ENDING_PROMISES.add(PLAIN)
async def the_counts_say_what_is_there(bench: LedgerBench) -> None:
    """The counts cover keys with a mark, tombstones, and claims whose lease has not expired."""
    await bench.committed(1, key="x")
    await bench.committed(1, key="y", deleted=True)
    await bench.take(2, key="x")
    await bench.take(2, key="z")
    counts = await bench.another.counts()
    same("keys, tombstones, claims", (counts.keys, counts.tombstones, counts.claims), (2, 1, 2))
    bench.expire()
    same("claims after their leases", (await bench.another.counts()).claims, 0)


@ENDING_PROMISES.add(PLAIN)
async def a_call_about_nothing_does_nothing(bench: LedgerBench) -> None:
    """Every method accepts an empty sequence."""
    results = await bench.ledger.claim([], LeaseTerms("w1", LEASE_S))
    same("the results for no headers", (results.granted, results.refused), ([], {}))
    same("lost renewals", await bench.ledger.renew([], LEASE_S), [])
    same("refused commits", await bench.ledger.commit([]), [])
    same("lost claims", await bench.ledger.dead_letter([]), [])
    same("the number of deleted letters", await bench.ledger.delete_dead_letters([]), 0)
    await bench.ledger.fail([])
    await bench.ledger.release([])


def _causes(found: Sequence[tuple[int, float, DeadLetter]]) -> list[str]:
    return [letter.cause for letter in letters_of(found)]
