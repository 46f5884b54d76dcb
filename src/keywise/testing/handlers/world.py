"""One simulated run of a handler: real consumers on virtual time, with a simulated queue and ledger."""

import asyncio
import copy
import functools
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keywise.adapters.function.sink import FunctionSink, TransactedFunctionSink, signature_of
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.source import MemorySource
from keywise.app import App, PipelineDefinition
from keywise.core.change import Change, Delivery
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import SettingsError
from keywise.core.limits import Snooze
from keywise.flow.pipeline import OpenPipeline
from keywise.testing.handlers.call_log import SimulatedWorker, Watch
from keywise.testing.handlers.faults import HandlerFaults
from keywise.testing.handlers.links import ScratchDatabase, WiredLedger, WiredSource
from keywise.testing.handlers.messages import Sample, Samples
from keywise.testing.simulated_world import ConsumerWorld
from keywise.testing.virtual_loop import Process, VirtualLoop

WORKERS = 3
TICK_S = 1.0
SENDING_S = 0.05
"""The time between two messages."""
HANDED_MAX = 3
"""The most messages of one receive: few, so that all workers get some."""
POLL_MIN_S = 5.0
REST_MAX_S = 6 * 3600.0
"""The most virtual time until every message is settled."""
STEPS_MAX = 500_000
"""The most steps of the loop until every message is settled; a run without faults takes some thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is simulated: a pipeline of an app, sample messages, and functions that read and empty the store."""

    make: Callable[[], App]
    """Called for each worker; it may return the same app each time."""
    pipeline: str
    samples: Samples
    state: Callable[..., Any]
    reset: Callable[..., Any]
    zombies: bool = False
    """Also stop workers inside the handler, until long after their lease has expired."""

    def definition(self) -> PipelineDefinition:
        return self.make()._definition(self.pipeline)


class HandlerLoop(VirtualLoop):
    """A virtual loop without threads: a call for a thread runs at once, in the process that makes it."""

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class HandlerWorld(ConsumerWorld):
    """Workers that run a user's handler; without a seed there are no faults."""

    process_name = "worker {}"
    restart_max_s = 5.0
    faults: HandlerFaults

    def __init__(self, trial: Trial, seed: int | None) -> None:
        super().__init__(f"own {seed}", HandlerLoop())
        self.trial = trial
        self.is_ideal = seed is None
        self.processes = (1, 1) if self.is_ideal else (WORKERS, WORKERS)
        self.tick_s = TICK_S / 10 if self.is_ideal else TICK_S
        definition = trial.definition()
        assert definition._handler is not None, "only pipelines with a handler are simulated"
        self.is_atomic = signature_of(definition._handler).wants_transaction
        self.zombies = trial.zombies and not self.is_ideal
        self.settings = replace(
            definition.settings,
            poll_s=max(definition.settings.poll_s, POLL_MIN_S),
            retention_s=None,
            redelivery_s=max(definition.settings.redelivery_s, 20 * definition.settings.lease_s),
            history="all",
        )
        kind = ScratchDatabase if self.is_atomic else MemoryDatabase
        self.database = kind(clock=self.store_now, rng=random.Random(self.rng.random()))
        queue = MemoryDatabase(clock=self.store_now)
        self.source = MemorySource(queue, "queue", visibility_s=2 * self.settings.lease_s)
        self._messages = queue.queue("queue")
        policy = LedgerPolicy(not self.is_atomic, self.settings.redelivery_s, None, definition.rate)
        self.ledger = MemoryLedger(self.database, trial.pipeline, policy)
        self.faults = HandlerFaults(self, random.Random(self.rng.random()), is_ideal=self.is_ideal)
        self.watch = Watch(self.loop.time, is_atomic=self.is_atomic, zombies=self.zombies)
        self.is_drained = True
        self._workers: dict[Process, SimulatedWorker] = {}
        self._calm_at = 0.0

    async def _run(self) -> Any:
        """Empty the store, run the simulation, and return what the store then holds."""
        await self._ask(self.trial.reset)
        schedule = [] if self.is_ideal else self._schedule()
        for _ in range(self.processes[0]):
            self.start()
        if self.is_ideal:
            for sample in self.trial.samples.ordered:
                await self.source.send([sample.body])
                await self._come_to_rest()
        else:
            await self._send_all(schedule)
            await self._come_to_rest()
        return copy.deepcopy(await self._ask(self.trial.state))

    async def _ask(self, function: Callable[..., Any]) -> Any:
        """Call a function of the user; if it has a parameter, pass the connection of the scratch database."""
        try:
            wanted = len(inspect.signature(function).parameters)
        except ValueError:
            wanted = 0  # A built-in without a signature, such as `dict.clear`.
        if wanted and not isinstance(self.database, ScratchDatabase):
            raise SettingsError(
                f"{getattr(function, '__name__', function)!r} takes a connection, and the handler of pipeline "
                f"{self.trial.pipeline!r} asks for no Transaction; write it without a parameter"
            )
        answer = function(self.database.connection) if wanted else function()  # type: ignore[attr-defined]
        return await answer if inspect.isawaitable(answer) else answer

    # Messages.

    async def _send_all(self, schedule: Sequence[tuple[float, Sample]]) -> None:
        for at, sample in schedule:
            await asyncio.sleep(max(0.0, at - self.now()))
            copies = 2 if self.faults.occurs("sent twice") else 1
            delay_s = self.rng.uniform(1.0, self.settings.lease_s) if self.faults.occurs("late") else 0.0
            await self.source.send([sample.body] * copies, delay_s=delay_s)

    def _schedule(self) -> list[tuple[float, Sample]]:
        planned = []
        for number, sample in enumerate(self.trial.samples.ordered):
            late_s = self.rng.uniform(0.0, 2.0) if self.faults.occurs("out of order") else 0.0
            planned.append((number * SENDING_S + late_s, sample))
        return sorted(planned, key=lambda one: one[0])

    async def _come_to_rest(self) -> None:
        """Let faults happen for a while, then wait until every message is settled."""
        self._calm_at = self.now() + 3 * self.settings.lease_s
        await self.tick_until(lambda: self.is_at_rest() or self.loop.steps > STEPS_MAX, REST_MAX_S)
        self.is_drained = self.is_drained and self.is_at_rest()

    def tick(self) -> None:
        self.faults.is_over = self.is_ideal or self.now() > self._calm_at

    def is_at_rest(self) -> bool:
        is_paused = any(process.is_paused for process in self.workers)
        return not self._messages and not is_paused and not self.watch.is_at_work()

    def waiting(self) -> list[str]:
        """Return the keys of messages that are not settled."""
        samples = [self.trial.samples.by_body[message.body] for message in self._messages.values()]
        return sorted({sample.change.key for sample in samples if sample.change is not None})

    # Workers.

    def pipeline(self, process: Process) -> OpenPipeline:
        worker = self._workers[process] = SimulatedWorker(process)
        definition = self.trial.definition()
        ledger: Any = WiredLedger(self, worker)
        source: Any = WiredSource(self, worker)
        handler = self._handler(worker, definition)
        sink: Any = FunctionSink(handler, threads=1)
        if self.is_atomic:
            sink = TransactedFunctionSink(handler, self.database)
        return OpenPipeline(
            name=definition.name,
            sources=[("queue", source)],
            ledger=ledger,
            admin=ledger,
            control_store=ledger,
            history_store=ledger,
            sink=sink,
            reader=definition._reader(),
            settings=self.settings,
            owner=worker.name,
            observers=[self.watch.observer(worker)],
            debounce=definition.debounce,
            rate=definition.rate,
            clock=self.loop.time,
            rng=random.Random(self.rng.random()),
        )

    def _handler(self, worker: SimulatedWorker, definition: PipelineDefinition) -> Callable[..., Any]:
        """Wrap the real handler, with faults before and after it."""
        handler = definition._handler
        assert handler is not None

        @functools.wraps(handler)
        async def with_faults(*arguments: Any) -> Any:
            changes: list[Change[Any]] = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            keys = [change.key for change in changes]
            self.watch.begins(worker, changes)
            try:
                await self._before(worker, keys)
                result = await self._handle(worker, changes, lambda: handler(*arguments))
                await self._after(worker, keys)
                return result
            finally:
                if not worker.process.is_dead:
                    self.watch.leaves(worker, changes)

        return with_faults

    async def _handle(self, worker: SimulatedWorker, changes: Sequence[Change[Any]], call: Callable[[], Any]) -> Any:
        try:
            result = call()
            result = await result if inspect.isawaitable(result) else result
        except SystemExit:
            self.kill_worker(worker, [change.key for change in changes], "dies: the handler has ended its process")
            await asyncio.Event().wait()
        except BaseException as error:
            if not worker.process.is_dead:
                self.watch.ends(worker, changes, error)
            raise
        self.watch.ends(worker, changes, None, is_snoozed=isinstance(result, Snooze))
        return result

    async def _before(self, worker: SimulatedWorker, keys: list[str]) -> None:
        await asyncio.sleep(self.faults.latency_s())
        if self.faults.dies(worker, "before"):
            self.kill_worker(worker, keys, "dies before the handler runs")
            await asyncio.Event().wait()
        if self.faults.pauses_before(worker):
            self.pause(worker.process)
            await asyncio.sleep(0)

    async def _after(self, worker: SimulatedWorker, keys: list[str]) -> None:
        if self.faults.dies(worker, "after"):
            moment = "before the transaction is committed" if self.is_atomic else "before it is committed"
            self.kill_worker(worker, keys, f"dies after the handler has run, {moment}")
            await asyncio.Event().wait()
        if self.faults.pauses_after(worker, keys):
            self.pause(worker.process)
            await asyncio.sleep(0)
        if self.faults.answer_is_lost(keys):
            self.watch.note(keys, f"the handler of {worker.name} has run, but the answer of its last call is lost")
            raise TimeoutError("no answer")

    def kill_worker(self, worker: SimulatedWorker, keys: Sequence[str], how: str) -> None:
        self.faults.fell(worker)
        self.watch.note(keys, f"{worker.name} {how}")
        self.watch.note([key for key in worker.handed if key not in keys], f"{worker.name} dies")
        self.kill(worker.process)

    def meanwhile(self, process: Process) -> None:
        self.faults.meanwhile(self._workers[process])

    def pause_s(self) -> float:
        """Longer than a lease, which expires meanwhile."""
        return self.settings.lease_s * self.rng.uniform(1.2, 3.0)

    def paused(self, process: Process, pause_s: float) -> None:
        worker = self._workers[process]
        self.faults.fell(worker)
        text = f"{worker.name} stops for {pause_s:.0f} s, which is longer than its lease"
        self.watch.note(list(worker.handed), text)

    def resuming(self, process: Process) -> None:
        worker = self._workers[process]
        self.watch.note(list(worker.handed), f"{worker.name} goes on")

    # Reports about messages.

    def handed_max(self) -> int:
        return self.rng.randint(1, HANDED_MAX)

    def report_handed(self, worker: SimulatedWorker, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            sample = self.trial.samples.by_body[delivery.body]
            if sample.change is not None:
                worker.handed[sample.change.key] = None
        self.report_deliveries(worker, deliveries, "{worker} is handed {label}")

    def given_back(self, worker: SimulatedWorker, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            sample = self.trial.samples.by_body[delivery.body]
            if sample.change is not None:
                worker.handed.pop(sample.change.key, None)

    def report_deliveries(self, worker: SimulatedWorker, deliveries: Sequence[Delivery], text: str) -> None:
        for delivery in deliveries:
            sample = self.trial.samples.by_body[delivery.body]
            if sample.change is not None:
                again = ", again" if delivery.count > 1 else ""
                line = text.format(worker=worker.name, label=sample.label)
                self.watch.note([sample.change.key], f"{line}{again}")

    def violate(self, what: str) -> None:
        self.watch.broken.append(("", what))
