"""The swap: behind the barrier, a last pass makes both targets equal, and the name of the sink moves."""

import asyncio
from contextlib import aclosing

from msgspec.structs import replace

from keywise.core import events
from keywise.core.controls import Controls, Move, ReindexRun, RunState
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.target import AliasSink, RenamingSink
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.reindex.barrier import Barrier, is_wanted
from keywise.reindex.catch_up import CatchUp
from keywise.reindex.comparison import Comparison
from keywise.reindex.targets import fault_of_name

CLAIMS_LOOK_S = 0.05
"""How often a swap looks whether claims are still held."""
LAG_LOOK_S = 0.2
"""How often it looks whether the origin has caught up."""
CALLED_OFF = "called off: "
"""How the cause begins of a swap that was tried; other causes are lines of the gate, which a swap waits for."""
ENDED = "the run was ended meanwhile"
TOO_SLOW = "it took longer than changes may wait; allow more with --pause-max"
SINK = "sink"
"""The name of the sink in `Unavailable` events."""


class Swap:
    """The swap of one run, by the worker that holds its barrier."""

    def __init__(self, live: OpenPipeline, other: OpenPipeline, barrier: Barrier, catch_up: CatchUp) -> None:
        self._live, self._other = live, other
        self._barrier = barrier
        self._catch_up = catch_up
        self._waits_for = TOO_SLOW
        """What the swap waits for behind its barrier: the cause, if that takes too long."""

    async def run(self, run: ReindexRun) -> str:
        """Swap to the target of the run; return why that was called off, or an empty text."""
        began = self._live.clock()
        controls = await self._barrier.set_live(run.live, run.into)
        if controls.move is None:
            return ENDED
        cause = "an error ended the swap, or its worker was stopped"
        try:
            cause = await self._equalise_until(run, began + run.pause_max_s) or await self._move(controls.move, began)
        finally:
            if cause:
                await self._barrier.lift()
        return cause

    async def finish(self, controls: Controls) -> None:
        """Complete the swap of an earlier worker, which can only go forward: the store was asked to move the name."""
        await self._call(controls, self._live.clock())

    # Both targets equal.

    async def _equalise_until(self, run: ReindexRun, deadline: float) -> str:
        """Make both targets equal before the deadline; return why not, or an empty text.

        Changes wait meanwhile, so the deadline breaks off everything: also a write to a slow sink, whose outcome is
        then unknown, and whose claim expires.
        """
        limit = asyncio.timeout(max(0.0, deadline - self._live.clock()))
        try:
            async with limit:
                return await self._equalise(run)
        except TimeoutError:
            if not limit.expired():
                raise
            return self._waits_for
        except UnavailableError as error:
            return str(error)

    async def _equalise(self, run: ReindexRun) -> str:
        """Make both targets equal, but for the keys that the operator gives up; return why not, or an empty text."""
        live, other = self._live, self._other
        await self._wait_for_claims()
        self._waits_for = TOO_SLOW
        while (last := await self._catch_up.run(0, is_last=True)).lagging:
            self._waits_for = f"the origin has older rows than the live target, or none, for {last.lagging:,} keys"
            await asyncio.sleep(LAG_LOOK_S)
        self._waits_for = TOO_SLOW
        comparison = Comparison(live.ledger, other.ledger, await live.admin.now())
        async with aclosing(comparison.gaps()) as gaps:
            different = [gap.key async for gap in gaps]
        if len(different) > run.accept_dead:
            cause = last.failed.get(different[0], "")
            return f"the targets still differ at {different[0]!r}{f': {cause}' if cause else ''}"
        if comparison.unresolved:
            return f"{comparison.unresolved[0]!r} is suspect, or a write of it has an unknown outcome"
        # Look at the store now: once the call is noted, the swap can no longer be called off, and changes would wait
        # until the store is back, or until an operator has moved the name back.
        return await fault_of_name(live, run.live) if isinstance(live.sink, AliasSink) else ""

    async def _wait_for_claims(self) -> None:
        """Wait until no lease is running in either target. The last pass ends expired claims."""
        for pipeline in (self._other, self._live):
            self._waits_for = TOO_SLOW
            while held := await pipeline.control_store.held("", 1):
                self._waits_for = f"{held[0]!r} is still held by a worker"
                await asyncio.sleep(CLAIMS_LOOK_S)

    # The name moves.

    async def _move(self, move: Move, began: float) -> str:
        """Move the name; return why that was called off, or an empty text."""
        sink = self._live.sink
        if isinstance(sink, RenamingSink):
            return await self._rename(sink, move, began)
        noted = await self._barrier.change_live(lambda controls: _called(controls, move))
        if noted.move is None or not noted.move.is_called:
            return ENDED
        await self._call(noted, began)
        return ""

    async def _rename(self, sink: RenamingSink, move: Move, began: float) -> str:
        """Move the name of a table and lift the barrier in one transaction; return why not, or an empty text."""
        live = self._live
        ended_at = await live.admin.now()
        while True:
            before = await live.retry_until_reachable(LEDGER, live.control_store.controls)
            if before.move is None and before.target == move.after:
                break  # The answer to an earlier commit was lost.
            if before.move is None or before.move.token != move.token or not is_wanted(before, move):
                return ENDED
            try:
                async with live.ledger.transaction() as transaction:
                    if not await transaction.replace_controls(before, _ended(before, move, ended_at)):
                        continue  # An operator has set something else meanwhile, such as a pause.
                    await sink.exchange(transaction.connection, move.before, move.after)
                break
            except UnavailableError as error:
                await live.back_off(LEDGER, error, 1)
            except AdminError as error:
                return str(error)
        self._emit(move, began)
        return ""

    async def _call(self, controls: Controls, began: float) -> None:
        """Ask the store to move the name, until it confirms that it has; then end the barrier.

        An earlier request may have arrived already, or may arrive late, so every request carries the same epoch. It is
        that of the controls in which the request is noted: if another worker has completed the swap meanwhile, the
        current epoch may be that of a later swap, and the store would accept the request.
        """
        live, sink, move, epoch = self._live, self._live.sink, controls.move, controls.target_epoch
        assert isinstance(sink, AliasSink), "a run beside has started on it"
        assert move is not None and move.is_called, "any other swap is called off"
        reported = ""
        while True:
            try:
                await live.retry_until_reachable(SINK, lambda: sink.move_name(move.before, move.after, epoch))
                break
            except AdminError as error:
                await self._barrier.check()
                # The name was moved by other means. Changes wait until an operator moves it back.
                if str(error) != reported:
                    reported = str(error)
                    advice = f"let the name stand for {move.before} or {move.after} again; until then changes wait"
                    live.emit(events.Alarmed(pipeline=live.name, cause=reported, advice=advice))
                await asyncio.sleep(live.retry_s(5))
        ended_at = await live.retry_until_reachable(LEDGER, live.admin.now)
        await self._barrier.change_live(lambda controls: _ended(controls, move, ended_at))
        if reported:
            live.emit(events.AlarmCleared(pipeline=live.name, cause=reported))
        self._emit(move, began)

    def _emit(self, move: Move, began: float) -> None:
        live = self._live
        seconds = live.clock() - began
        live.emit(events.TargetSwapped(pipeline=live.name, before=move.before, after=move.after, seconds=seconds))


def _called(controls: Controls, move: Move) -> Controls:
    """Note in the controls that the store is asked to move the name, unless an operator has ended the run."""
    return replace(controls, move=replace(move, is_called=True)) if is_wanted(controls, move) else controls


def _ended(controls: Controls, move: Move, ended_at: float) -> Controls:
    """Return the controls after the swap: without the barrier, with the live target and the spare exchanged."""
    if controls.move is None or controls.run is None:
        return controls  # The answer to an earlier call was lost.
    return replace(
        controls,
        move=None,
        target=move.after,
        spare=move.before,
        spare_generation=controls.run.generation,
        target_epoch=controls.target_epoch + 1,
        run=replace(controls.run, state=RunState.COMPLETE, is_paused=False, swaps=False, ended_at=ended_at),
    )
