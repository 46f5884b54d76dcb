"""What every backend of turns promises about ends: deadlines, lost owners, late answers, and transactions."""

from keywise.core.serial.contract import Ending, Reply
from keywise.testing.conformance.promise import Promises, same
from keywise.testing.conformance.serial.ordering import ATOMIC, LEASE_S, PLAIN, TurnsBench, asked, done

TURN_ENDING_PROMISES: Promises[TurnsBench] = Promises()
TURN_TRANSACTION_PROMISES: Promises[TurnsBench] = Promises()


@TURN_ENDING_PROMISES.add(PLAIN)
async def a_request_past_its_deadline_never_runs(bench: TurnsBench) -> None:
    """The caller's deadline travels with the request: past it the answer is expired, and others go on."""
    await bench.ask("late", "late too", wait_s=20.0)
    await bench.ask("patient", wait_s=100.0)
    bench.advance(25.0)
    await bench.one("patient")
    for id in ("late", "late too"):
        same("the outcome", await bench.outcome(id), Ending.EXPIRED)


@TURN_ENDING_PROMISES.add(PLAIN)
async def a_deadline_that_passes_behind_a_holder_counts(bench: TurnsBench) -> None:
    """Who waited behind a holder until its deadline was over does not run when the key is free."""
    await bench.ask("long")
    turn = await bench.one("long")
    await bench.ask("late", wait_s=10.0)
    bench.advance(15.0)
    answered = await bench.turns.answer([done(turn)], limit=10)
    same("the next turns", answered.turns, [])
    same("the outcome", await bench.outcome("late"), Ending.EXPIRED)


@TURN_ENDING_PROMISES.add(PLAIN)
async def an_expired_request_may_be_asked_for_again(bench: TurnsBench) -> None:
    """It never ran, so that the same id gets a new place, at the end of the line."""
    await bench.ask("1", wait_s=10.0)
    await bench.ask("2", wait_s=100.0)
    bench.advance(15.0)
    await bench.end(await bench.one("2"))
    await bench.ask("1", wait_s=10.0)
    same("the reply while it waits", await bench.outcome("1"), None)
    turn = await bench.one("1")
    same("the place", turn.place, 3)
    await bench.end(turn)


@TURN_ENDING_PROMISES.add(PLAIN)
async def what_waits_can_be_withdrawn(bench: TurnsBench) -> None:
    """A request that waits can be ended; one that runs or has ended is left alone, and says so."""
    await bench.ask("done", "runs", "expires", "is cancelled", "waits")
    await bench.end(await bench.one("done"))
    turn = await bench.one("runs")
    ids = ["done", "runs", "expires", "unknown"]
    same("the withdrawn ones", await bench.another.withdraw(ids, Ending.EXPIRED, "tired"), ["expires"])
    same(
        "the cancelled ones", await bench.turns.withdraw(["is cancelled"], Ending.CANCELLED, "by ann"), ["is cancelled"]
    )
    replies = await bench.turns.replies([*ids, "is cancelled"])
    seen = {id: (reply.outcome, reply.cause) for id, reply in replies.items()}
    wanted = {
        "done": (Ending.DONE, ""),
        "expires": (Ending.EXPIRED, "tired"),
        "is cancelled": (Ending.CANCELLED, "by ann"),
    }
    same("the replies", seen, wanted)
    await bench.end(turn)
    [answer] = await bench.turns.ask([asked("is cancelled")])
    same("the answer to a cancelled id", answer, replies["is cancelled"])
    await bench.one("waits")


@TURN_ENDING_PROMISES.add(PLAIN)
async def a_lost_owner_loses_its_turns_for_good(bench: TurnsBench) -> None:
    """Nobody knows what a lost owner did, so that its request is not run again: it is lost, and the key goes on."""
    await bench.ask("1", "2")
    turn = await bench.one("1")
    bench.advance(LEASE_S - 10.0)
    same("turns before the lease is over", await bench.take(turns=bench.another), {})
    bench.advance(11.0)
    second = await bench.one("2", turns=bench.another)
    same("the outcome", await bench.outcome("1"), Ending.LOST)
    answered = await bench.turns.answer([done(turn)])
    same("the refused answers", answered.refused, ["1"])
    [answer] = await bench.turns.ask([asked("1")])
    same("the outcome for who asks again", isinstance(answer, Reply) and answer.outcome, Ending.LOST)
    if second.token <= turn.token:
        raise AssertionError(f"the token went from {turn.token} to {second.token}")
    await bench.end(second, by=bench.another)


@TURN_ENDING_PROMISES.add(PLAIN)
async def a_late_answer_changes_nothing(bench: TurnsBench) -> None:
    """An owner that wakes up after it was lost cannot end what another one runs now, nor free its key."""
    await bench.ask("1", "2", "3")
    turn = await bench.one("1")
    bench.lose()
    second = await bench.one("2", turns=bench.another)
    forged = Reply(id="2", outcome=Ending.DONE, body=b"no", token=turn.token)
    answered = await bench.turns.answer([done(turn), forged], limit=10)
    same("the refused answers", answered.refused, ["1", "2"])
    same("turns beside the holder", answered.turns, [])
    await bench.turns.give_back([turn])
    same("turns after giving back what was lost", await bench.take(), {})
    await bench.end(second, by=bench.another)
    same("the stored body", (await bench.turns.replies(["2"]))["2"].body, b"yes")


@TURN_ENDING_PROMISES.add(PLAIN)
async def an_answer_counts_as_long_as_nobody_took_over(bench: TurnsBench) -> None:
    """A lease that ran out unnoticed does no harm, since nobody else has begun anything."""
    await bench.ask("1", wait_s=10.0)
    turn = await bench.one("1")
    bench.lose()
    await bench.end(turn)
    same("the outcome", await bench.outcome("1"), Ending.DONE)


@TURN_ENDING_PROMISES.add(PLAIN)
async def an_owner_that_is_heard_of_keeps_its_turns(bench: TurnsBench) -> None:
    """Renewals keep an owner alive; it is told which of its tokens are somebody else's."""
    await bench.ask("1", "2")
    turn = await bench.one("1")
    for _ in range(4):
        bench.advance(LEASE_S / 2)
        same("lost tokens", await bench.turns.renew([turn.token]), [])
    same("turns for others", await bench.take(turns=bench.another), {})
    bench.lose()
    await bench.one("2", turns=bench.another)
    same("lost tokens after a takeover", await bench.turns.renew([turn.token]), [turn.token])


@TURN_ENDING_PROMISES.add(PLAIN)
async def a_turn_that_its_owner_does_not_know_of_waits_again(bench: TurnsBench) -> None:
    """If the answer of a call that took turns is lost, its owner did not begin them, and says so by renewing."""
    await bench.ask("1", "2", runner="w1")
    await bench.ask("3", key="b")
    run = await bench.take(run_max=2)
    early = await bench.turns.operator.now() - 10.0
    for before in (None, early):
        await bench.turns.renew([run["3"].token], before)
        same("turns while nothing was said of these", await bench.take(run_max=2), {})
    bench.advance(1.0)
    now = await bench.turns.operator.now()
    same("lost tokens", await bench.turns.renew([run["3"].token], now), [])
    same("turns for others", await bench.take(turns=bench.another), {})
    again = await bench.take(run_max=2)
    seen = [(id, turn.place, turn.attempts) for id, turn in again.items()]
    same("the turns of a second try", seen, [("1", 1, 0), ("2", 2, 0)])
    same("the refused answers", (await bench.turns.answer([done(run["1"])])).refused, ["1"])
    await bench.end(*again.values(), run["3"])


@TURN_ENDING_PROMISES.add(PLAIN)
async def the_requests_of_a_lost_caller_hold_nobody_up(bench: TurnsBench) -> None:
    """Where a caller has to run its own request and is lost, the request expires, and the line goes on."""
    await bench.ask("mine", runner="w1")
    await bench.ask("theirs", runner="w2", turns=bench.another)
    same("turns while the caller may live", await bench.take(turns=bench.another), {})
    bench.lose()
    await bench.one("theirs", turns=bench.another)
    same("the outcome", await bench.outcome("mine"), Ending.EXPIRED)


@TURN_ENDING_PROMISES.add(PLAIN)
async def all_turns_of_a_lost_run_are_lost(bench: TurnsBench) -> None:
    """Of turns that were taken in a row, those that were answered stand, and the others are lost with their owner."""
    await bench.ask("1", "2", "3", runner="w1")
    await bench.ask("4")
    run = await bench.take(run_max=3)
    await bench.end(run["1"])
    bench.lose()
    await bench.one("4", turns=bench.another)
    seen = [await bench.outcome(id) for id in ("1", "2", "3")]
    same("the outcomes", seen, [Ending.DONE, Ending.LOST, Ending.LOST])


@TURN_ENDING_PROMISES.add(PLAIN)
async def a_turn_that_was_not_begun_goes_back_to_its_place(bench: TurnsBench) -> None:
    """What is given back waits where it waited, and it is free for others."""
    await bench.ask("1", "2", "3")
    run = await bench.take(run_max=2)
    await bench.turns.give_back([run["2"]])
    same("turns while the rest of the run goes on", await bench.take(turns=bench.another), {})
    await bench.end(run["1"])
    turn = await bench.one("2", turns=bench.another)
    same("the place and the attempts", (turn.place, turn.attempts), (2, 0))
    await bench.another.give_back([turn])
    await bench.one("2")


@TURN_ENDING_PROMISES.add(PLAIN)
async def an_answer_that_is_repeated_is_the_same_answer(bench: TurnsBench) -> None:
    """A reply that was stored is not refused when it comes again; another reply is."""
    await bench.ask("1", "2")
    turn = await bench.one("1")
    for _ in range(2):
        await bench.end(turn)
    answered = await bench.turns.answer([done(turn, b"another")])
    same("the refused answers", answered.refused, ["1"])
    same("the stored body", (await bench.turns.replies(["1"]))["1"].body, b"yes")
    await bench.one("2")


@TURN_ENDING_PROMISES.add(PLAIN)
async def an_answer_needs_the_token_of_the_turn(bench: TurnsBench) -> None:
    """Nobody ends a request that it has no turn for: not one that waits, not one that nobody knows."""
    await bench.ask("1", "2")
    turn = await bench.one("1")
    for reply in (
        Reply(id="1", outcome=Ending.DONE),
        Reply(id="1", outcome=Ending.DONE, token=turn.token + 1),
        Reply(id="2", outcome=Ending.DONE, token=turn.token),
        Reply(id="2", outcome=Ending.DONE),
        Reply(id="unknown", outcome=Ending.DONE, token=turn.token),
    ):
        same("the refused answers", (await bench.turns.answer([reply])).refused, [reply.id])
    await bench.end(turn)


@TURN_ENDING_PROMISES.add(ATOMIC)
async def what_is_done_in_a_transaction_can_be_run_again(bench: TurnsBench) -> None:
    """Nothing happened where there is no answer, so that the request of a lost owner is the next one again."""
    await bench.ask("1", "2")
    turn = await bench.one("1")
    bench.lose()
    again = await bench.one("1", turns=bench.another)
    same("the place and the attempts", (again.place, again.attempts), (1, 1))
    same("the refused answers", (await bench.turns.answer([done(turn)])).refused, ["1"])
    await bench.end(again, by=bench.another)
    await bench.one("2")


@TURN_ENDING_PROMISES.add(ATOMIC)
async def a_request_that_loses_every_owner_fails(bench: TurnsBench) -> None:
    """Attempts are bounded: a request that takes one owner after another with it has failed, and the key goes on."""
    await bench.ask("killer", "2")
    await bench.one("killer")
    bench.lose()
    await bench.one("killer", turns=bench.another)
    bench.lose()
    await bench.one("2")
    same("the outcome", await bench.outcome("killer"), Ending.FAILED)


@TURN_ENDING_PROMISES.add(ATOMIC)
async def nothing_is_run_again_past_its_deadline(bench: TurnsBench) -> None:
    """A request whose owner was lost, and whose deadline is over, has expired: nothing of it happened."""
    await bench.ask("1", wait_s=LEASE_S - 10.0)
    await bench.ask("2")
    await bench.one("1")
    bench.lose()
    await bench.one("2", turns=bench.another)
    same("the outcome", await bench.outcome("1"), Ending.EXPIRED)


# Transactions.


@TURN_TRANSACTION_PROMISES.add(ATOMIC)
async def an_answer_in_a_transaction_stands_when_it_commits(bench: TurnsBench) -> None:
    """Until then nobody sees it, and with it the next turns can be taken."""
    await bench.ask("1", "2", runner="w1")
    turn = await bench.one("1")
    async with bench.turns.transaction() as transaction:
        answered = await transaction.answer([done(turn)], limit=10)
        same("the refused answers", answered.refused, [])
        same("the next turns", [one.request.id for one in answered.turns], ["2"])
    same("the outcome", await bench.outcome("1"), Ending.DONE)
    await bench.end(*answered.turns)


@TURN_TRANSACTION_PROMISES.add(ATOMIC)
async def an_answer_in_a_transaction_that_is_rolled_back_did_not_happen(bench: TurnsBench) -> None:
    """Its request runs still, under the same token."""
    await bench.ask("1")
    turn = await bench.one("1")
    try:
        async with bench.turns.transaction() as transaction:
            await transaction.answer([done(turn)])
            raise _RollbackError
    except _RollbackError:
        pass
    same("the outcome", await bench.outcome("1"), None)
    same("lost tokens", await bench.turns.renew([turn.token]), [])
    await bench.end(turn)


@TURN_TRANSACTION_PROMISES.add(ATOMIC)
async def a_late_answer_in_a_transaction_is_refused(bench: TurnsBench) -> None:
    """So that whoever was lost rolls its work back."""
    await bench.ask("1")
    turn = await bench.one("1")
    bench.lose()
    again = await bench.one("1", turns=bench.another)
    async with bench.turns.transaction() as transaction:
        same("the refused answers", (await transaction.answer([done(turn)])).refused, ["1"])
    await bench.end(again, by=bench.another)


@TURN_TRANSACTION_PROMISES.add(ATOMIC)
async def an_answer_that_was_stored_is_refused_in_a_transaction(bench: TurnsBench) -> None:
    """Who does not know whether its commit arrived, and does the work again, has to roll it back."""
    await bench.ask("1")
    turn = await bench.one("1")
    async with bench.turns.transaction() as transaction:
        await transaction.answer([done(turn)])
    async with bench.turns.transaction() as transaction:
        same("the refused answers", (await transaction.answer([done(turn)])).refused, ["1"])


@TURN_TRANSACTION_PROMISES.add(ATOMIC)
async def a_savepoint_keeps_its_neighbours(bench: TurnsBench) -> None:
    """What raises inside of one is undone alone."""
    await bench.ask("1", "2", runner="w1")
    run = await bench.take(run_max=2)
    async with bench.turns.transaction() as transaction:
        async with transaction.savepoint():
            pass
        try:
            async with transaction.savepoint():
                await transaction.answer([done(run["2"])])
                raise _RollbackError
        except _RollbackError:
            pass
        await transaction.answer([done(run["1"])])
    same("the outcomes", [await bench.outcome("1"), await bench.outcome("2")], [Ending.DONE, None])


class _RollbackError(Exception):
    """Ends a transaction of a check."""
