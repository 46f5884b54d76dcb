"""What all simulated worlds share: processes on virtual time that stop, die and start again, and a run to its end."""

import asyncio
import contextvars
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

from keywise.flow.consumer import Consumer
from keywise.flow.pipeline import OpenPipeline
from keywise.testing.fault_injector import FaultInjector
from keywise.testing.lossy_link import Session
from keywise.testing.run_log import RunLog
from keywise.testing.virtual_loop import Process, VirtualLoop

PAUSE_MAX_S = 25.0
EPOCH_S = 1000.0
"""What the clock of the store shows when a run begins."""


class SimulatedWorld:
    """The processes, the clocks and the faults of one run; everything random comes from its seed.

    A subclass adds servers, a workload, and the checks of what must hold.
    """

    processes = (3, 4)
    """The fewest and the most processes at the start; the most is never exceeded."""
    process_name = "w{}"
    restart_max_s = 10.0
    pause_long_s = 14.0
    """Many pauses are longer than this: longer than a lease, and than messages stay hidden."""
    crash_share = 0.1
    """How much of the rate of crashes counts for each call."""
    faults_s: float
    """How long faults last."""
    rest_max_s: float
    """Within this time after the last fault, everything must come to rest."""
    tick_s = 1.0

    faults: FaultInjector
    auditor: RunLog
    workers: dict[Process, Any]
    """What runs in each process."""

    def __init__(self, seed: str, loop: VirtualLoop | None = None) -> None:
        self.rng = random.Random(seed)
        self.loop = loop or VirtualLoop()
        self.workers = {}
        self.sessions: dict[Process, list[Session]] = {}
        self.store_ahead_s = 0.0
        self.outside = contextvars.copy_context()
        """Belongs to no process, so that it outlives them."""
        self._started = 0
        self._fallen: list[Process] = []
        """Kept until the end: collecting the tasks of a killed process would run their cleanup."""

    def now(self) -> float:
        return self.loop.time()

    def store_now(self) -> float:
        """The store's clock: it may jump ahead of the processes' clocks."""
        return EPOCH_S + self.loop.time() + self.store_ahead_s

    # What a subclass adds.

    def begin(self, process: Process) -> None:
        """Start the work of a process, and add it to `workers`."""
        raise NotImplementedError

    def violate(self, what: str) -> None:
        """Record that a promise was broken."""
        self.auditor.violate(what)

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        """What sends the workload; faults last until it is done."""
        return []

    def operators(self) -> list[Coroutine[Any, Any, None]]:
        """What else happens meanwhile; it may end later than the faults."""
        return []

    def disturb(self) -> None:
        """Inject faults; called once a tick while they last."""

    def tick(self) -> None:
        """Check what must hold at any time."""

    def served(self) -> None:
        """Check what a server has just done."""

    def is_at_rest(self) -> bool:
        return True

    async def check_end(self) -> None:
        """Check what must hold at the end."""

    def fell(self, process: Process) -> None:
        """A process was killed; its sessions are still open."""

    def paused(self, process: Process, pause_s: float) -> None:
        """A process was stopped."""

    def resuming(self, process: Process) -> None:
        """A process is about to go on."""

    # The run.

    def run(self) -> Any:
        self.loop.set_exception_handler(self._surprise)
        try:
            return self.loop.run_until_complete(self._run())
        finally:
            self.loop.end()

    def _surprise(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.violate(f"an unhandled error: {context.get('exception') or context['message']!r}")

    async def _run(self) -> Any:
        """A phase with faults, then one without, in which everything has to come to rest."""
        for _ in range(self.rng.randint(*self.processes)):
            self.start()
        sending = [self.loop.create_task(act) for act in self.senders()]
        operating = [self.loop.create_task(act) for act in self.operators()]
        await self.tick_until(lambda: self.now() >= self.faults_s and all(task.done() for task in sending))
        for task in sending:
            await task
        self.faults.is_over = True
        for task in operating:
            await task
        for process in [process for process in self.workers if process.is_paused]:
            self.resume(process)
        await self.tick_until(self.is_at_rest, self.rest_max_s)
        await self.check_end()

    async def tick_until(self, is_reached: Callable[[], bool], limit_s: float = math.inf) -> None:
        deadline = self.now() + limit_s
        while self.now() < deadline and not is_reached():
            await asyncio.sleep(self.tick_s)
            if not self.faults.is_over:
                self.disturb()
            self.tick()

    # Processes.

    def start(self) -> None:
        self._started += 1
        self.begin(Process(self.loop, self.process_name.format(self._started)))

    def kill(self, process: Process) -> None:
        """As `kill -9`: its connections end, its leases do not."""
        if process.is_dead:
            return
        process.kill()
        self._fallen.append(process)
        self.fell(process)
        self.workers.pop(process, None)
        for session in self.sessions.pop(process, []):
            session.end()
        self.served()
        self.restart_later()

    async def die(self, process: Process) -> None:
        """Kill the process that calls this, which never returns."""
        self.loop.call_soon(self.kill, process, context=self.outside)
        await asyncio.Event().wait()

    def restart_later(self) -> None:
        if len(self.workers) < self.processes[1]:
            self.loop.call_later(self.rng.uniform(0.1, self.restart_max_s), self.start, context=self.outside)

    def pause(self, process: Process) -> None:
        """As SIGSTOP, or a long garbage collection."""
        process.pause()
        pause_s = self.pause_s()
        self.paused(process, pause_s)
        self.loop.call_later(pause_s, self.resume, process, context=self.outside)

    def pause_s(self) -> float:
        return self.rng.uniform(self.rng.choice((0.5, self.pause_long_s)), PAUSE_MAX_S)

    def resume(self, process: Process) -> None:
        if not process.is_dead and process.is_paused:
            self.resuming(process)
            process.resume()

    def meanwhile(self, process: Process) -> None:
        """A process has sent a call: the worst moment to be stopped, so it happens more often than by chance."""
        faults = self.faults
        if process.is_dead or process.is_paused:
            return
        if faults.happens("pause", faults.pause_rate * 0.2):
            self.pause(process)
        elif faults.happens("crash", faults.crash_rate * self.crash_share):
            self.kill(process)

    def disturb_processes(self, stop_kind: str, stop_rate: float, stop: Callable[[Process], None]) -> None:
        """Kill, pause or stop some processes."""
        faults = self.faults
        for process in [process for process in self.workers if not process.is_paused]:
            if faults.happens("crash", faults.crash_rate):
                self.kill(process)
            elif faults.happens("pause", faults.pause_rate):
                self.pause(process)
            elif faults.happens(stop_kind, stop_rate):
                stop(process)


class ConsumerWorld(SimulatedWorld):
    """A world whose processes run a consumer each."""

    workers: dict[Process, Consumer]

    def __init__(self, seed: str, loop: VirtualLoop | None = None) -> None:
        super().__init__(seed, loop)
        self.stopped_at: dict[Process, float] = {}
        """When processes were asked to stop."""

    def pipeline(self, process: Process) -> OpenPipeline:
        """The servers as one process sees them."""
        raise NotImplementedError

    def left(self, process: Process) -> None:
        """A consumer has ended by itself."""

    def begin(self, process: Process) -> None:
        self.workers[process] = consumer = Consumer(self.pipeline(process))
        process.spawn(self._work(process, consumer))

    def stop(self, process: Process) -> None:
        """As SIGTERM."""
        self.stopped_at.setdefault(process, self.now())
        self.workers[process].stop()

    async def _work(self, process: Process, consumer: Consumer) -> None:
        try:
            await consumer.run()
        except Exception as error:
            self.violate(f"{process.name} died of {error!r}")
        self.workers.pop(process, None)
        self.left(process)
        self.restart_later()
