"""What every ledger promises about the barrier of a swap: nothing is claimed or decided until the name has moved."""

import asyncio
from typing import Any

from msgspec.structs import replace

from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Move, Pause, ReindexRun, RunState
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Advance, Certainty, Claim, Commit, LeaseTerms, Level, Position, Refusal, RefusalReason
from keywise.core.ledger import Failure, MarkingLedger
from keywise.testing.conformance.claims import LEASE_S, PLAIN, SAFE, LedgerBench, granted, refused
from keywise.testing.conformance.promise import Promises, same

MOVE_PROMISES: Promises[LedgerBench] = Promises()
MOVE_TRANSACTION_PROMISES: Promises[LedgerBench] = Promises()

TOKEN = 2**62 + 1
STILL = Controls(target="pages-6", run=ReindexRun(7, RunState.CATCHING_UP, by="ann", into="pages-7"))
"""Before the move: a reindex has built the other target, which decides no claim."""
MOVING = replace(STILL, move=Move("pages-6", "pages-7 🦉", TOKEN))
MOVED = replace(STILL, target="pages-7", spare="pages-6", target_epoch=1)
LOOK_S = 0.05
"""How long to see whether a step waits for an open transaction."""


async def set_controls(bench: LedgerBench, before: Controls, after: Controls) -> None:
    replaced = await bench.another.control_store.replace_controls(before, after)
    same("whether the controls were replaced", replaced, True)


async def asked_by_holder(
    bench: LedgerBench, header: ChangeHeader, *, token: int = TOKEN, despite_pause: bool = False
) -> Claim | Refusal:
    """Ask for a claim as the worker does that carries out the swap."""
    terms = LeaseTerms("w2", LEASE_S, Level.ALONE, despite_pause=despite_pause, move_token=token)
    results = await bench.another.claim([header], terms)
    return results.granted[0] if results.granted else results.refused[header.key]  # type: ignore[no-any-return]


async def reasons(bench: LedgerBench, *headers: ChangeHeader, is_marking: bool = False) -> dict[str, RefusalReason]:
    """Decide in a transaction, and mark what is allowed; return the reason for each other header.

    With `is_marking`, decide and mark in one step, if the ledger has such a step.
    """
    ledger: Any = bench.ledger
    if is_marking and isinstance(ledger, MarkingLedger):
        async with ledger.marking_transaction() as marking:
            refusals = await marking.decide_and_mark(headers)
            await marking.mark([header for header in headers if header.key not in refusals])
    else:
        async with ledger.transaction() as transaction:
            refusals = await transaction.decide(headers)
            await transaction.mark([header for header in headers if header.key not in refusals])
    return {key: refusal.reason for key, refusal in refusals.items()}


def newer(*keys: str, version: int = 6) -> list[ChangeHeader]:
    return [ChangeHeader(key, order_of(version)) for key in keys]


@MOVE_PROMISES.add(SAFE)
async def nothing_is_claimed_during_a_move(bench: LedgerBench) -> None:
    """During a move every new claim is refused as paused: of a change, a row, a deletion or an exclusion, on any key.

    Stale changes are still refused as stale.
    """
    await bench.committed(5)
    await set_controls(bench, Controls(), STILL)
    await set_controls(bench, STILL, MOVING)
    asked = [
        *newer("a", "new", "another"),
        ChangeHeader("row", (0, 5, 7), is_row=True),
        ChangeHeader("deletion", order_of(6), deleted=True),
        ChangeHeader("unversioned", order_of(None)),
        ChangeHeader("exclusion", None),
    ]
    for owner in ("w1", "w1", "w2"):
        results = await (bench.another if owner == "w2" else bench.ledger).claim(asked, LeaseTerms(owner, LEASE_S))
        same("what was granted", results.granted, [])
        seen = {key: refusal.reason for key, refusal in results.refused.items()}
        same("the reasons", seen, dict.fromkeys((one.key for one in asked), RefusalReason.PAUSED))
    refused(await bench.ask(5), RefusalReason.DUPLICATE, mark=order_of(5))
    refused(await bench.ask(4), RefusalReason.STALE, mark=order_of(5))
    same("the number of claims", (await bench.another.counts()).claims, 0)
    await set_controls(bench, MOVING, MOVED)
    for header in asked:
        granted(await bench.ask_for(header))


@MOVE_PROMISES.add(SAFE)
async def only_the_holder_of_the_token_passes(bench: LedgerBench) -> None:
    """During a move, a claim with its token is decided as usual; an operator's, or one with another token, waits."""
    await bench.committed(5)
    held = await bench.take(6, key="held")
    await set_controls(bench, Controls(), MOVING)
    for token in (0, 1, TOKEN - 1, TOKEN + 1):
        for header in (*newer("a", "new"), ChangeHeader("a", None)):
            refused(await asked_by_holder(bench, header, token=token, despite_pause=True), RefusalReason.PAUSED)
    for header in (*newer("a", "new"), ChangeHeader("exclusion", None), ChangeHeader("row", (0, 5, 7), is_row=True)):
        claim = granted(await asked_by_holder(bench, header))
        if claim.order is None:
            await bench.another.release([claim])
        else:
            same("refused commits", await bench.another.commit([Commit(claim)]), [])
    refused(await asked_by_holder(bench, ChangeHeader("a", order_of(5))), RefusalReason.STALE, mark=order_of(6))
    refused(await asked_by_holder(bench, ChangeHeader("held", None)), RefusalReason.BUSY)
    await bench.ledger.release([held])
    granted(await asked_by_holder(bench, ChangeHeader("held", None)))


@MOVE_PROMISES.add(SAFE)
async def a_move_does_not_end_a_pause(bench: LedgerBench) -> None:
    """During a move, a pause still holds for the holder of the token, unless it claims despite pauses."""
    await set_controls(bench, Controls(), MOVING)
    await bench.ledger.control_store.pause(Pause(EVERYTHING, is_pattern=True))
    [header] = newer("a")
    refused(await asked_by_holder(bench, header), RefusalReason.PAUSED)
    await bench.another.release([granted(await asked_by_holder(bench, header, despite_pause=True))])
    same("whether it was resumed", await bench.ledger.control_store.resume(EVERYTHING, True), True)
    same("the controls", await bench.another.control_store.controls(), MOVING)
    granted(await asked_by_holder(bench, header))


@MOVE_PROMISES.add(PLAIN)
async def claims_that_are_held_go_on_during_a_move(bench: LedgerBench) -> None:
    """A move ends no claim: its holder renews, advances, commits, fails, releases or dead-letters it."""
    ways = ("commit", "advance", "fail", "release", "dead letter")
    claims = {way: await bench.take(6, key=way) for way in ways}
    await set_controls(bench, Controls(), MOVING)
    same("lost renewals", await bench.ledger.renew(list(claims.values()), LEASE_S), [])
    same("refused advances", await bench.ledger.advance([Advance(claims["advance"], Position(1, b"here"))]), [])
    done = [Commit(claims["commit"]), Commit(claims["advance"])]
    same("refused commits", await bench.ledger.commit(done), [])
    await bench.ledger.fail([Failure(claims["fail"], Certainty.CLEAN, 0.001)])
    await bench.ledger.release([claims["release"]])
    letter = DeadLetter("it is bad", b"", "dead letter", 6)
    same("lost claims", await bench.ledger.dead_letter([DeadLetterRequest(letter, claims["dead letter"])]), [])
    same("the marks", [(await bench.entry(way)).mark for way in ("commit", "advance")], [order_of(6)] * 2)
    same("the failed attempts", (await bench.entry("fail")).attempts, 1)
    same("the dead letters", len(await bench.another.dead_letters(10)), 1)
    same("the number of claims", (await bench.another.counts()).claims, 0)
    bench.advance(1.0)
    for way in ways:
        refused(await bench.ask(7, key=way), RefusalReason.PAUSED)


@MOVE_PROMISES.add(SAFE)
async def the_holder_of_the_token_ends_what_has_expired(bench: LedgerBench) -> None:
    """During a move, only the token's holder takes an expired claim over, at once; its old holder commits no more."""
    old = await bench.take(6, "dead")
    await set_controls(bench, Controls(), MOVING)
    bench.expire()
    refused(await bench.ask(7, level=Level.ALONE), RefusalReason.PAUSED)
    await bench.another.release([granted(await asked_by_holder(bench, ChangeHeader("a", None)))])
    same("refused commits", await bench.ledger.commit([Commit(old)]), [old])
    same("the mark", (await bench.entry()).mark, None)
    await set_controls(bench, MOVING, MOVED)
    await bench.take(6, level=Level.ALONE)


@MOVE_PROMISES.add(SAFE)
async def another_token_takes_the_barrier_over(bench: LedgerBench) -> None:
    """A new token in the controls counts at once, and the one before it counts no more."""
    await set_controls(bench, Controls(), MOVING)
    granted(await asked_by_holder(bench, *newer("a")))
    assert MOVING.move is not None, "the move is under way"
    taken_over = replace(MOVING, move=replace(MOVING.move, token=TOKEN + 1, is_called=True))
    await set_controls(bench, MOVING, taken_over)
    same("the controls", await bench.ledger.control_store.controls(), taken_over)
    refused(await asked_by_holder(bench, *newer("b")), RefusalReason.PAUSED)
    granted(await asked_by_holder(bench, *newer("b"), token=TOKEN + 1))


@MOVE_PROMISES.add(SAFE)
async def no_claim_overtakes_a_move(bench: LedgerBench) -> None:
    """When the call that sets a move returns, every granted claim is already listed as held, and none is added."""
    before = Controls()
    for turn in range(3):
        names = [f"k{turn} {number}" for number in range(60)]
        claiming = [
            asyncio.create_task((bench.another if number % 2 else bench.ledger).claim(newer(name), _W1))
            for number, name in enumerate(names)
        ]
        await asyncio.wait(claiming, return_when=asyncio.FIRST_COMPLETED)
        await set_controls(bench, before, MOVING)
        held = set(await bench.ledger.control_store.held("", 1000))
        claims = [claim for task in claiming for claim in (await task).granted]
        same("the keys that were claimed after the move was set", {claim.key for claim in claims} - held, set())
        same("refused commits", await bench.ledger.commit([Commit(claim) for claim in claims]), [])
        await set_controls(bench, MOVING, MOVED)
        results = await bench.ledger.claim(newer(*names, version=7), _W1)
        same("the refused claims after the move", results.refused, {})
        await bench.ledger.release(results.granted)
        before = MOVED


@MOVE_TRANSACTION_PROMISES.add(SAFE)
async def nothing_is_decided_during_a_move(bench: LedgerBench) -> None:
    """During a move, a transaction without claims is refused every change that is not stale, also in one step."""
    await bench.committed(5)
    await set_controls(bench, Controls(), STILL)
    await set_controls(bench, STILL, MOVING)
    for is_marking in (False, True):
        asked = [*newer("a", "new"), ChangeHeader("row", (0, 5, 7), is_row=True)]
        seen = await reasons(bench, *asked, is_marking=is_marking)
        same("the reasons", seen, dict.fromkeys(("a", "new", "row"), RefusalReason.PAUSED))
        same("the reasons of plain changes", await reasons(bench, *newer("b"), is_marking=is_marking), _PAUSED_B)
        stale = await reasons(bench, *newer("a", version=4), is_marking=is_marking)
        same("the reason of a stale change", stale, {"a": RefusalReason.STALE})
        same("the mark", (await bench.entry()).mark, order_of(5))
        same("the entry of a new key", await bench.ledger.inspect("new"), None)
    await set_controls(bench, MOVING, MOVED)
    for version, is_marking in ((6, False), (7, True)):
        seen = await reasons(bench, *newer("a", "new", version=version), is_marking=is_marking)
        same("the reasons after the move", seen, {})
        same("the mark", (await bench.entry("new")).mark, order_of(version))


@MOVE_TRANSACTION_PROMISES.add(SAFE)
async def controls_are_replaced_in_a_transaction(bench: LedgerBench) -> None:
    """A transaction replaces the controls if they are as the caller says; others see it after the commit."""
    control_store = bench.another.control_store
    async with bench.ledger.transaction() as transaction:
        same("whether others were replaced", await transaction.replace_controls(MOVED, MOVING), False)
        same("whether they were replaced", await transaction.replace_controls(Controls(), MOVING), True)
        same("whether older ones were replaced", await transaction.replace_controls(Controls(), STILL), False)
        same("the controls before the commit", await control_store.controls(), Controls())
        refusals = await transaction.decide(newer("a"))
        same("the reasons inside", [one.reason for one in refusals.values()], [RefusalReason.PAUSED])
    same("the controls after the commit", await control_store.controls(), MOVING)
    async with bench.ledger.transaction() as transaction:
        same("whether the move was ended", await transaction.replace_controls(MOVING, MOVED), True)
        same("the refusals inside", await transaction.decide(newer("a")), {})
        await transaction.mark(newer("a"))
    same("the controls after the move", await control_store.controls(), MOVED)
    same("the mark", (await bench.entry()).mark, order_of(6))


@MOVE_TRANSACTION_PROMISES.add(SAFE)
async def replaced_controls_are_rolled_back(bench: LedgerBench) -> None:
    """Controls that a transaction has replaced are rolled back with it, or with the savepoint that replaced them."""
    await set_controls(bench, Controls(), MOVING)
    try:
        async with bench.ledger.transaction() as transaction:
            same("whether they were replaced", await transaction.replace_controls(MOVING, MOVED), True)
            raise _RolledBack
    except _RolledBack:
        pass
    same("the controls after the rollback", await bench.another.control_store.controls(), MOVING)
    async with bench.ledger.transaction() as transaction:
        try:
            async with transaction.savepoint():
                same("whether they were replaced", await transaction.replace_controls(MOVING, MOVED), True)
                raise _RolledBack
        except _RolledBack:
            pass
        same("whether the others are there", await transaction.replace_controls(MOVED, STILL), False)
    same("the controls after the savepoint", await bench.another.control_store.controls(), MOVING)
    refused(await bench.ask(6), RefusalReason.PAUSED)


@MOVE_TRANSACTION_PROMISES.add(SAFE)
async def a_decision_holds_up_a_move(bench: LedgerBench) -> None:
    """Controls are replaced in a transaction only after the transactions that have decided under the ones before."""
    async with bench.ledger.transaction() as transaction:
        same("the refusals", await transaction.decide(newer("a")), {})
        moving = asyncio.create_task(_replaced(bench.another, Controls(), MOVING))
        await asyncio.wait([moving], timeout=LOOK_S)
        same("whether the move was set beside the transaction", moving.done(), False)
        await transaction.mark(newer("a"))
    same("whether the move was set", await moving, True)
    same("the mark", (await bench.entry()).mark, order_of(6))
    refused(await bench.ask(7), RefusalReason.PAUSED)


@MOVE_TRANSACTION_PROMISES.add(SAFE)
async def a_move_holds_up_claims_and_decisions(bench: LedgerBench) -> None:
    """While a transaction that sets a move is open, claims and decisions wait; after its commit they are refused."""
    async with bench.ledger.transaction() as transaction:
        same("whether they were replaced", await transaction.replace_controls(Controls(), MOVING), True)
        claiming = asyncio.create_task(bench.ask(6, "w2"))
        deciding = asyncio.create_task(_decided(bench.another, newer("b")))
        await asyncio.wait([claiming, deciding], timeout=LOOK_S)
        same("whether anything was answered before", (claiming.done(), deciding.done()), (False, False))
    refused(await claiming, RefusalReason.PAUSED)
    same("the reasons", {key: one.reason for key, one in (await deciding).items()}, _PAUSED_B)


async def _replaced(ledger: Any, before: Controls, after: Controls) -> bool:
    async with ledger.transaction() as transaction:
        return await transaction.replace_controls(before, after)  # type: ignore[no-any-return]


async def _decided(ledger: Any, headers: list[ChangeHeader]) -> dict[str, Refusal]:
    async with ledger.transaction() as transaction:
        return await transaction.decide(headers)  # type: ignore[no-any-return]


class _RolledBack(Exception):
    """Leaves a transaction or a savepoint on purpose."""


_W1 = LeaseTerms("w1", LEASE_S)
_PAUSED_B = {"b": RefusalReason.PAUSED}
