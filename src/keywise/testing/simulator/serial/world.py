"""One simulated merge queue: a few processes with callers, a store for their requests, and all that can go wrong."""

import asyncio
import contextvars
import inspect
import random
from collections import Counter
from typing import Any

import msgspec

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.serial import MemoryTurns
from keywise.adapters.memory.serial_book import Lines, lines_of
from keywise.core.entry import Claim
from keywise.core.events import Alarmed, Event
from keywise.core.serial.contract import Ending, Mode, Record, Switch, TurnPolicy
from keywise.core.sink import Grade
from keywise.core.transaction import Transaction
from keywise.serial.function import SerialFunction, Wiring, define
from keywise.testing.lossy_link import Session
from keywise.testing.simulator.serial.auditor import SerialAuditor
from keywise.testing.simulator.serial.faults import SLOW_MAX_S, SerialFaults, meet
from keywise.testing.simulator.serial.links import BROKEN, LinkedTurns
from keywise.testing.virtual_loop import Process, VirtualLoop, current_process

SAFETY_S = 70.0
LIVENESS_MAX_S = 200.0
TICK_S = 0.5
KEYS = ("a", "b", "c")
LEASE_S = 10.0
PAUSE_MAX_S = 25.0
JUMP_MAX_S = 15.0
OPTIONS = {
    "timeout": 20.0,
    "concurrency": 3,
    "lease": LEASE_S,
    "margin": 1.0,
    "attempts_max": 3,
    "backoff": 0.1,
    "backoff_max": 1.0,
    "poll": 0.5,
    "view": 2.0,
    "drain": 5.0,
}


class Ask(msgspec.Struct, frozen=True):
    """A call that somebody makes."""

    at: float
    id: str
    key: str
    timeout_s: float
    kind: str = "plain"
    nested: str | None = None
    """The key that is called from within."""
    gives_up_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"id": self.id, "key": self.key, "kind": self.kind, "nested": self.nested}


class SerialWorld:
    """All that exists in one run; everything random comes from its seed."""

    def __init__(self, seed: int, grade: Grade) -> None:
        self.rng = random.Random(f"merge {grade.value} {seed}")
        self.grade = grade
        self.loop = VirtualLoop()
        self.faults = SerialFaults(self.rng)
        self.store_ahead_s = 0.0
        self.is_down = False
        self.paces = {"run": self.rng.choice((0.005, 3.0)), "transaction": self.rng.choice((0.005, 30.0))}
        self.capacity = self.rng.choice((2, 50))
        self.database = MemoryDatabase(clock=self.store_now, rng=random.Random(self.rng.random()))
        self.lines: Lines = lines_of(self.database, "sim")
        self.turns = MemoryTurns(self.database, "sim", "operator", TurnPolicy(lease_s=LEASE_S))
        self.auditor = SerialAuditor(self)
        self.sessions: dict[Process, list[Session]] = {}
        self.functions: dict[Process, SerialFunction] = {}
        self.outside = contextvars.copy_context()
        self._asks = self._draw_asks()
        self._waiting: dict[tuple[Process, str], list[float]] = {}
        """Deadlines of callers, by the loop's clock."""
        self._callers: dict[asyncio.Task[Any], Process] = {}
        self._tries: Counter[str] = Counter()
        self._numbers = 0
        self._fallen: list[Process] = []

    def store_now(self) -> float:
        return 1000.0 + self.loop.time() + self.store_ahead_s

    def record(self, id: str) -> Record | None:
        name = self.lines.ids.get(id)
        return None if name is None else self.lines.records[name]

    def waits(self, process: Process, id: str) -> bool:
        return bool(self._waiting.get((process, id)))

    def deadline(self, process: Process, id: str) -> float:
        return max(self._waiting.get((process, id)) or [0.0])

    def is_in_line(self, process: Process, id: str) -> bool:
        """Whether it waits for its turn there, and for one caller."""
        record, owner = self.record(id), self.functions[process].owner
        is_waiting = record is not None and record.reply is None and record.token == 0
        is_its_own = record is not None and record.request.runner == owner
        return is_waiting and is_its_own and len(self._waiting.get((process, id), [])) == 1

    # The run.

    def run(self) -> None:
        """A phase with faults, then one without, in which everybody has to come to an end."""
        self.loop.set_exception_handler(self._surprise)
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self.loop.end()

    def _surprise(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.auditor.violate(f"an error that nobody handles: {context.get('exception') or context['message']!r}")

    async def _run(self) -> None:
        for _ in range(self.rng.randint(2, 4)):
            self._start()
        asking = asyncio.get_running_loop().create_task(self._ask_all())
        while self.loop.time() < SAFETY_S:
            await asyncio.sleep(TICK_S)
            self._disturb()
            self.auditor.tick()
        await asking
        self.faults.is_over, self.is_down = True, False
        for process in [process for process in self.functions if process.is_paused]:
            self.auditor.resumed(process)
            process.resume()
        deadline = self.loop.time() + LIVENESS_MAX_S
        while self._is_busy() and self.loop.time() < deadline:
            await asyncio.sleep(TICK_S)
            self.auditor.tick()
        if self._is_busy():
            self.auditor.violate(f"callers still wait: {[task.get_name() for task in self._callers]}")
        # What is on its way arrives, and is renewed or runs out.
        await asyncio.sleep(SLOW_MAX_S + LEASE_S)
        # Of those that are open: what a closed one held is free when its lease is over.
        owners = {function.owner for function in self.functions.values() if function._merge is not None}
        for key, hold in self.lines.holds.items():
            if hold.owner in owners:
                self.auditor.violate(f"{key} is held by {hold.owner}, which does not know of it")
        # The last look of whoever is left frees what the fallen held.
        self.store_ahead_s += LEASE_S + 1.0
        await self.turns.take(1000)
        self.auditor.judge()

    def _is_busy(self) -> bool:
        return any(not task.done() and not process.is_dead for task, process in self._callers.items())

    async def _ask_all(self) -> None:
        process: Process | None = None
        for ask in self._asks:
            await asyncio.sleep(wait_s := max(0.0, ask.at - self.loop.time()))
            awake = [process for process in self.functions if not process.is_paused]
            if awake and (wait_s or process not in awake or self.rng.random() < 0.2):
                process = self.rng.choice(awake)
            if awake and process is not None:
                self._callers[process.spawn(self._call(process, ask))] = process

    async def _call(self, process: Process, ask: Ask) -> None:
        deadline = self.loop.time() + ask.timeout_s
        deadlines = self._waiting.setdefault((process, ask.id), [])
        deadlines.append(deadline)
        calling = self.functions[process](ask.body, id=ask.id, timeout=ask.timeout_s)
        try:
            if ask.gives_up_s is not None:
                async with asyncio.timeout(ask.gives_up_s):
                    self.auditor.answered(process, ask, await calling, deadline)
            else:
                self.auditor.answered(process, ask, await calling, deadline)
        except TimeoutError:
            self.auditor.note(f"the caller of {ask.id} gives up")
        except Exception as error:
            self.auditor.answered(process, ask, error, deadline)
        finally:
            deadlines.remove(deadline)

    # Processes.

    def _start(self) -> None:
        self._numbers += 1
        process = Process(self.loop, f"p{self._numbers}")
        skew_s = self.rng.uniform(0.0, 1000.0)

        def connect(owner: str, policy: TurnPolicy) -> LinkedTurns:
            self._numbers += 1
            serial.owner = f"{process.name}-{self._numbers}"
            return LinkedTurns(self, process, MemoryTurns(self.database, "sim", serial.owner, policy))

        wiring = Wiring(
            observers=(self._observe,),
            clock=lambda: self.loop.time() + skew_s,
            rng=random.Random(self.rng.random()),
            connect=connect,
        )
        function = self._atomic(process) if self.grade is Grade.ATOMIC else self._plain(process)
        serial = define("sim", function, wiring, {"key": lambda request: request["key"], **OPTIONS, **self.paces})
        self.functions[process] = serial

    def _observe(self, event: Event) -> None:
        if isinstance(event, Alarmed) and BROKEN not in event.cause:
            self.auditor.violate(f"an alarm: {event.cause}")

    def _plain(self, process: Process) -> Any:
        async def decide(claim: Claim, request: dict[str, Any]) -> Any:
            id = request["id"]
            result: Any = None
            self.auditor.begins(process, claim, id)
            try:
                await self._work()
                meet(request["kind"], id, self._tries)
                if request["nested"] is not None:
                    inner = {"id": f"{id}.{claim.token}", "key": request["nested"], "kind": "plain", "nested": None}
                    await self._nested(process, inner)
                accepted = self.auditor.writes(claim, id)
                await self._work()
                result = {"id": id, "accepted": accepted}
            except BaseException as error:
                result = error
                raise
            finally:
                self.auditor.ends(process, claim, id, result)
            return result

        return decide

    async def _nested(self, process: Process, body: dict[str, Any]) -> None:
        deadlines = self._waiting.setdefault((process, body["id"]), [])
        deadlines.append(self.loop.time() + 5.0)
        try:
            await self.functions[process](body, id=body["id"], timeout=5.0)
        finally:
            deadlines.pop()

    def _atomic(self, process: Process) -> Any:
        async def decide(claim: Claim, request: dict[str, Any], transaction: Transaction) -> Any:
            id = request["id"]
            result: Any = None
            self.auditor.begins(process, claim, id)
            try:
                rows = self.database.table("schedule")
                number = sum(row["key"] == claim.key for row in rows.values())
                await self._work()
                meet(request["kind"], id, self._tries)
                accepted = number < self.capacity
                if accepted:
                    self.database.set(rows, id, {"key": claim.key, "n": number})
                await self._work()
                result = {"id": id, "accepted": accepted}
            except BaseException as error:
                result = error
                raise
            finally:
                self.auditor.ends(process, claim, id, result)
            return result

        return decide

    async def _work(self) -> None:
        process = current_process()
        assert process is not None, "functions run in processes"
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, 0.3), self.rng.uniform(0.0, 2.0))))
        self.meanwhile(process)
        await asyncio.sleep(0.0)

    # Trouble.

    def meanwhile(self, process: Process) -> None:
        """The worst moments to be stopped come more often than by chance."""
        rates, faults = self.faults.rates, self.faults
        if process.is_dead or process.is_paused:
            return
        if faults.happens("pause", rates.pause * 0.2):
            self._pause(process)
        elif faults.happens("crash", rates.crash * 0.2):
            self.loop.call_soon(self._kill, process, context=self.outside)

    def served(self) -> None:
        pass

    def _disturb(self) -> None:
        rates, faults = self.faults.rates, self.faults
        for process in list(self.functions):
            if process.is_paused:
                continue
            if faults.happens("crash", rates.crash):
                self._kill(process)
            elif faults.happens("pause", rates.pause):
                self._pause(process)
            elif faults.happens("closed app", rates.close):
                self.auditor.note(f"{process.name} closes its app")
                process.spawn(self.functions[process].close())
        if not self.is_down and faults.happens("outage", rates.outage):
            self._go_down()
        if faults.happens("clock jump", rates.jump):
            self.store_ahead_s += self.rng.uniform(1.0, JUMP_MAX_S)
            self.auditor.excused_until = self.loop.time() + LEASE_S + PAUSE_MAX_S
        if faults.happens("switch", rates.switch):
            self._operate(self._switch())
        if self.lines.waiting and faults.happens("cancel", rates.cancel):
            key, places = self.rng.choice(sorted(self.lines.waiting.items()))
            id = self.lines.records[key, self.rng.choice(sorted(places))].request.id
            self._operate(self.turns.withdraw([id], Ending.CANCELLED, "by an operator"))

    def _operate(self, act: Any) -> None:
        self.loop.create_task(act, context=self.outside.copy())

    async def _switch(self) -> None:
        mode, now = self.rng.choice((Mode.OBSERVE, Mode.ON)), self.store_now()
        keys = self.rng.choice((*KEYS, "*"))
        self.auditor.note(f"{keys} is switched to {mode}")
        await self.turns.switch(Switch(keys=keys, mode=mode, is_pattern=keys == "*", at=now))

    def _go_down(self) -> None:
        self.is_down = True
        self.auditor.note("the store is down")

        def come_back() -> None:
            self.is_down = False
            self.auditor.note("the store is back")

        self.loop.call_later(self.rng.uniform(0.5, 20.0), come_back, context=self.outside)

    def _pause(self, process: Process) -> None:
        process.pause()
        self.auditor.paused(process)
        self.auditor.note(f"{process.name} is stopped")

        def resume() -> None:
            if not process.is_dead and process.is_paused:
                self.auditor.resumed(process)
                self.auditor.note(f"{process.name} goes on")
                process.resume()

        pause_s = self.rng.uniform(self.rng.choice((0.5, LEASE_S + 1.0)), PAUSE_MAX_S)
        self.loop.call_later(pause_s, resume, context=self.outside)

    def _kill(self, process: Process) -> None:
        if process.is_dead:
            return
        process.kill()
        for task in [task for task, owner in self._callers.items() if owner is process]:
            calling: Any = task.get_coro()
            if inspect.getcoroutinestate(calling) == inspect.CORO_CREATED:
                calling.close()  # It was going to begin.
        self._fallen.append(process)
        self.auditor.note(f"{process.name} is killed")
        self.functions.pop(process, None)
        for session in self.sessions.pop(process, []):
            session.end()
        self.loop.call_later(self.rng.uniform(0.1, 5.0), self._start, context=self.outside)

    # Callers.

    def _draw_asks(self) -> list[Ask]:
        asks: list[Ask] = []
        at, faults = 0.5, self.faults
        for number in range(self.rng.randint(20, 80)):
            # Some come together, so that turns of several keys are given together.
            at += self.rng.expovariate(1.0) if self.rng.random() < 0.5 else 0.0
            if at > SAFETY_S - 5.0:
                break
            if asks and faults.happens("same id twice", faults.rates.same):
                first = self.rng.choice(asks[-5:])
                at = at if self.rng.random() < 0.5 else asks[-1].at
                asks.append(msgspec.structs.replace(first, at=max(at, asks[-1].at), timeout_s=self._timeout_s()))
            else:
                asks.append(self._ask(at, f"r{number}"))
        return asks

    def _ask(self, at: float, id: str) -> Ask:
        faults, key = self.faults, self.rng.choice(KEYS)
        kinds = [("failing", "failing call"), ("passing", "passing trouble"), ("unknown", "unknown outcome")]
        kinds.append(("cancelled", "cancelled call"))
        kind = next((kind for kind, told in kinds if faults.happens(told, getattr(faults.rates, kind))), "plain")
        nested = None
        if self.grade is Grade.PLAIN and faults.happens("nested call", faults.rates.nested):
            nested = self.rng.choice(KEYS)
        gives_up = self.rng.uniform(0.0, 6.0) if faults.happens("caller that gives up", faults.rates.gives_up) else None
        return Ask(at, id, key, self._timeout_s(), kind, nested, gives_up)

    def _timeout_s(self) -> float:
        if self.faults.happens("impatient caller", self.faults.rates.impatient):
            return self.rng.uniform(0.1, 4.0)
        return self.rng.uniform(10.0, 40.0)
