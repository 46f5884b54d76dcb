"""One simulated merge queue: a few processes with callers, a store for their requests, and all that can go wrong."""

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Coroutine
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
from keywise.testing.simulated_world import PAUSE_MAX_S, SimulatedWorld
from keywise.testing.simulator.serial.auditor import SerialAuditor
from keywise.testing.simulator.serial.faults import SLOW_MAX_S, SerialFaults, meet
from keywise.testing.simulator.serial.links import BROKEN, LinkedTurns
from keywise.testing.virtual_loop import Process, current_process

SAFETY_S = 70.0
LIVENESS_MAX_S = 200.0
KEYS = ("a", "b", "c")
LEASE_S = 10.0
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


class SerialWorld(SimulatedWorld):
    """A merge queue: a few processes with callers, and a store for their requests."""

    processes = (2, 4)
    process_name = "p{}"
    restart_max_s = 5.0
    pause_long_s = LEASE_S + 1.0
    crash_share = 0.2
    faults_s = SAFETY_S
    rest_max_s = LIVENESS_MAX_S
    tick_s = 0.5
    faults: SerialFaults
    auditor: SerialAuditor
    workers: dict[Process, SerialFunction]

    def __init__(self, seed: int, grade: Grade) -> None:
        super().__init__(f"merge {grade.value} {seed}")
        self.grade = grade
        self.faults = SerialFaults(self.rng)
        self._down_until = 0.0
        self.paces = {"run": self.rng.choice((0.005, 3.0)), "transaction": self.rng.choice((0.005, 30.0))}
        self.capacity = self.rng.choice((2, 50))
        self.database = MemoryDatabase(clock=self.store_now, rng=random.Random(self.rng.random()))
        self.lines: Lines = lines_of(self.database, "sim")
        self.turns = MemoryTurns(self.database, "sim", "operator", TurnPolicy(lease_s=LEASE_S))
        self.auditor = SerialAuditor(self)
        self._asks = self._draw_asks()
        self._waiting: dict[tuple[Process, str], list[float]] = {}
        """Deadlines of callers, by the loop's clock."""
        self._callers: dict[asyncio.Task[Any], Process] = {}
        self._tries: Counter[str] = Counter()
        self._owners = 0

    def is_down(self) -> bool:
        return self.now() < self._down_until and not self.faults.is_over

    def record(self, id: str) -> Record | None:
        name = self.lines.ids.get(id)
        return None if name is None else self.lines.records[name]

    def waits(self, process: Process, id: str) -> bool:
        return bool(self._waiting.get((process, id)))

    def deadline(self, process: Process, id: str) -> float:
        return max(self._waiting.get((process, id)) or [0.0])

    def is_in_line(self, process: Process, id: str) -> bool:
        """Whether it waits for its turn there, and for one caller."""
        record, owner = self.record(id), self.workers[process].owner
        is_waiting = record is not None and record.reply is None and record.token == 0
        is_its_own = record is not None and record.request.runner == owner
        return is_waiting and is_its_own and len(self._waiting.get((process, id), [])) == 1

    # The run.

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._ask_all()]

    def tick(self) -> None:
        self.auditor.tick()

    def is_at_rest(self) -> bool:
        return all(task.done() or process.is_dead for task, process in self._callers.items())

    async def check_end(self) -> None:
        if not self.is_at_rest():
            self.violate(f"callers still wait: {[task.get_name() for task in self._callers]}")
        # What is on its way arrives, and is renewed or runs out.
        await asyncio.sleep(SLOW_MAX_S + LEASE_S)
        # Of those that are open: what a closed one held is free when its lease is over.
        owners = {function.owner for function in self.workers.values() if function._merge is not None}
        for key, hold in self.lines.holds.items():
            if hold.owner in owners:
                self.violate(f"{key} is held by {hold.owner}, which does not know of it")
        # The last look of a process that is left frees what the fallen held.
        self.store_ahead_s += LEASE_S + 1.0
        await self.turns.take(1000)
        self.auditor.judge()

    async def _ask_all(self) -> None:
        process: Process | None = None
        for ask in self._asks:
            await asyncio.sleep(wait_s := max(0.0, ask.at - self.now()))
            awake = [process for process in self.workers if not process.is_paused]
            if awake and (wait_s or process not in awake or self.rng.random() < 0.2):
                process = self.rng.choice(awake)
            if awake and process is not None:
                self._callers[process.spawn(self._call(process, ask))] = process

    async def _call(self, process: Process, ask: Ask) -> None:
        deadline = self.now() + ask.timeout_s
        deadlines = self._waiting.setdefault((process, ask.id), [])
        deadlines.append(deadline)
        calling = self.workers[process](ask.body, id=ask.id, timeout=ask.timeout_s)
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

    def begin(self, process: Process) -> None:
        skew_s = self.rng.uniform(0.0, 1000.0)

        def connect(owner: str, policy: TurnPolicy) -> LinkedTurns:
            self._owners += 1
            serial.owner = f"{process.name}-{self._owners}"
            return LinkedTurns(self, process, MemoryTurns(self.database, "sim", serial.owner, policy))

        wiring = Wiring(
            observers=(self._observe,),
            clock=lambda: self.now() + skew_s,
            rng=random.Random(self.rng.random()),
            connect=connect,
        )
        function = self._atomic(process) if self.grade is Grade.ATOMIC else self._plain(process)
        serial = define("sim", function, wiring, {"key": lambda request: request["key"], **OPTIONS, **self.paces})
        self.workers[process] = serial

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
        deadlines.append(self.now() + 5.0)
        try:
            await self.workers[process](body, id=body["id"], timeout=5.0)
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

    def disturb(self) -> None:
        rates, faults = self.faults.rates, self.faults
        self.disturb_processes("closed app", rates.close, self._close)
        if not self.is_down() and faults.happens("outage", rates.outage):
            self._down_until = self.now() + self.rng.uniform(0.5, 20.0)
            self.auditor.note(f"the store is down until {self._down_until:.3f}")
        if faults.happens("clock jump", rates.jump):
            self.store_ahead_s += self.rng.uniform(1.0, JUMP_MAX_S)
            self.auditor.excused_until = self.now() + LEASE_S + PAUSE_MAX_S
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

    def _close(self, process: Process) -> None:
        self.auditor.note(f"{process.name} closes its app")
        process.spawn(self.workers[process].close())

    def paused(self, process: Process, pause_s: float) -> None:
        self.auditor.paused(process)
        self.auditor.note(f"{process.name} is stopped")

    def resuming(self, process: Process) -> None:
        self.auditor.resumed(process)
        self.auditor.note(f"{process.name} goes on")

    def fell(self, process: Process) -> None:
        for task in [task for task, owner in self._callers.items() if owner is process]:
            calling: Any = task.get_coro()
            if inspect.getcoroutinestate(calling) == inspect.CORO_CREATED:
                calling.close()  # It was going to begin.
        self.auditor.note(f"{process.name} is killed")

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
