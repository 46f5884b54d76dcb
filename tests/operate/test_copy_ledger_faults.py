"""A copy that is cut off, or whose source or target changes meanwhile: it is noticed, and begun anew."""

import pytest
from msgspec.structs import replace

from keywise.adapters.memory.dump import MemoryLedgerTransfer
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Pause
from keywise.core.entry import Entry
from keywise.core.errors import AdminError
from keywise.core.transfer import TransferPage
from keywise.operate.copy_ledger import UNFINISHED, TargetState
from operate.copy_rig import EVERY_KEY, TERMS, WHO, Road
from running import run


class CutOff(Exception):
    """The command was killed."""


@pytest.mark.parametrize("stage", ["copying", "checking the copy", "checking the original"])
def test_a_copy_that_was_cut_off_is_begun_anew(stage):
    road = Road()

    def cut(what: str) -> None:
        if what == stage:
            raise CutOff

    async def main() -> None:
        await road.fill()
        road.meanwhile = cut
        with pytest.raises(CutOff):
            await road.copy()
        [*_, mark] = (await road.target.controls()).pauses
        assert (mark.keys, mark.is_pattern, mark.by) == (UNFINISHED, True, "ada@desk")
        assert mark.why == "keywise ledger copy from old:// is not finished"
        await road.target.control_store.resume(EVERYTHING, True)
        assert (await road.target.claim([ChangeHeader("x\ny", order_of(1))], TERMS)).granted == [], (
            "a resume does not end it"
        )
        road.meanwhile = lambda what: None
        assert (await road.move.plan()).found is TargetState.UNFINISHED
        await road.copy()
        assert (await road.move.plan()).found is TargetState.SAME
        assert UNFINISHED not in [pause.keys for pause in (await road.target.controls()).pauses]

    run(main())


def test_a_copy_that_was_cut_off_is_neither_copied_from_nor_mixed_with_another():
    road = Road()
    mark = Pause(UNFINISHED, True, why="keywise ledger copy from older:// is not finished")

    async def main() -> None:
        await road.fill()
        await road.target.control_store.pause(mark)
        plan = await road.move.plan()
        assert (plan.found, plan.difference) == (TargetState.OTHER, f"an unfinished copy: {mark.why}")
        await road.move.check_replaceable()
        await road.source.control_store.pause(mark)

    run(main())
    assert "old:// holds an unfinished copy of pipeline 'pages'" in road.refusal()


@pytest.mark.parametrize(
    ("stage", "told"),
    [("copying", "18 keys instead of 17"), ("checking the copy", "18 keys instead of 17"), ("pause", "its pauses")],
)
def test_a_source_that_changes_meanwhile_is_noticed(stage, told):
    road = Road()

    def change(what: str) -> None:
        scope = road.source.database.scope("pages")
        if what == stage:
            # All entries were read by now, as one part.
            scope.entries["more"] = Entry(order_of(1))
        elif stage == "pause":
            scope.controls[""] = Controls(1, (EVERY_KEY,))

    async def main() -> None:
        await road.fill()
        road.meanwhile = change
        with pytest.raises(AdminError, match="old:// was changed while it was copied") as error:
            await road.copy()
        assert told in str(error.value) and "stays paused in new://" in str(error.value)
        assert (await road.source.history(None, 1))[0].what != "copied"

    run(main())


def test_a_pipeline_that_is_resumed_meanwhile_is_noticed():
    road = Road()

    async def main() -> None:
        await road.fill()
        road.meanwhile = lambda what: road.source.database.scope("pages").controls.clear()
        with pytest.raises(AdminError, match="is not paused in old://"):
            await road.copy()

    run(main())


def test_a_target_that_holds_something_else_after_the_copy_is_noticed():
    road = Road()

    def change(what: str) -> None:
        if what == "copying":
            road.target.database.scope("pages").entries["of somebody"] = Entry(order_of(1))

    async def main() -> None:
        await road.fill()
        road.meanwhile = change
        with pytest.raises(AdminError, match="new:// does not hold what was copied to it: 18 keys instead of 17"):
            await road.copy()
        assert (await road.move.plan()).found is TargetState.UNFINISHED

    run(main())


def test_a_target_that_somebody_begins_to_use_is_left_as_it_was():
    road = Road()

    async def main() -> None:
        await road.fill()
        move = road.move
        plan = await move.plan()
        await road.target.claim([ChangeHeader("a", order_of(1))], TERMS)
        with pytest.raises(AdminError, match="new:// is in use"):
            await move.run(plan, WHO)
        assert await road.target.controls() == Controls()
        assert (await road.target.inspect("a")).token

    run(main())


def test_what_a_ledger_counts_and_does_not_tell_is_noticed():
    road = Road()

    class Forgetful(MemoryLedgerTransfer):
        async def page(self, cursor: str, limit: int) -> TransferPage:
            told = await super().page(cursor, limit)
            return replace(told, entries=[(key, entry) for key, entry in told.entries if key != "🦉"])

    async def main() -> None:
        await road.fill()
        road.source.transfer = Forgetful(road.source.database, road.source.database.scope("pages"))
        with pytest.raises(AdminError, match=r"new:// counts differently than old:// \(keys: 10 instead of 11"):
            await road.copy()
        await road.target.transfer.set_controls(Controls(0, (EVERY_KEY,)))
        plan = await road.move.plan()
        assert (plan.found, plan.difference) == (TargetState.OTHER, "keys: 10 instead of 11")

    run(main())


def test_a_ledger_that_is_known_by_two_names_is_not_replaced_by_itself():
    """Something is written while both sides are compared, so that they seem to differ."""
    road = Road()
    road.target = road.source

    def write(what: str) -> None:
        road.source.database.scope("pages").entries["more"] = Entry(order_of(1))

    async def main() -> None:
        await road.fill()
        controls = await road.source.controls()
        road.meanwhile = write
        move, (before, _) = road.move, await road.content()
        plan = await move.plan()
        assert plan.found is TargetState.OTHER
        with pytest.raises(AdminError, match="old:// and new:// are the same ledger"):
            await move.run(plan, WHO)
        after, _ = await road.content()
        assert (len(after.entries), after.dead_letters, after.records) == (18, before.dead_letters, before.records)
        assert await road.source.controls() == controls

    run(main())
