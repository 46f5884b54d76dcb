"""The operator of a simulated reindex: starts runs, swaps, rolls back, drops, pauses, cancels, removes and forces."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from keywise.core.controls import Controls, Pause, ReindexRun, RunState
from keywise.core.errors import AdminError, KeywiseError, UnavailableError
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from keywise.reindex.admin import ReindexAdmin
from keywise.reindex.plan import RunPlan
from keywise.reindex.targets import droppable_target
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.reindex.world import ReindexWorld

COMMAND_MAX_S = 90.0
LOOK_S = 0.5
ENDS_MAX_S = 700.0
"""How long a run, or a swap, may take when nothing goes wrong any more."""
OWN_TARGET = "t_{generation}"
FOREIGN = "foreign"
"""A target that another program has made."""

Act = Callable[[PipelineAdmin, ReindexAdmin], Awaitable[Any]]


class SimulatedOperator:
    """One operator, whose commands are processes of their own and may be killed."""

    def __init__(self, world: "ReindexWorld") -> None:
        self._world = world
        self._commands = 0
        self._causes: list[str] = []

    async def operate(self) -> None:
        """Act at random while faults last, and then end what goes on."""
        await asyncio.gather(self._act_at_random(), self._touch_keys())
        await self.finish()

    @property
    def _controls(self) -> Controls:
        return self._world.controls

    # At random.

    async def _act_at_random(self) -> None:
        world = self._world
        while world.now() < world.faults_s:
            await asyncio.sleep(world.rng.uniform(0.5, world.rng.choice((2.0, 8.0))))
            await self._act()

    async def _act(self) -> None:
        controls, rng = self._controls, self._world.rng
        run = controls.run
        if run is None or not run.is_active:
            await self._begin(controls)
        elif run.state is RunState.STARTING:
            await rng.choice((self._cancel, lambda: self._start(run.into)))()
        elif rng.random() < 0.03:
            await self._cancel()
        elif run.is_paused or rng.random() < 0.2:
            await self._resume(run)
        elif rng.random() < 0.04:
            await self._do("pauses run", lambda _, reindex: reindex.pause())
        elif run.state is RunState.CATCHING_UP and not run.swaps and rng.random() < 0.6:
            await self._do("wants swap", lambda _, reindex: reindex.swap(pause_max_s=8.0))

    async def _begin(self, controls: Controls) -> None:
        rng, draw = self._world.rng, self._world.rng.random()
        if controls.spare and draw < 0.5:
            await self._do("wants rollback", lambda _, reindex: reindex.rollback(8.0))
        elif droppable_target(controls) is not None and draw < 0.6:
            keeps = rng.random() < 0.4
            await self._do("drops", lambda _, reindex: reindex.drop(keeps_target=keeps))
        elif draw < 0.8:
            await self._start(self._target())
        elif draw < 0.85:
            keys = rng.sample(self._world.keys, 2)
            await self._do("starts some rows", lambda _, reindex: reindex.start(RunPlan(keys=keys, is_checked=False)))
        elif draw < 0.95:
            await self._start("")

    def _target(self) -> str:
        """Return the name of a new target, or of one that must be refused."""
        others = [name for name in self._world.target_names() if name != self._world.current_target()]
        return self._world.rng.choice(others) if others and self._world.rng.random() < 0.2 else OWN_TARGET

    async def _start(self, into: str) -> None:
        what = "beside" if into == OWN_TARGET else "into another's target" if into else "in place"
        plan = RunPlan(
            into=into,
            is_checked=self._world.rng.random() < 0.3,
            delete_max=self._world.rng.choice((None, 0, 100)),
            drops_old=bool(into) and self._world.rng.random() < 0.3,
        )
        await self._do(f"starts {what}", lambda _, reindex: reindex.start(plan))

    async def _cancel(self) -> None:
        await self._do("cancels", lambda _, reindex: reindex.cancel())

    async def _resume(self, run: ReindexRun) -> None:
        """Resume a run, and consent to the deletions that it waits for."""
        if run.is_paused:
            await self._do("consents", lambda _, reindex: reindex.resume())
        elif (run.delete_max or 0) < 100:
            await self._do("consents", lambda _, reindex: reindex.resume(100))

    async def _touch_keys(self) -> None:
        """Touch keys, most often during a swap."""
        world, rng = self._world, self._world.rng
        while world.now() < world.faults_s:
            run = self._controls.run
            is_moving = run is not None and run.swaps
            await asyncio.sleep(rng.uniform(0.0, 2.0 if is_moving else 60.0))
            await self._touch_key()

    async def _touch_key(self) -> None:
        rng = self._world.rng
        key = rng.choice(self._world.keys)
        match rng.choice(("removes", "forces", "forces", "pauses key", "", "")):
            case "removes":
                await self._do("removes", lambda admin, _: admin.remove(key))
            case "forces":
                self._world.auditor.forcing(key)
                await self._do("forces", lambda admin, _: admin.force(key))
            case "pauses key":
                await self._do("pauses key", lambda admin, _: admin.pause(key, is_pattern=False))
            case _:
                await self._resume_keys()

    async def _resume_keys(self) -> None:
        for pause in self._controls.pauses:
            await self._do("", partial(_resume, pause))

    # The end.

    async def finish(self) -> None:
        """End the run that goes on, perhaps swap once more, and at last read all rows again in place."""
        world = self._world
        world.auditor.note("the operator brings all to an end")
        run = self._controls.run
        if run is not None and run.state is RunState.STARTING:
            await self._until(self._has_ended, self._cancel)
        await self._until_ended("the last run of the story")
        is_swapped = world.rng.random() < 0.5
        if is_swapped or not self._controls.spare:
            await self._until(lambda: droppable_target(self._controls) is None, self._drop)
        if is_swapped:
            await self._until(self._is_active, lambda: self._start_last(OWN_TARGET))
            await self._until_ended("the last swap")
        # It stands for the messages that were lost, so it must not read before the origin shows every row.
        await asyncio.sleep(max(0.0, world.origin.visible_at - world.now()))
        await self._until(self._is_active, lambda: self._start_last(""))
        await self._until_ended("the last run in place")
        await self._until(lambda: not self._controls.pauses, self._resume_keys)

    async def _drop(self) -> None:
        """Drop the target that is not live. One that no run here has built can only be forgotten."""
        keeps = self._world.rng.random() < 0.5
        await self._do("", lambda _, reindex: reindex.drop(keeps_target=keeps))

    async def _start_last(self, into: str) -> None:
        await self._do("", lambda _, reindex: reindex.start(RunPlan(into=into, is_checked=False, delete_max=1000)))

    def _is_active(self) -> bool:
        run = self._controls.run
        return run is not None and run.is_active and run.state is not RunState.STARTING

    def _has_ended(self) -> bool:
        run = self._controls.run
        return (run is None or not run.is_active) and self._controls.move is None

    async def _until_ended(self, what: str) -> None:
        """Do what a run waits for until it ends; violate the world if it does not end in time."""

        async def urge() -> None:
            await self._resume_keys()
            run = self._controls.run
            if run is None or not run.is_active:
                return
            await self._resume(run)
            if run.state is RunState.CATCHING_UP and not run.swaps:
                await self._do("", lambda _, reindex: reindex.swap(pause_max_s=60.0))

        await self._until(self._has_ended, urge, what)

    async def _until(
        self, holds: Callable[[], bool], urge: Callable[[], Awaitable[None]], what: str = "a command"
    ) -> None:
        until = self._world.now() + ENDS_MAX_S
        while not holds() and self._world.now() < until:
            await urge()
            await asyncio.sleep(LOOK_S)
        if not holds():
            self._world.violate(f"{what} does not end: {self._controls.run}, {self._causes[-2:]}")

    # Commands.

    async def _do(self, what: str, act: Act) -> None:
        """Run one command in a process of its own, which may be killed."""
        world, faults = self._world, self._world.faults
        if what and not faults.is_over:
            faults.injected[f"operator {what}"] += 1
        self._commands += 1
        process = Process(world.loop, f"operator-{self._commands}")
        world.commands.add(process)
        task = process.spawn(self._run(process, what, act))
        until = world.now() + COMMAND_MAX_S
        if faults.happens("command killed", faults.command_rate):
            until = world.now() + world.rng.uniform(0.0, 1.0)
        while not task.done() and not process.is_dead and world.now() < until:
            await asyncio.wait([task], timeout=0.1)
        if not task.done():
            world.kill(process)

    async def _run(self, process: Process, what: str, act: Act) -> None:
        world = self._world
        pipeline, note = world.pipeline(process), AuditNote(process.name)
        try:
            async with running_heartbeat(pipeline) as heartbeat:
                budget = WaitBudget(pipeline, 20.0, lambda cause: None)
                admin = PipelineAdmin(pipeline, note, AdminClaimer(pipeline, budget, heartbeat))
                await act(admin, ReindexAdmin(admin, note))
            world.auditor.note(f"the operator {what}")
        except (AdminError, UnavailableError) as error:
            self._causes.append(str(error))
            world.auditor.note(f"the operator {what}: {error}")
        except (KeywiseError, RuntimeError) as error:
            world.auditor.note(f"the operator {what}: {error!r}")


async def _resume(pause: Pause, admin: PipelineAdmin, _: ReindexAdmin) -> None:
    await admin.resume(pause.keys, is_pattern=pause.is_pattern)
