"""Runs granted requests one after another, within their deadlines, and returns how each ended."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeAlias

from keywise.core.backoff import backoff_s
from keywise.core.entry import Claim
from keywise.core.errors import OutcomeUnknownError, TransientError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.serial.contract import Ending, Reply
from keywise.core.serial.rules import TOO_LATE
from keywise.core.settings import SerialSettings
from keywise.core.transaction_context import open_transactions, transaction_of
from keywise.serial.codec import Serial
from keywise.serial.grants import Bundle, Due, Held, company, known_or, reply_to
from keywise.serial.threads import Threads

RUN_MAX = 256
ALONE_S = 30.0
"""For so long no transaction is shared after one that was shared had trouble."""

NOT_BEGUN = "its turn was lost before it began"
BROKEN_OFF = "its run was ended in the middle of it"

Tell: TypeAlias = Callable[[Sequence[Reply], bool], None]
"""Takes replies, and whether they are stored already."""

within: ContextVar[tuple[int, ...]] = ContextVar("within", default=())
"""The tokens of the turns that the running code holds, the outermost first."""


class Runner:
    """Calls the function, and makes replies out of what it does."""

    def __init__(self, serial: Serial, turns: Any, settings: SerialSettings, rng: random.Random) -> None:
        self._serial = serial
        self._turns = turns
        self._settings = settings
        self._rng = rng
        self._threads = Threads(settings.concurrency)
        self._run_s = settings.transaction_s if serial.is_atomic else settings.run_s
        self._pace_s = self._run_s / (2 if serial.is_atomic else 1)
        self._is_alone = not serial.is_atomic
        self._alone_until = 0.0

    @property
    def run_max(self) -> int:
        """How many turns are run one after another."""
        return max(1, min(RUN_MAX, int(self._run_s / max(self._pace_s, 1e-9))))

    @property
    def bundle_max(self) -> int:
        """How many turns of several keys are run one after another."""
        is_alone = self._is_alone or asyncio.get_running_loop().time() < self._alone_until
        return 1 if is_alone else self.run_max

    def bundles(self, helds: Sequence[Held]) -> list[Bundle]:
        """Bundles of about the same size; tokens stay in their order."""
        turns = sum(held.unanswered for held in helds)
        size = math.ceil(turns / max(1, math.ceil(turns / self.bundle_max)))
        bundles: list[list[Held]] = []
        room = 0
        for held in helds:
            if held.unanswered > room:
                bundles.append([])
                room = size
            bundles[-1].append(held)
            room -= held.unanswered
        return [Bundle(bundle) for bundle in bundles]

    async def run(self, bundle: Bundle, tell: Tell) -> None:
        """Run the turns of each token in their order. There is a reply to each, told as soon as it is known."""
        # The context is that of whoever called first.
        open_transactions.set(())
        try:
            await self._run_all(bundle, tell)
        finally:
            # Whatever broke it off: a turn that nobody answers would hold its key for as long as this process lives.
            bundle.over.set()
            for held in bundle.helds:
                while held.left:
                    tell([self._broken_off(held.left.popleft())], False)

    async def _run_all(self, bundle: Bundle, tell: Tell) -> None:
        if len(bundle.helds) > 1:
            await self._run_together(bundle, tell)
        bundle.over.set()
        first, *others = [held for held in bundle.helds if held.left] or bundle.helds[:1]
        if not others:
            return await self._run(first, first.left, tell)
        async with asyncio.TaskGroup() as apart:
            # Side by side: in a call from within, one may wait for another.
            for held in (first, *others):
                apart.create_task(self._run(held, held.left, tell))

    async def _run(self, held: Held, left: deque[Due], tell: Tell) -> None:
        cause = NOT_BEGUN
        try:
            if self._serial.is_atomic:
                await self._run_atomic(held, left, tell)
            else:
                await self._run_plain(held, left, tell)
        except Exception as error:
            cause = cause_of_error(error)
        while left:
            tell([known_or(left.popleft(), Ending.EXPIRED if cause is NOT_BEGUN else Ending.FAILED, cause)], False)

    async def _run_plain(self, held: Held, left: deque[Due], tell: Tell) -> None:
        while left and held.may_begin():
            due = left.popleft()
            reply: Reply | None = None
            try:
                reply = await self._tried(held, due)
            finally:
                tell([self._broken_off(due) if reply is None else reply], False)

    async def run_off(self, key: str, argument: Any) -> Any:
        """Call the function without a turn."""
        claim = Claim(key, None, False, 0)
        if not self._serial.is_atomic:
            return await self._called(claim, argument, None)
        async with transaction_of(self._turns.database, self._turns.transaction()) as transaction:
            return await self._called(claim, argument, transaction)

    def close(self) -> None:
        self._threads.close()

    async def _tried(self, held: Held, due: Due) -> Reply:
        """Try until it is known what came of it, or until its deadline."""
        loop = asyncio.get_running_loop()
        for attempts in range(1, self._settings.attempts_max + 1):
            if attempts == 1 and (gone := due.departure()) is not None:
                return gone
            reply = await self._outcome(held, due, None)
            due.is_running = False
            if isinstance(reply, Reply):
                return reply
            wait_s = backoff_s(attempts, self._settings.backoff_s, self._settings.backoff_max_s, self._rng)
            if attempts == self._settings.attempts_max or loop.time() + wait_s >= due.until:
                return reply_to(due, Ending.FAILED, reply)
            await asyncio.sleep(wait_s)
            if loop.time() >= due.until or not held.may_begin():
                return reply_to(due, Ending.FAILED, reply)
        raise AssertionError("the last attempt has a reply")

    async def _outcome(self, held: Held, due: Due, transaction: Any) -> Reply | str:
        """The reply, or the cause of a failure after which nothing has happened, and which may pass."""
        turn = due.turn
        claim = Claim(turn.request.key, None, False, turn.token, turn.attempts)
        began = asyncio.get_running_loop().time()
        # Of this task alone, which ends with the run.
        within.set((*turn.request.within, turn.token))
        due.is_running = self._serial.is_async
        held.timeout = asyncio.timeout_at(due.until)
        try:
            async with held.timeout:
                argument = due.argument if due.argument is not None else self._serial.request_of(turn.request.body)
                result = await self._called(claim, argument, transaction, due)
            body = self._serial.result_body(result)
            return Reply(id=turn.request.id, outcome=Ending.DONE, body=body, token=turn.token)
        except (TransientError, UnavailableError) as error:
            return cause_of_error(error)
        except TimeoutError as error:
            if not held.timeout.expired():
                return reply_to(due, Ending.FAILED, cause_of_error(error))
            if not due.is_running:
                return reply_to(due, Ending.EXPIRED, NOT_BEGUN if held.is_lost else TOO_LATE)
            cause = "its turn was lost" if held.is_lost else "its deadline passed in the middle of it"
            if transaction is not None:
                return reply_to(due, Ending.EXPIRED, f"{cause}; nothing of it happened")
            return reply_to(due, Ending.LOST, cause)
        except OutcomeUnknownError as error:
            # Not even if what it wrote in a transaction is undone.
            due.verdict = reply_to(due, Ending.LOST, cause_of_error(error))
            return due.verdict
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            # Else the function was not cancelled, but awaited something that was.
            return reply_to(due, Ending.FAILED, cause_of_error(error))
        finally:
            held.timeout = None
            self._time(asyncio.get_running_loop().time() - began)

    def _broken_off(self, due: Due) -> Reply:
        """For one whose run was ended together with the task that it ran in."""
        if not due.is_running:
            return due.verdict or reply_to(due, Ending.EXPIRED, NOT_BEGUN)
        if self._serial.is_atomic:
            # Asked for again it might end the next run in the same way.
            return reply_to(due, Ending.FAILED, f"{BROKEN_OFF}; nothing of it happened")
        return reply_to(due, Ending.LOST, BROKEN_OFF)

    def _time(self, took_s: float) -> None:
        self._pace_s += 0.1 * (took_s - self._pace_s)
        if not self._serial.is_atomic:
            # One slow call shows that calls can be slow, and if this process dies, those behind it are lost.
            self._pace_s = max(took_s, self._pace_s)

    async def _called(self, claim: Claim, argument: Any, transaction: Any, due: Due | None = None) -> Any:
        if self._serial.is_async:
            return await self._serial.call(claim, argument, transaction)

        def call() -> Any:
            if due is not None:
                due.is_running = True
            return self._serial.call(claim, argument)

        return await self._threads.run(call)

    # In the store's own transaction.

    async def _run_together(self, bundle: Bundle, tell: Tell) -> None:
        """All in one transaction. If anything but a function fails, each token is left to be run alone."""
        replies: list[Reply] = []
        company.set(bundle)
        try:
            await self._transact_all(bundle, replies)
        except OutcomeUnknownError as error:
            return _lose_all(bundle.helds, error, tell)
        except Exception:
            # Its cause comes up again if it stays. Those who share a transaction may be in each other's way.
            self._is_alone = self._is_alone or bundle.is_parted
            self._alone_until = asyncio.get_running_loop().time() + ALONE_S
            return
        finally:
            company.set(None)
        ids = {reply.id for reply in replies}
        for held in bundle.helds:
            held.left = deque(due for due in held.left if due.turn.request.id not in ids)
        tell(replies, True)

    async def _transact_all(self, bundle: Bundle, replies: list[Reply]) -> None:
        """Fills in the replies that stand. One that has to be tried again has none, nor have those behind it."""
        opening = self._turns.transaction(*(held.token for held in bundle.helds))
        async with transaction_of(self._turns.database, opening) as transaction:
            for held in bundle.helds:
                for due in held.left:
                    if not held.may_begin():
                        raise _RefusedError
                    reply = due.departure() or await self._saved(held, due, transaction)
                    if bundle.is_parted:
                        raise _RefusedError
                    if isinstance(reply, str):
                        break
                    replies.append(reply)
            if any(held.is_lost for held in bundle.helds) or (await transaction.answer(replies)).refused:
                raise _RefusedError

    async def _run_atomic(self, held: Held, left: deque[Due], tell: Tell) -> None:
        """As many as possible in one transaction. After a failure that may pass the rest is tried again."""
        vain, at_once = 0, len(left)
        while left and held.may_begin():
            replies: list[Reply] = []
            ending = Ending.FAILED
            try:
                cause = await self._transact(held, islice(left, at_once), replies)
            except _RefusedError:
                return
            except UnavailableError as error:
                # The commit may have arrived: then the next one is refused, and nothing is done twice.
                cause, ending = cause_of_error(error), Ending.EXPIRED
                replies.clear()
            except OutcomeUnknownError as error:
                return _lose_all([held], error, tell)
            except Exception as error:
                # One of them has spoilt the transaction for all: which one, is seen if each has its own.
                if at_once == 1:
                    tell([known_or(left.popleft(), Ending.FAILED, cause_of_error(error))], False)
                at_once = 1
                continue
            vain = 0 if replies else vain + 1
            for _ in replies:
                left.popleft()
            # They were committed with the work.
            tell(replies, True)
            if cause and left and not await self._may_retry(left[0], vain):
                tell([known_or(left.popleft(), ending, cause)], False)
                vain = 0

    async def _transact(self, held: Held, dues: Iterable[Due], replies: list[Reply]) -> str:
        """Fills in the replies that stand; returns the cause if the next one has to be tried again."""
        cause = ""
        async with transaction_of(self._turns.database, self._turns.transaction(held.token)) as transaction:
            for due in dues:
                # It may have waited for long until the transaction began.
                if not held.may_begin():
                    raise _RefusedError
                reply = due.departure() or await self._saved(held, due, transaction)
                if held.is_lost:
                    raise _RefusedError
                if isinstance(reply, str):
                    cause = reply
                    break
                replies.append(reply)
            if (await transaction.answer(replies)).refused:
                raise _RefusedError
        return cause

    async def _saved(self, held: Held, due: Due, transaction: Any) -> Reply | str:
        """What fails is undone alone."""
        try:
            async with transaction.savepoint():
                reply = await self._outcome(held, due, transaction)
                due.is_running = False
                if isinstance(reply, str) or reply.outcome is not Ending.DONE:
                    raise _UndoneError(reply)
                return reply
        except _UndoneError as undone:
            return undone.reply

    async def _may_retry(self, due: Due, vain: int) -> bool:
        if vain >= self._settings.attempts_max:
            return False
        wait_s = backoff_s(max(1, vain), self._settings.backoff_s, self._settings.backoff_max_s, self._rng)
        if asyncio.get_running_loop().time() + wait_s >= due.until:
            return False
        await asyncio.sleep(wait_s)
        return True


class _RefusedError(Exception):
    """The turn is somebody else's, or its work is done: the transaction is rolled back."""


class _UndoneError(Exception):
    """What a request wrote is rolled back, and the rest of the transaction stays."""

    def __init__(self, reply: Reply | str) -> None:
        super().__init__()
        self.reply = reply


def _lose_all(helds: Sequence[Held], error: OutcomeUnknownError, tell: Tell) -> None:
    """One of them has ended the transaction by itself: what the others did in it may stand, and is not done again."""
    for held in helds:
        while held.left:
            tell([reply_to(held.left.popleft(), Ending.LOST, cause_of_error(error))], False)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
