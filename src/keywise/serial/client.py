"""The serial functions of one process at work: sends requests to the store, runs granted ones, and returns answers.

One call to the store at a time carries all that has come together since the last one: answers, new requests, and how
many turns can be run. There is no timer for batches.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from keywise.core.backoff import backoff_s
from keywise.core.errors import UnansweredError, UnavailableError
from keywise.core.events import Alarmed, CallRefused, Overlapped, SessionLost, TurnLost
from keywise.core.failures import cause_of_error
from keywise.core.serial.contract import Ending, Mode, Reply, Request, Turn
from keywise.core.settings import SerialSettings
from keywise.serial import pending as calls
from keywise.serial.grants import Due, Held, Holds
from keywise.serial.lease import Pulse
from keywise.serial.outbox import Outbox, Sending, withdraw_all
from keywise.serial.pending import Call, Scene, storing_s
from keywise.serial.runner import Runner
from keywise.serial.watcher import Listener


class Merge:
    """All callers of one serial function in this process, and what is run for them."""

    def __init__(self, turns: Any, runner: Runner, settings: SerialSettings, scene: Scene) -> None:
        self._turns = turns
        self._runner = runner
        self._settings = settings
        self._name = scene.name
        self._clock, self._rng, self._emit = scene.clock, scene.rng, scene.emit
        self._calls: dict[str, Call] = {}
        self._gone: dict[str, None] = {}
        """Ids that nobody waits for any more."""
        self._running: set[str] = set()
        """Ids of calls that have their turn here."""
        self._outbox = Outbox()
        self._held = Holds(settings.concurrency)
        self._runs: dict[asyncio.Task[None], None] = {}
        self._bell = asyncio.Event()
        self._pulse = Pulse(settings, scene.clock, lambda: self._held.lose(self._held.tokens()), self._fall_due)
        self._listener = Listener(turns, settings.poll_s, self._hear, self._alarm)
        self._looks = False
        """There may be a turn for this process."""
        self._reads = False
        """There may be a reply that somebody else made."""
        self._read_at = 0.0
        self._is_renewal_due = self._has_doubts = False
        self._is_closing = self._serves = self._is_apart = False
        self._losses = 0
        """Of sessions with locks, as far as they were told."""
        self._tasks: list[asyncio.Task[None]] = []
        self._pruned_at = self._clock()
        self.runs_own = not getattr(turns, "is_shared", False)
        """Requests are run by the process that asks for them."""
        self.works = self.runs_own
        """This process runs requests."""

    # Callers.

    async def call(self, request: Request, argument: Any, deadline: float) -> Reply:
        """Wait for the reply until the deadline, by the loop's clock."""
        loop = asyncio.get_running_loop()
        call = self._calls.get(request.id)
        if call is None and self._is_closing:
            return calls.unasked(request)
        if call is None:
            call = self._calls[request.id] = self._outbox.new[request.id] = Call(request, argument, loop.time())
            # An earlier one that was not taken out yet is in the store still.
            call.is_asked = request.id in self._gone
        elif (call.request.key, call.request.body) != (request.key, request.body):
            return calls.clash(request)
        call.deadline = max(call.deadline, deadline)
        self._gone.pop(request.id, None)
        future: asyncio.Future[Reply] = loop.create_future()
        call.futures.append(future)
        self._outbox.join(call, request, future, deadline)
        self._bell.set()
        try:
            with self._held.resting(request.within):
                return await self._awaited(call, future, deadline)
        finally:
            call.futures.remove(future)
            if not call.futures:
                self._leave(call)

    async def _awaited(self, call: Call, future: "asyncio.Future[Reply]", deadline: float) -> Reply:
        try:
            async with asyncio.timeout_at(deadline - storing_s(call, deadline)):
                return await asyncio.shield(future)
        except TimeoutError:
            if not call.is_asked:
                return calls.expired(call)
        if deadline >= call.deadline and not call.is_running:
            # It may run somewhere else, for another caller. If it does not, the store says so.
            self._gone[call.request.id] = None
            self._bell.set()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(future)
        # Its reply may have come in the very moment of the deadline.
        if future.done():
            return future.result()
        raise calls.unanswered(self._name, call)

    def _leave(self, call: Call) -> None:
        """Nobody waits for it any more. What runs is run to its end."""
        id = call.request.id
        if call.is_running or self._calls.get(id) is not call:
            return
        del self._calls[id]
        self._outbox.new.pop(id, None)
        if call.is_asked:
            self._gone[id] = None
            self._bell.set()

    # The flow.

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work()) for work in (self._flow, self._listener.run, self._pulse.run)]

    def serve(self) -> None:
        """Run whatever may be run here, without callers of its own too."""
        self.works = self._serves = self._looks = True
        self._listener.want(True)
        self._bell.set()

    async def close(self) -> None:
        """Take no more, let what runs come to its end, and take out what waits."""
        self._is_closing = True
        await self._drain(self._settings.drain_s)
        for run in self._runs:
            run.cancel()
        await self._drain(calls.GRACE_S)
        # A second time only now: what a thread runs still must not be answered before.
        await calls.end_all([*self._tasks, *self._runs])
        for call in list(self._calls.values()):
            self._give_up(call, calls.unanswered(self._name, call, "when its app was closed"))
        self._runner.close()

    async def _drain(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + patience_s
        while (self._held or self._calls or self._outbox.replies or self._gone) and loop.time() < ends:
            for call in [call for call in self._calls.values() if not call.is_running]:
                if call.is_asked:
                    self._gone[call.request.id] = None
                else:
                    self._end(call, calls.unasked(call.request))
            self._bell.set()
            await asyncio.wait(self._runs or self._tasks, timeout=calls.OUTAGE_S, return_when="FIRST_COMPLETED")

    async def _flow(self) -> None:
        vain = 0
        while True:
            await self._bell.wait()
            self._bell.clear()
            try:
                while self._has_work():
                    await self._step()
                    vain = 0
            except Exception as error:
                vain += 1
                # What is not known now is looked at again after the renewal.
                self._has_doubts = self._is_renewal_due = True
                self._alarm(error)
                await asyncio.sleep(backoff_s(vain, calls.OUTAGE_S, calls.OUTAGE_MAX_S, self._rng))
                self._bell.set()

    def _alarm(self, error: Exception) -> None:
        """Whatever it is, callers wait: only a person can put it right, and then it goes on."""
        if not isinstance(error, UnavailableError):
            self._emit(Alarmed(pipeline=self._name, cause=cause_of_error(error), advice=calls.ADVICE))

    def _has_work(self) -> bool:
        return bool(self._gone or self._is_renewal_due or self._reads or self._has_exchange())

    def _has_exchange(self) -> bool:
        return bool(self._outbox or (self._looks and self._slots() > 0))

    async def _step(self) -> None:
        if self._is_renewal_due:
            await self._renew()
        if self._gone:
            await self._withdraw()
        if self._has_exchange():
            await self._exchange()
        if self._reads:
            await self._read()
        if self._clock() - self._pruned_at > calls.PRUNE_S:
            self._pruned_at = self._clock()
            await self._turns.operator.prune(self._settings.retention_s)

    async def _exchange(self) -> None:
        """Store answers, ask for what is new, and take turns: one call to the store."""
        limit = self._slots(self._outbox.replies) * self._runner.bundle_max
        if not self._outbox.is_apart:
            self._looks = False
            return await self._outbox.flush(limit, self._send)
        for call, error in await self._outbox.flush_apart(self._send):
            self._give_up(call, calls.unsent(self._name, call, error))
        self._looks = True

    async def _send(self, sending: Sending) -> None:
        sent_at, requests = self._clock(), sending.requests()
        answered = await self._turns.answer(sending.replies, sending.limit, self._runner.run_max, requests)
        self._pulse.heard_at = sent_at
        self._settle(sending.replies, answered.refused)
        for call, answer in zip(sending.asked, answered.answers, strict=True):
            self._asked(call, answer, sending.began)
        self._start_all(answered.turns, sending.began)
        # With all that were wished for, there may be more.
        self._looks = self._looks or len(answered.turns) >= sending.limit
        self._listener.want(bool(self._calls or self._serves))

    def _give_up(self, call: Call, error: UnansweredError) -> None:
        """Nothing can be said of it; if the store knows of it, it is taken out."""
        self._forget(call)
        self._gone[call.request.id] = None
        for future in call.futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # Whoever was cancelled meanwhile does not look at it.

    def _slots(self, replies: Sequence[Reply] = ()) -> int:
        """How many bundles of turns can be run besides, once these replies are stored."""
        return 0 if self._is_closing or not self.works else self._held.free(replies)

    def _settle(self, replies: Sequence[Reply], refused: Sequence[str]) -> None:
        lost = set(refused)
        for reply in replies:
            self._held.end(reply.token)
            call = self._calls.get(reply.id)
            if call is None:
                continue
            if reply.id in lost:
                self._lost(call)
            elif reply.outcome is Ending.EXPIRED:
                self._stop(call)
                self._replied(call, reply)
            else:
                self._end(call, reply)

    def _lost(self, call: Call) -> None:
        """Somebody else says what became of it, or gives it another turn."""
        self._stop(call)
        self._reads = True
        self._read_at = 0.0
        self._emit(TurnLost(pipeline=self._name, key=call.request.key))
        if not call.futures:
            self._leave(call)

    def _asked(self, call: Call, answer: Reply | Turn | None, began: float) -> None:
        if isinstance(answer, Turn):
            if answer.overlaps:
                self._emit(Overlapped(pipeline=self._name, key=call.request.key, overlaps=answer.overlaps))
            self._start_all([answer], began)
        elif answer is not None:
            self._replied(call, answer)

    def _replied(self, call: Call, reply: Reply) -> None:
        """What the store says to a request that waits."""
        loop = asyncio.get_running_loop()
        may_run = reply.outcome is Ending.EXPIRED and not self._is_closing
        if reply.outcome is Ending.SWITCHED and reply.cause != Mode.OFF:
            call.request = replace(call.request, mode=Mode(reply.cause))
            self._ask_again(call)
        elif may_run and (wait_s := calls.pause_s(call, loop.time(), self._rng)) is not None:
            # It was somebody else's deadline, or this process was taken for lost: it never ran.
            call.again, call.is_asked = call.again + 1, False
            loop.call_later(wait_s, self._ask_again, call)
        else:
            if reply.outcome is Ending.REFUSED:
                self._emit(CallRefused(pipeline=self._name, key=call.request.key, cause=reply.cause))
            self._end(call, reply)

    def _ask_again(self, call: Call) -> None:
        if self._calls.get(call.request.id) is call:
            self._outbox.new[call.request.id] = call
            self._bell.set()

    def _stop(self, call: Call) -> None:
        call.is_running = False
        self._running.discard(call.request.id)

    def _end(self, call: Call, reply: Reply) -> None:
        self._forget(call)
        self._emit(calls.ended_event(self._name, call, reply, asyncio.get_running_loop().time()))
        for future in call.futures:
            if not future.done():
                future.set_result(reply)

    def _forget(self, call: Call) -> None:
        """Its callers may be gone, and others may wait for the same id in a call of their own."""
        id = call.request.id
        if self._calls.get(id) is call:
            self._running.discard(id)
            del self._calls[id]
            self._outbox.new.pop(id, None)

    # Turns.

    def _start_all(self, turns: Sequence[Turn], began: float) -> None:
        runs: dict[int, list[Due]] = {}
        for turn in turns:
            runs.setdefault(turn.token, []).append(self._due(turn, began))
        for bundle in self._runner.bundles([Held(dues, self._pulse.left_s) for dues in runs.values()]):
            self._held.add(bundle)
            task = asyncio.get_running_loop().create_task(self._runner.run(bundle, self._tell))
            self._runs[task] = None
            task.add_done_callback(lambda run: self._runs.pop(run, None))

    def _due(self, turn: Turn, began: float) -> Due:
        """Until when it may run: by the deadline of whoever waits here, or by what the store said."""
        call = self._calls.get(turn.request.id)
        if call is None:
            return Due(turn, None, began + turn.left_s, lambda: not self.runs_own)
        call.is_running, call.began_at = True, asyncio.get_running_loop().time()
        self._running.add(call.request.id)
        until = call.deadline - storing_s(call, call.deadline)
        return Due(turn, call.argument, until, lambda: bool(call.futures))

    def _tell(self, replies: Sequence[Reply], are_stored: bool) -> None:
        if are_stored:
            self._settle(replies, ())
            # Whoever waits may have a turn now.
            self._looks = self._looks or self._serves or len(self._calls) > len(self._outbox.new) + len(self._running)
        else:
            self._outbox.replies += replies
        self._bell.set()

    # Being alive.

    async def _renew(self) -> None:
        before = None
        if self._has_doubts:
            # A call whose answer was lost may have given turns that nobody here knows of. A renewal that arrives late
            # must not touch what was taken after it, so that it says which moment it is about.
            before = await self._turns.operator.now()
        sent_at, tokens = self._clock(), self._held.tokens()
        lost = await self._turns.renew(tokens, before)
        self._pulse.heard_at = self._pulse.renewed_at = sent_at
        self._is_renewal_due = False
        if before is not None:
            self._has_doubts = False
            self._looks = True
        self._held.lose(lost)

    def _fall_due(self) -> None:
        if self._held or self._calls or self._serves:
            self._is_renewal_due = True
            self._bell.set()

    def _hear(self, losses: int) -> None:
        """Others have done something. A store whose locks went with their session knows which turns had them."""
        self._looks = self._reads = True
        if losses > self._losses:
            self._losses, self._is_renewal_due = losses, True
            self._emit(SessionLost(pipeline=self._name, losses=losses))
        self._bell.set()

    async def _read(self) -> None:
        """Replies that others made: of joined requests, of cancelled ones, of those that were lost."""
        self._reads = False
        now = asyncio.get_running_loop().time()
        if self.runs_own and now - self._read_at < calls.REPLIES_S:
            return
        self._read_at = now
        waiting = [id for id, call in self._calls.items() if call.is_asked and not call.is_running]
        if not waiting:
            return
        sent_at = self._clock()
        found = await self._turns.replies(waiting)
        self._pulse.heard_at = sent_at
        for id, reply in found.items():
            if (call := self._calls.get(id)) is not None and not call.is_running and id not in self._outbox.new:
                self._replied(call, reply)

    async def _withdraw(self) -> None:
        gone = list(self._gone)
        ended = await withdraw_all(self._turns, gone, self._alarm)
        for id in gone:
            self._gone.pop(id, None)
            call = self._calls.get(id)
            if call is None or id in self._outbox.new:
                continue
            if id in ended:
                # Whoever joined meanwhile has more patience.
                self._replied(call, calls.closed(call.request) if self._is_closing else calls.expired(call))
            else:
                self._reads, self._read_at = True, 0.0
