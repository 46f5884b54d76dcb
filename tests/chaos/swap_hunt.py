"""Moves the name of a sink there and back while rows are edited and workers are killed and stopped, and judges it."""

import asyncio
import random
import re
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from chaos.reindex_fleet import STARTED, ReindexCrew, notes_path
from chaos.reindex_judge import judge_content
from chaos.reindex_worker import PIPELINE, operator_app
from chaos.swap_editor import SwapEditor, rested
from chaos.swap_judge import SwapJudge, Written
from chaos.swap_stores import ControlsNote, OpenSearchIndexes, SqliteTables, SwapStore
from chaos.swap_worker import SwapAssignment
from keywise.core.clock import boot_time
from keywise.core.controls import ReindexRun, RunState
from keywise.flow.pipeline import OpenPipeline
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin, require_origin
from keywise.reindex.plan import RunPlan
from keywise.reindex.report import report_run
from keywise.reindex.shards import CATCH_UP, ShardLedger
from running import scaled

SCRIPT = str(Path(__file__).with_name("swap_worker.py"))
LOOK_S = 0.02
LAG_S = 0.8
"""How long the origin lacks at most what was announced, on a machine that is not too slow."""
BACKLOG_S = 4.0
"""The writers wait while the pipeline is so many seconds of updates behind."""
OPERATOR_LEASE_S = 60.0
OWNER = re.compile(r"-(\d+)-[0-9a-f]+-reindex$")
"""The process in the name of a worker."""


class SwapPlan(msgspec.Struct, frozen=True, kw_only=True):
    moves: int = 100
    """Swaps and rollbacks together."""
    back_and_forth: int = 4
    """How often the name moves between the same two targets, before another one is built."""
    keys: int = 1000
    writers: int = 64
    updates_per_s: float = 100.0
    workers: int = 4
    every_s: float = 4.0
    """A worker is killed or stopped so long after another one, on average."""
    at_barrier: float = 0.3
    """In this share of barriers, the worker that has set it is killed or stopped."""
    late: float = 0.15
    """In this share of moves, the call reaches OpenSearch after its client has given up and another one was sent; in
    the same share, its answer is lost."""
    lease_s: float = 2.0
    horizon_s: float = 3.0
    """Above the lag of the origin."""
    pause_max_s: float = 5.0
    seed: int = 0
    limit_s: float = 3600.0


class SwapTally(msgspec.Struct):
    """What happened, and what is wrong with it."""

    on: str
    swaps: int = 0
    rollbacks: int = 0
    called_off: int = 0
    """Barriers that were lifted again before the name had moved."""
    causes: dict[str, int] = {}
    """Why swaps were refused or called off, as far as a look at the run has seen it."""
    kills: int = 0
    stops: int = 0
    coordinator_kills: int = 0
    coordinator_stops: int = 0
    late_calls: int = 0
    """Moves that reached OpenSearch late; each was refused there."""
    updates: int = 0
    writes: int = 0
    barrier_max_s: float = 0.0
    """The longest time that a barrier was up."""
    wait_max_s: float = 0.0
    """The longest time between the announcement of a version that a barrier has met, and its write."""
    lag_max_s: float = 0.0
    seconds: float = 0.0
    faults: list[str] = []


async def hunt_swaps(
    folder: Path, plan: SwapPlan, store: SwapStore, report: Callable[[SwapTally], None] = lambda tally: None
) -> SwapTally:
    """Fill the live target from the origin, and move its name as often as planned."""
    hunt = SwapHunt(folder, plan, store, report)
    async with AsyncExitStack() as stack:
        await hunt.open(stack)
        await hunt.run()
    return hunt.tally


class SwapHunt:
    """One hunt: an editor, workers with their killer, and an operator."""

    def __init__(self, folder: Path, plan: SwapPlan, store: SwapStore, report: Callable[[SwapTally], None]) -> None:
        self.tally = SwapTally(store.on)
        self._plan, self._store, self._report = plan, store, report
        self._rng = random.Random(plan.seed)
        self._began = boot_time()
        self._give_up_at = self._began + scaled(plan.limit_s)
        assignments = [_assignment(store, folder, plan, number) for number in range(plan.workers)]
        # The operator has no claims to lose, and calls of the ledger take a third of a lease at the most.
        operator = structs.replace(plan, lease_s=OPERATOR_LEASE_S)
        self._app = operator_app(_assignment(store, folder, operator, plan.workers))
        self._crew = SwapCrew(folder, [(SCRIPT, _written(folder, one, n)) for n, one in enumerate(assignments)])
        self._pipeline: OpenPipeline
        self._shards: ShardLedger
        self._editor: SwapEditor
        self._refused: Sequence[str] = ()
        self._is_over = asyncio.Event()

    async def open(self, stack: AsyncExitStack) -> None:
        plan, store = self._plan, self._store
        await store.create(plan.keys)
        await stack.enter_async_context(self._app)
        self._pipeline = await stack.enter_async_context(self._app.open(PIPELINE, work=False))
        _, self._shards = require_origin(self._pipeline)
        await store.watch()
        self._editor = SwapEditor(self._app, store, plan.keys, plan.writers, plan.updates_per_s, LAG_S)
        stack.push_async_callback(self._crew.close)
        await self._crew.start()

    async def run(self) -> None:
        async with self._acting() as admin:
            await admin.start(RunPlan())
            await self._until_ended()
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(one) for one in (self._kill_on(), self._strike_on(), self._check_on())]
            editing = group.create_task(self._editor.run())
            await self._move_on()
            # Not cancelled: a worker that is being killed gets its next life first.
            self._is_over.set()
            await asyncio.gather(*helpers)
            self._editor.stop()
            await editing
        await self._finish()
        await self._judge()

    # The operator.

    async def _move_on(self) -> None:
        moves = number = 0
        while moves < self._plan.moves:
            number += 1
            await self._store.create_target(target := self._store.target(number))
            self._store.begin()
            async with self._acting() as admin:
                await admin.start(RunPlan(into=target, is_checked=False, delete_max=self._plan.keys))
                await self._until(lambda run: run.state is RunState.CATCHING_UP)
                await admin.swap(pause_max_s=self._plan.pause_max_s)
            await self._until_moved()
            moves, self.tally.swaps = moves + 1, self.tally.swaps + 1
            for _ in range(self._plan.back_and_forth - 1):
                if moves == self._plan.moves:
                    break
                self._store.begin()
                async with self._acting() as admin:
                    await admin.rollback(self._plan.pause_max_s)
                await self._until_moved()
                moves, self.tally.rollbacks = moves + 1, self.tally.rollbacks + 1
            async with self._acting() as admin:
                await admin.drop()

    async def _until_moved(self) -> None:
        """Wait until the name has moved; a swap that was refused is asked for again."""
        self._arm()
        while (run := await self._look()).is_active:
            if not run.swaps:
                async with self._acting() as admin:
                    await admin.swap(pause_max_s=self._plan.pause_max_s)
        if isinstance(self._store, OpenSearchIndexes):
            self._store.recorder.deliver()
        self._report(self.tally)

    def _arm(self) -> None:
        """Let the next move be late, or lose its answer."""
        if isinstance(self._store, OpenSearchIndexes):
            recorder, chance = self._store.recorder, self._rng.random()
            recorder.is_late = chance < self._plan.late
            recorder.is_mute = not recorder.is_late and chance < 2 * self._plan.late

    async def _until_ended(self) -> None:
        await self._until(lambda run: not run.is_active)

    async def _until(self, holds: Callable[[ReindexRun], bool]) -> None:
        while not holds(await self._look()):
            pass

    async def _look(self) -> ReindexRun:
        assert boot_time() < self._give_up_at, f"the hunt has not ended: {self.tally}"
        found = await report_run(self._pipeline, self._shards)
        assert found is not None
        if found.catch_up.refused != self._refused:
            self._refused = found.catch_up.refused
            for cause in self._refused:
                self.tally.causes[kind_of(cause)] = self.tally.causes.get(kind_of(cause), 0) + 1
        [(_, source)] = self._pipeline.sources
        self._editor.is_behind = (await source.depth() or 0) > BACKLOG_S * self._plan.updates_per_s
        await rested(asyncio.Event(), 5 * LOOK_S)
        return found.run

    @asynccontextmanager
    async def _acting(self) -> AsyncIterator[ReindexAdmin]:
        async with running_heartbeat(self._pipeline) as heartbeat:
            note = AuditNote("ada")
            claimer = AdminClaimer(self._pipeline, WaitBudget(self._pipeline, 60.0, lambda cause: None), heartbeat)
            yield ReindexAdmin(PipelineAdmin(self._pipeline, note, claimer), note)

    # The killer.

    async def _kill_on(self) -> None:
        """Kill or stop some worker now and then."""
        while not await rested(self._is_over, self._rng.uniform(0, 2 * self._plan.every_s)):
            if able := self._crew.able():
                await self._hit(self._rng.choice(able))

    async def _strike_on(self) -> None:
        """Kill or stop the worker that has set a barrier, at some moment of it."""
        hit: set[int] = set()
        while not await rested(self._is_over, LOOK_S):
            move = (await self._pipeline.control_store.controls()).move
            if move is None or move.token in hit:
                continue
            hit.add(move.token)
            number = self._crew.number_of(await self._coordinator())
            if number is not None and self._rng.random() < self._plan.at_barrier:
                await rested(self._is_over, self._rng.choice((0.0, 0.0, 0.05, 0.2)))
                kills = self.tally.kills
                if await self._hit(number):
                    self.tally.coordinator_kills += self.tally.kills - kills
                    self.tally.coordinator_stops += kills == self.tally.kills

    async def _hit(self, number: int) -> bool:
        """Kill a worker, or stop it until its lease has expired; return whether it was there to be hit."""
        if number not in self._crew.able():
            return False
        if self._rng.random() < 0.5:
            self.tally.kills += 1
            await self._crew.kill(number)
        else:
            self.tally.stops += 1
            await self._crew.stop(number, self._rng.uniform(1.0, 2.0) * self._plan.lease_s, self._freeze)
        return True

    def _freeze(self, process: asyncio.subprocess.Process) -> None:
        """Stop a process. In SQLite not while it keeps the file from all others, which no lease can end."""
        if not isinstance(self._store, SqliteTables):
            process.send_signal(signal.SIGSTOP)
            return
        with closing(sqlite3.connect(self._store.path, timeout=60)) as connection:
            connection.execute("begin immediate")
            process.send_signal(signal.SIGSTOP)

    async def _coordinator(self) -> int:
        """The process id of the worker that catches up; 0 if there is none."""
        async for key, entry in self._shards.entries():
            if key == CATCH_UP and entry.token and (found := OWNER.search(entry.owner)) is not None:
                return int(found[1])
        return 0

    async def _check_on(self) -> None:
        while not await rested(self._is_over, 1.0):
            self._crew.check()

    # The end.

    async def _finish(self) -> None:
        """Wait until nothing is queued, held or suspect, and end the workers."""
        await self._crew.wake()
        [(_, source)] = self._pipeline.sources
        async with asyncio.timeout(scaled(120.0)):
            while await source.depth() or (await self._pipeline.admin.counts()).suspects:
                await rested(asyncio.Event(), 5 * LOOK_S)
        await self._crew.drain()

    async def _judge(self) -> None:
        tally, judge, history = self.tally, SwapJudge(self._store.live), await self._store.history()
        judge.judge(history)
        controls = await self._store.controls()
        tally.updates, tally.writes, tally.lag_max_s = self._editor.sent, judge.writes, self._editor.lag_s
        tally.faults += [*judge.faults, *self._crew.faults, *_ledger_faults(controls)]
        if judge.moves != tally.swaps + tally.rollbacks:
            tally.faults.append(f"the name has moved {judge.moves} times")
        tally.faults += judge_content(self._editor.truth, await self._store.held())
        letters = await self._pipeline.admin.dead_letters(100)
        tally.faults += [f"a dead letter: {letter.key}: {letter.cause}" for _, _, letter in letters[:5]]
        barriers = barriers_of(controls)
        tally.called_off = len(barriers) - tally.swaps - tally.rollbacks
        tally.barrier_max_s = max(until - since for since, until in barriers)
        tally.wait_max_s = longest_wait(history, self._editor.sent_at, barriers, self._store.live)
        if isinstance(self._store, OpenSearchIndexes):
            late = self._store.recorder.late
            tally.late_calls = len(late)
            tally.faults += [f"a late move was answered with {status}" for status in late if status == 200]
        if tally.faults and tally.lag_max_s >= self._plan.horizon_s:
            tally.faults.append(
                f"this may be why: the origin has lagged {tally.lag_max_s:.1f} s, longer than the horizon"
            )
        tally.seconds = boot_time() - self._began


class SwapCrew(ReindexCrew):
    """Workers that can be stopped too."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]]) -> None:
        super().__init__(folder, commands)
        self._asleep: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[int] = set()

    def able(self) -> list[int]:
        """The workers that have started and are awake; all but one of them, so that somebody always works."""
        return [number for number in range(len(self._processes)) if self._is_able(number)][1:]

    def number_of(self, pid: int) -> int | None:
        return next((number for number, one in enumerate(self._processes) if one.pid == pid), None)

    async def stop(self, number: int, seconds: float, freeze: Callable[[asyncio.subprocess.Process], None]) -> None:
        """Stop a worker, and let it go on later."""
        process = self._processes[number]
        self._stopping.add(number)
        await asyncio.to_thread(freeze, process)
        self._asleep[number] = asyncio.create_task(self._wake_up(number, process, seconds))
        self._stopping.discard(number)

    async def wake(self) -> None:
        await asyncio.gather(*self._asleep.values())

    def check(self) -> None:
        self._check()

    async def _wake_up(self, number: int, process: asyncio.subprocess.Process, seconds: float) -> None:
        await rested(asyncio.Event(), seconds)
        process.send_signal(signal.SIGCONT)
        del self._asleep[number]

    def _is_able(self, number: int) -> bool:
        is_hit = number in self._dying or number in self._stopping or number in self._asleep
        return not is_hit and STARTED in self._said(number)


def kind_of(cause: str) -> str:
    """A cause without its keys and numbers."""
    text = re.sub(r"'[^']*'", "KEY", cause)
    return re.sub(r"\d[\d,.]*", "N", text)


def barriers_of(notes: Sequence[ControlsNote]) -> list[tuple[float, float]]:
    """When each barrier was set and lifted. A successor of its worker goes on with the same one."""
    barriers, since = list[tuple[float, float]](), 0.0
    for note in notes:
        if note.controls.move is not None:
            since = since or note.at
        elif since:
            barriers.append((since, note.at))
            since = 0.0
    return barriers


def longest_wait(
    history: Sequence[object],
    sent_at: dict[tuple[str, int], float],
    barriers: Sequence[tuple[float, float]],
    live: str,
) -> float:
    """How long a version has waited at most for its write, if a barrier was up meanwhile."""
    longest = 0.0
    written: set[tuple[str, int]] = set()
    for event in history:
        if not isinstance(event, Written) or event.version is None or (event.key, event.version) in written:
            continue
        written.add((event.key, event.version))
        since = sent_at.get((event.key, event.version))
        if since is not None and any(begun < event.at and since < ended for begun, ended in barriers):
            longest = max(longest, event.at - since)
    return longest


def _ledger_faults(notes: Sequence[ControlsNote]) -> list[str]:
    return [
        f"swap {note.controls.target_epoch}: the scopes of the ledger differ at {note.differing} keys"
        for note in notes
        if note.differing
    ]


def _assignment(store: SwapStore, folder: Path, plan: SwapPlan, number: int) -> SwapAssignment:
    options: dict[str, Any] = {
        "lease": f"{plan.lease_s:g}s",
        "margin": f"{plan.lease_s / 4:g}s",
        "poll": "100ms",
        "backoff": "50ms",
        "backoff_max": "1s",
        "repair": "200ms",
        "horizon": f"{plan.horizon_s:g}s",
        # A healthy change may be hit alone again and again, since here it is never the change that kills.
        "crashes_max": 50,
    }
    return SwapAssignment(store.ledger, store.sink, store.origin, str(notes_path(folder, number)), options)


def _written(folder: Path, assignment: SwapAssignment, number: int) -> str:
    path = folder / f"worker{number}.assignment"
    path.write_bytes(msgspec.json.encode(assignment))
    return str(path)
