"""What a sink promises whose name can move to another target: an alias of indexes, or the name of a table.

The promises say nothing of what `current_target` returns for a table, whose live one always has the name of the sink.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from keywise.core.change import Change
from keywise.core.errors import AdminError
from keywise.core.target import TargetNote
from keywise.testing.conformance.promise import Promises, UncheckedError, same
from keywise.testing.conformance.sinks import SinkBench, all_applied, gone, put, shown

TARGET_PROMISES: Promises[SinkBench] = Promises()
"""Kept by every sink whose name can move."""
ALIAS_PROMISES: Promises[SinkBench] = Promises()
"""Kept by those with a store of their own."""
RENAMING_PROMISES: Promises[SinkBench] = Promises()
"""Kept by those in the ledger's database."""


@dataclass(slots=True, frozen=True)
class Targets:
    """The live target, and the names of two that can be built beside it."""

    bench: SinkBench
    pipeline: str
    live: str
    """What the live target is called after the first move. A table gets this name only then."""
    first: str
    second: str

    async def build(self, target: str, *changes: Change[Any], generation: int = 7, epoch: int = 0) -> None:
        """Create a target, and write to it."""
        await self.bench.sink.create_target(target, self.note(generation), epoch, None)
        if changes:
            await self.put_into(target, *changes)

    def note(self, generation: int = 7) -> TargetNote:
        return TargetNote(self.pipeline, generation)

    async def put_into(self, target: str, *changes: Change[Any]) -> None:
        """Write to a target that is not live."""
        async with self.bench.sink.at_target(target) as sink:
            await _put(replace(self.bench, sink=sink), *changes)

    async def move(self, before: str, after: str, epoch: int = 0) -> None:
        """Let the name stand for another target."""
        if self.bench.transaction is None:
            await self.bench.sink.move_name(before, after, epoch)
            return
        async with self.bench.opened() as transaction:
            await self.bench.sink.exchange(transaction.connection, before, after)

    async def held_by(self, target: str, *keys: str) -> dict[str, int]:
        """Return the versions that a target holds which is not live."""
        async with self.bench.sink.at_target(target) as sink:
            return await _versions(sink, keys)

    async def shown(self, *keys: str) -> dict[str, int]:
        """Return the versions that the name shows."""
        return await _versions(self.bench.sink, keys)


@asynccontextmanager
async def beside(bench: SinkBench) -> AsyncIterator[Targets]:
    """Name targets beside the live one; those that are left in the end are dropped."""
    current = await bench.sink.current_target()
    live = current if bench.transaction is None else f"{current}_0"
    targets = Targets(bench, f"pipeline of {current}", live, f"{current}_1", f"{current}_2")
    try:
        yield targets
    finally:
        for target in (live, targets.first, targets.second):
            with suppress(AdminError):
                await bench.sink.drop_target(target)


# Every sink whose name can move.


@TARGET_PROMISES.add()
async def a_new_target_is_empty_and_not_shown(bench: SinkBench) -> None:
    """A new target holds nothing, and what is written to it is not shown under the name."""
    await _put(bench, put("a", 1), put("b", 1))
    async with beside(bench) as targets:
        await targets.build(targets.first)
        same("the keys in the new target", await bench.sink.count(targets.first), 0)
        await targets.put_into(targets.first, put("a", 2), put("c", 1))
        same("what the new target holds", await targets.held_by(targets.first, "a", "b", "c"), {"a": 2, "c": 1})
        same("what the name shows", await targets.shown("a", "b", "c"), {"a": 1, "b": 1})
        same("the content", dict(await bench.content()), shown(put("a", 1), put("b", 1)))


@TARGET_PROMISES.add()
async def keys_are_counted(bench: SinkBench) -> None:
    """The count of a target is the number of keys that it holds now, without those that were deleted."""
    async with beside(bench) as targets:
        await targets.build(targets.first, *(put(f"k{number}", 1) for number in range(5)))
        same("the count", await bench.sink.count(targets.first), 5)
        await targets.put_into(targets.first, gone("k0", 2), put("k1", 2), gone("never seen", 1))
        same("the count after a deletion", await bench.sink.count(targets.first), 4)


@TARGET_PROMISES.add()
async def the_name_moves(bench: SinkBench) -> None:
    """After a move the name shows the new target, new writes reach it, and the old one keeps what it holds."""
    await _put(bench, put("a", 1), put("b", 1))
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 2))
        same("why the target cannot serve", await bench.sink.finish_target(targets.first), [])
        await targets.move(targets.live, targets.first)
        same("what the name shows", await targets.shown("a", "b"), {"a": 2})
        await _put(bench, put("a", 3), put("c", 1))
        same("what the name shows after a write", await targets.shown("a", "b", "c"), {"a": 3, "c": 1})
        same("what the old target holds", await targets.held_by(targets.live, "a", "b", "c"), {"a": 1, "b": 1})
        same("the keys in the old target", await bench.sink.count(targets.live), 2)


@TARGET_PROMISES.add()
async def writes_of_other_processes_follow_the_name(bench: SinkBench) -> None:
    """A process that has written to the old target writes to the new one after the move, also when the old one is gone.

    It did not move the name itself, and was not opened again.
    """
    another = _another_of(bench)
    await _put(another, put("a", 1))
    async with beside(bench) as targets:
        await targets.build(targets.first)
        await targets.move(targets.live, targets.first)
        await _put(another, put("a", 2), put("b", 1))
        same("what the name shows", await targets.shown("a", "b"), {"a": 2, "b": 1})
        same("what the old target holds", await targets.held_by(targets.live, "a", "b"), {"a": 1})
        await bench.sink.drop_target(targets.live)
        await _put(another, put("a", 3), gone("b", 2))
        same("what the other process reads", await _versions(another.sink, ("a", "b")), {"a": 3})


@TARGET_PROMISES.add()
async def the_name_moves_back_and_forth(bench: SinkBench) -> None:
    """The name can move back to the old target, and from there to the same or to a third one."""
    await _put(bench, put("a", 1))
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 2))
        await targets.move(targets.live, targets.first, 0)
        await targets.move(targets.first, targets.live, 1)
        same("what the name shows after the move back", await targets.shown("a"), {"a": 1})
        await targets.move(targets.live, targets.first, 2)
        same("what the name shows after the second move", await targets.shown("a"), {"a": 2})
        await targets.build(targets.second, put("a", 3), generation=8, epoch=3)
        await targets.move(targets.first, targets.second, 3)
        same("what the name shows of a third target", await targets.shown("a"), {"a": 3})
        same("what the second target holds", await targets.held_by(targets.first, "a"), {"a": 2})


@TARGET_PROMISES.add()
async def a_run_finds_the_target_that_it_has_created(bench: SinkBench) -> None:
    """To create a target again for the same run changes nothing: the target keeps what it holds, and can go live."""
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 1))
        await targets.build(targets.first, put("b", 1))
        same("what the target holds", await targets.held_by(targets.first, "a", "b"), {"a": 1, "b": 1})
        await targets.move(targets.live, targets.first)
        same("what the name shows", await targets.shown("a", "b"), {"a": 1, "b": 1})


@TARGET_PROMISES.add()
async def the_target_of_another_run_is_refused(bench: SinkBench) -> None:
    """A store that remembers the run refuses its target to another one, and the target keeps what it holds."""
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 1))
        if not await bench.sink.targets(targets.pipeline):
            return
        for note in (targets.note(8), TargetNote("another pipeline", 7)):
            await _refused(f"the target of {note}", bench.sink.create_target(targets.first, note, 0, None))
        same("what the target holds", await targets.held_by(targets.first, "a"), {"a": 1})


@TARGET_PROMISES.add()
async def the_live_target_is_not_built_into(bench: SinkBench) -> None:
    """The live target, which no run has built, is refused as a new one, and keeps what it holds."""
    await _put(bench, put("a", 1))
    async with beside(bench) as targets:
        current = await bench.sink.current_target()
        await _refused("the live target", bench.sink.create_target(current, targets.note(), 0, None))
        same("what the name shows", await targets.shown("a"), {"a": 1})


@TARGET_PROMISES.add()
async def a_definition_that_does_not_fit_is_refused(bench: SinkBench) -> None:
    """A definition that the store cannot use is refused, and leaves no target behind."""
    async with beside(bench) as targets:
        for definition in (b"\x00 no definition", b"[1]"):
            creation = bench.sink.create_target(targets.first, targets.note(), 0, definition)
            await _refused(f"the definition {definition!r}", creation)
        await targets.build(targets.first, put("a", 1), generation=8)
        same("what the target holds", await targets.held_by(targets.first, "a"), {"a": 1})


@TARGET_PROMISES.add()
async def a_finished_target_can_be_finished_again(bench: SinkBench) -> None:
    """A finished target can serve; it takes writes as before, and finishing it again changes nothing."""
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 1))
        for version in (2, 3):
            same("why the target cannot serve", await bench.sink.finish_target(targets.first), [])
            await targets.put_into(targets.first, put("a", version))
        same("what the target holds", await targets.held_by(targets.first, "a"), {"a": 3})
        await targets.move(targets.live, targets.first)
        same("what the name shows", await targets.shown("a"), {"a": 3})


@TARGET_PROMISES.add()
async def the_live_target_cannot_be_dropped(bench: SinkBench) -> None:
    """The target that the name stands for is not dropped, neither before a move nor after it."""
    await _put(bench, put("a", 1))
    async with beside(bench) as targets:
        await _refused("to drop the live target", bench.sink.drop_target(await bench.sink.current_target()))
        same("what the name shows", await targets.shown("a"), {"a": 1})
        await targets.build(targets.first, put("a", 2))
        await targets.move(targets.live, targets.first)
        await _refused("to drop the live target", bench.sink.drop_target(await bench.sink.current_target()))
        same("what the name shows after the move", await targets.shown("a"), {"a": 2})


@TARGET_PROMISES.add()
async def a_dropped_target_is_gone(bench: SinkBench) -> None:
    """A dropped target is gone with all that it held; to drop it again, or one that never was, is no error."""
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 1))
        for _ in range(2):
            await bench.sink.drop_target(targets.first)
        await bench.sink.drop_target(targets.second)
        same("the targets that are left", await bench.sink.targets(targets.pipeline), [])
        await targets.build(targets.first, generation=8)
        same("the keys in a new target of that name", await bench.sink.count(targets.first), 0)


@TARGET_PROMISES.add()
async def targets_are_listed_by_age(bench: SinkBench) -> None:
    """A store that remembers who built its targets lists those of a pipeline, the oldest first."""
    async with beside(bench) as targets:
        # Their names are in the other order.
        await targets.build(targets.second, generation=7)
        await targets.build(targets.first, generation=8)
        listed = await bench.sink.targets(targets.pipeline)
        if not listed:
            return
        same("the targets of the pipeline", list(listed), [targets.second, targets.first])
        same("the targets of another one", list(await bench.sink.targets("another pipeline")), [])


# Those with a store of their own.


@ALIAS_PROMISES.add()
async def the_current_target_is_named(bench: SinkBench) -> None:
    """The current target is the one that the name stands for, before and after a move, for every process."""
    async with beside(bench) as targets:
        sinks = [bench.sink, _another_of(bench).sink]
        same("the targets before", [await sink.current_target() for sink in sinks], [targets.live] * 2)
        await targets.build(targets.first)
        await targets.move(targets.live, targets.first)
        same("the targets after", [await sink.current_target() for sink in sinks], [targets.first] * 2)


@ALIAS_PROMISES.add()
async def a_repeated_move_has_succeeded(bench: SinkBench) -> None:
    """A move can be repeated, also at the same time by two processes: it returns, and has happened once."""
    another = _another_of(bench)
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 1))
        move = (targets.live, targets.first, 0)
        await asyncio.gather(bench.sink.move_name(*move), another.sink.move_name(*move))
        for sink in (bench.sink, another.sink):
            await sink.move_name(*move)
        same("the target", await bench.sink.current_target(), targets.first)
        same("what the name shows", await targets.shown("a"), {"a": 1})


@ALIAS_PROMISES.add()
async def a_late_copy_of_a_move_has_no_effect(bench: SinkBench) -> None:
    """A copy of a move that arrives after a later one has no effect, also after a rollback and a second swap."""
    async with beside(bench) as targets:
        await targets.build(targets.first)
        live, first, second = targets.live, targets.first, targets.second
        moves = [(live, first), (first, live), (live, first), (first, second)]
        for epoch, (before, after) in enumerate(moves):
            if after == second:
                await targets.build(second, generation=8, epoch=epoch)
            await bench.sink.move_name(before, after, epoch)
            for earlier in range(epoch + 1):
                with suppress(AdminError):
                    await bench.sink.move_name(*moves[earlier], earlier)
                what = f"the target after move {epoch} and a late copy of move {earlier}"
                same(what, await bench.sink.current_target(), after)


@ALIAS_PROMISES.add()
async def a_move_from_elsewhere_is_refused(bench: SinkBench) -> None:
    """A move is refused if the name stands for neither of its targets, or if the new one does not exist."""
    async with beside(bench) as targets:
        await targets.build(targets.first)
        await targets.build(targets.second, generation=8)
        await _refused("a move from elsewhere", bench.sink.move_name(targets.first, targets.second, 0))
        await bench.sink.drop_target(targets.first)
        await _refused("a move to a missing target", bench.sink.move_name(targets.live, targets.first, 0))
        same("the target", await bench.sink.current_target(), targets.live)


# Those in the ledger's database.


@RENAMING_PROMISES.add()
async def a_move_belongs_to_its_transaction(bench: SinkBench) -> None:
    """A move that is rolled back has not happened, and can be made again."""
    await _put(bench, put("a", 1))
    async with beside(bench) as targets:
        await targets.build(targets.first, put("a", 2))
        try:
            async with bench.opened() as transaction:
                await bench.sink.exchange(transaction.connection, targets.live, targets.first)
                raise _MoveRolledBack
        except _MoveRolledBack:
            pass
        same("what the name shows after the rollback", await targets.shown("a"), {"a": 1})
        same("what the new target holds", await targets.held_by(targets.first, "a"), {"a": 2})
        await _put(bench, put("a", 3))
        await targets.move(targets.live, targets.first)
        same("what the name shows", await targets.shown("a"), {"a": 2})
        same("what the old target holds", await targets.held_by(targets.live, "a"), {"a": 3})


class _MoveRolledBack(Exception):
    """Leaves a transaction on purpose."""


def _another_of(bench: SinkBench) -> SinkBench:
    if bench.another is None:
        raise UncheckedError("this fixture has no other process: give it `another`")
    return bench.another


async def _put(bench: SinkBench, *changes: Change[Any]) -> None:
    if bench.transaction is None:
        all_applied(await bench.apply(*changes))
    else:
        await bench.write(*changes)


async def _versions(sink: Any, keys: Sequence[str]) -> dict[str, int]:
    return {key: content.version for key, content in (await sink.read(keys)).items()}


async def _refused(what: str, call: Awaitable[object]) -> None:
    try:
        await call
    except AdminError as error:
        same("whether the error says why", bool(str(error)), True)
    else:
        raise AssertionError(f"{what} was accepted")
