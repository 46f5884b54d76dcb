"""Broken variants of the merge queue; its simulator must find every one of them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from keywise.adapters.memory.serial_book import MemoryTurnBook
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.serial import rules
from keywise.core.serial import steps as turnkeeping
from keywise.core.serial.contract import Ending, Mode, Record, Reply, Request, TurnPolicy
from keywise.core.sink import Grade
from keywise.serial.client import Merge
from keywise.serial.grants import Bundle, Due, Held
from keywise.serial.outbox import Outbox, Send
from keywise.serial.pending import closed
from keywise.serial.runner import Runner, Tell
from mutants.mutant import Mutant

_arrival, _word_on, _run_of, _circle = rules.arrival, rules.word_on, rules.run_of, rules.circle
_mode_of = rules.mode_of


def _no_fence(record: Record | None, reply: Reply) -> rules.Word:
    """Whoever answers is believed."""
    return rules.Word.REFUSED if record is None else rules.Word.ENDS


def _no_memory_of_ids(known: Record | None, request: Request) -> Reply | rules.Arrival:
    answer = _arrival(known, request)
    return rules.Arrival.NEW if isinstance(answer, Reply) and answer.outcome is not Ending.REFUSED else answer


def _run_again(record: Record, now: float, policy: TurnPolicy) -> Reply | None:
    """As if nothing could have happened."""
    return None


def _last_first(
    line: Iterable[Record], owner: str, run_max: int, now: float, is_alive: Callable[[str], bool]
) -> tuple[list[Reply], list[Record]]:
    return _run_of(list(line)[::-1], owner, run_max, now, is_alive)


def _pass_over(
    line: Iterable[Record], owner: str, run_max: int, now: float, is_alive: Callable[[str], bool]
) -> tuple[list[Reply], list[Record]]:
    """Who is not here is passed over."""
    return _run_of([one for one in line if rules.may_run(one, owner)], owner, run_max, now, is_alive)


def _never_too_late(self: Due) -> Reply | None:
    return None


def _held_keys_are_free(self: MemoryTurnBook) -> Iterable[str]:
    return sorted(self.lines.waiting)


def _no_circle(*arguments: Any) -> None:
    return None


def _observed_beside_a_line(request: Request, switches: Any, now: float, has_line: bool) -> Mode:
    return _mode_of(request, switches, now, False)


def _observed_are_not_waited_for(book: Any, key: str) -> bool:
    return False


def _always_alive(self: Held) -> bool:
    return not self.is_lost


def _told_before_it_is_stored(self: Merge, replies: Sequence[Reply], are_stored: bool) -> None:
    self._outbox.replies += replies
    for reply in replies:
        call = self._calls.get(reply.id)
        if call is not None and reply.outcome is Ending.DONE:
            for future in call.futures:
                if not future.done():
                    future.set_result(reply)
    self._bell.set()


async def _never_withdraws(self: Merge) -> None:
    for id in list(self._gone):
        del self._gone[id]
        call = self._calls.get(id)
        if call is not None:
            self._end(call, Reply(id=id, outcome=Ending.EXPIRED, cause=rules.TOO_LATE))


async def _tells_before_it_takes_out(self: Merge, patience_s: float) -> None:
    for call in [call for call in self._calls.values() if not call.is_running]:
        self._end(call, closed(call.request))
    await _drain(self, patience_s)


_drain = Merge._drain


async def _drops_what_failed(self: Outbox, limit: int, send: Send) -> None:
    try:
        await _flush(self, limit, send)
    except DatabaseError:
        self.replies.clear()
        raise


_flush = Outbox.flush


async def _renews_blindly(self: Merge) -> None:
    """Turns whose answer was lost are never given back."""
    self._pulse.heard_at = self._clock()
    await self._turns.renew(self._held.tokens())
    self._is_renewal_due = self._has_doubts = False


async def _gives_everything_back(self: Merge) -> None:
    """After trouble nothing that runs is known any more."""
    before = await self._turns.operator.now() if self._has_doubts else None
    await self._turns.renew([], before)
    self._pulse.heard_at = self._clock()
    self._is_renewal_due = self._has_doubts = False
    self._looks = True


async def _tries_what_is_unknown(self: Runner, held: Held, due: Due, transaction: Any) -> Reply | str:
    reply = await _outcome(self, held, due, transaction)
    return reply.cause if isinstance(reply, Reply) and reply.outcome is Ending.LOST else reply


_outcome = Runner._outcome


async def _takes_it_for_undone(self: Runner, held: Held, due: Due, transaction: Any) -> Reply | str:
    """As if all that a function does were in the transaction."""
    reply = await _outcome(self, held, due, transaction)
    due.verdict = None
    if transaction is not None and isinstance(reply, Reply) and reply.outcome is Ending.LOST:
        return Reply(id=reply.id, outcome=Ending.EXPIRED, cause=reply.cause, token=reply.token)
    return reply


async def _commits_what_is_refused(self: Runner, held: Held, dues: Iterable[Due], replies: list[Reply]) -> str:
    async with self._turns.transaction() as transaction:
        for due in dues:
            reply = due.departure() or await self._saved(held, due, transaction)
            if isinstance(reply, str):
                return reply
            replies.append(reply)
        await transaction.answer(replies)
    return ""


async def _shares_what_is_refused(self: Runner, bundle: Bundle, replies: list[Reply]) -> None:
    async with self._turns.transaction() as transaction:
        for held in bundle.helds:
            for due in held.left:
                reply = due.departure() or await self._saved(held, due, transaction)
                if isinstance(reply, str):
                    break
                replies.append(reply)
        await transaction.answer(replies)


async def _tells_without_a_commit(self: Runner, held: Held, left: Any, tell: Tell) -> None:
    replies: list[Reply] = []
    if held.may_begin():
        with suppress(UnavailableError):
            await self._transact(held, left, replies)
        for _ in replies:
            left.popleft()
        tell(replies, True)


async def _shares_without_a_commit(self: Runner, bundle: Bundle, replies: list[Reply]) -> None:
    with suppress(UnavailableError):
        await _transact_all(self, bundle, replies)


_transact_all = Runner._transact_all


async def _keeps_what_failed(self: Runner, held: Held, due: Due, transaction: Any) -> Reply | str:
    return await self._outcome(held, due, transaction)


async def _run_side_by_side(self: Runner, held: Held, left: Any, tell: Tell) -> None:
    if not held.may_begin():
        return
    replies = await asyncio.gather(*(self._tried(held, due) for due in left))
    left.clear()
    tell(replies, False)


def _forget_who_fell(self: MemoryTurnBook, owner: str) -> bool:
    return True


def _all_are_dead(self: MemoryTurnBook) -> Sequence[Any]:
    return list(self.lines.holds.items())


def _mutant(name: str, owner: Any, attribute: str, broken: Any, grade: Grade = Grade.PLAIN) -> Mutant:
    return Mutant(name, 0, owner, attribute, broken, grade)


SERIAL_MUTANTS: tuple[Mutant, ...] = (
    _mutant("an answer needs no token", rules, "word_on", _no_fence),
    _mutant("an id is not remembered", rules, "arrival", _no_memory_of_ids),
    _mutant("a lost request is run again", rules, "after_loss", _run_again),
    _mutant("an unknown outcome is tried again", Runner, "_outcome", _tries_what_is_unknown),
    _mutant("the last one comes first", rules, "run_of", _last_first),
    _mutant("who is not here is passed over", rules, "run_of", _pass_over),
    _mutant("a request is run after its deadline", Due, "departure", _never_too_late),
    _mutant("a held key is granted again", MemoryTurnBook, "free_keys", _held_keys_are_free),
    _mutant("a holder is taken for lost at once", MemoryTurnBook, "lost_holds", _all_are_dead),
    _mutant("circles are not refused", rules, "circle", _no_circle),
    _mutant("observed beside a line", rules, "mode_of", _observed_beside_a_line),
    _mutant("in turn beside observed ones", turnkeeping, "_is_observed", _observed_are_not_waited_for),
    _mutant("who was stopped goes on", Held, "may_begin", _always_alive),
    _mutant("told before it is stored", Merge, "_tell", _told_before_it_is_stored),
    _mutant("expired without asking the store", Merge, "_withdraw", _never_withdraws),
    _mutant("answers are dropped with an error", Outbox, "flush", _drops_what_failed),
    _mutant("closed without asking the store", Merge, "_drain", _tells_before_it_takes_out),
    _mutant("a turn that nobody knows of is kept", Merge, "_renew", _renews_blindly),
    _mutant("what runs is given back after trouble", Merge, "_renew", _gives_everything_back),
    _mutant("turns in a row run side by side", Runner, "_run_plain", _run_side_by_side),
    _mutant("nobody is ever lost", MemoryTurnBook, "is_alive", _forget_who_fell),
    _mutant("a refused answer is committed", Runner, "_transact", _commits_what_is_refused, Grade.ATOMIC),
    _mutant("told without a commit", Runner, "_run_atomic", _tells_without_a_commit, Grade.ATOMIC),
    _mutant("all are told without a commit", Runner, "_transact_all", _shares_without_a_commit, Grade.ATOMIC),
    _mutant("a refused one is committed with others", Runner, "_transact_all", _shares_what_is_refused, Grade.ATOMIC),
    _mutant("what is unknown is undone", Runner, "_outcome", _takes_it_for_undone, Grade.ATOMIC),
    _mutant("what failed is kept", Runner, "_saved", _keeps_what_failed, Grade.ATOMIC),
)
