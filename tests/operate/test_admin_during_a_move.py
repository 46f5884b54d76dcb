"""While the name of a sink moves, or another target is built, operators do nothing that disturbs it."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from flow.rig import QUEUE_TRANSACTION, Rig
from flow.test_consumer import page
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Controls, Move, Pause, ReindexRun, RunState
from keywise.core.entry import LeaseTerms
from keywise.core.errors import AdminError
from operate.admin_rig import Desk

WAITS = "^pipeline 'test' moves to target 'pages-7' now, which takes some seconds; try again$"
BESIDE = Controls(run=ReindexRun(7, RunState.CATCHING_UP, into="pages-7"))
MOVING = replace(BESIDE, move=Move("pages-6", "pages-7", 99))
ALL = Pause(EVERYTHING, is_pattern=True)


class Mover(Desk):
    """A desk whose pipeline has one key, and whose sink moves as a test says."""

    def __init__(self, way: str = "leased", **settings: Any) -> None:
        super().__init__(Rig(way, **settings))
        self.rig.refetch = lambda key: {"id": key, "v": 5}
        self.rig.run(page("a", 5))

    async def set_controls(self, after: Controls) -> None:
        ledger = self.rig.ledger
        assert await ledger.replace_controls(await ledger.controls(), after)

    def set(self, after: Controls) -> None:
        self.rig.play(self.set_controls(after))

    async def repaired(self, *keys: str) -> dict[str, str]:
        async with self.admin() as admin:
            return {key: cause async for key, cause in admin.repairs(keys)}


@pytest.mark.parametrize("way", ["leased", QUEUE_TRANSACTION])
@pytest.mark.parametrize(
    ("verb", "arguments", "options"),
    [
        ("force", ("a",), {}),
        ("remove", ("a",), {}),
        ("reset", ("a",), {}),
        ("raise_era", (), {}),
        ("prune", (), {}),
        ("resume", ("a",), {"is_pattern": False}),
        ("resume", ("*",), {"is_pattern": True}),
    ],
)
def test_what_writes_or_decides_is_refused_by_name_during_a_move(way, verb, arguments, options):
    desk = Mover(way, retention_s=1000.0)
    desk.set(replace(MOVING, pauses=(ALL, Pause("a"))))
    before = desk.rig.entry("a")
    with pytest.raises(AdminError, match=WAITS):
        desk.do(verb, *arguments, **options)
    assert (desk.rig.entry("a"), desk.noted) == (before, [])
    assert desk.rig.play(desk.rig.ledger.controls()) == replace(MOVING, pauses=(ALL, Pause("a")))
    desk.set(Controls(target="pages-7", target_epoch=1, pauses=(ALL, Pause("a"))))
    desk.do(verb, *arguments, **options)
    assert len(desk.noted) == 1


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_repairs_are_refused_by_name_during_a_move(keys):
    desk = Mover()
    desk.set(MOVING)
    with pytest.raises(AdminError, match=WAITS):
        desk.rig.play(desk.repaired(*keys))
    desk.set(Controls())
    assert desk.rig.play(desk.repaired("a")) == {"a": "it is not suspect"}


def test_a_pause_is_set_also_during_a_move():
    desk = Mover()
    desk.set(MOVING)
    desk.do("pause", "a", is_pattern=False)
    controls = desk.rig.play(desk.rig.ledger.controls())
    assert (controls.move, [pause.keys for pause in controls.pauses]) == (MOVING.move, ["a"])


def test_a_command_that_waits_for_its_key_names_the_move_that_has_begun_meanwhile():
    desk = Mover()
    rig = desk.rig

    async def story() -> None:
        [held] = (await rig.ledger.claim([ChangeHeader("a", order_of(6))], LeaseTerms("w7", 1000.0))).granted
        forcing = asyncio.get_running_loop().create_task(desk.act("force", "a"))
        await rig.until(lambda: desk.told)
        assert desk.told[-1] == "'a' is held by w7"
        await desk.set_controls(MOVING)
        await rig.ledger.release([held])
        wanted = "the sink of 'test' moves to another target, which takes some seconds"
        await rig.until(lambda: desk.told[-1] == wanted)
        assert not forcing.done()
        await desk.set_controls(Controls(target="pages-7"))
        change = await forcing
        assert change.order == (0, 5, 1)

    rig.play(story())


@pytest.mark.parametrize(("state", "is_refused"), [(RunState.SCANNING, True), (RunState.COMPLETE, False)])
@pytest.mark.parametrize("verb", ["prune", "raise_era"])
def test_nothing_is_forgotten_or_renumbered_while_another_target_is_built(verb, state, is_refused):
    desk = Mover(retention_s=1000.0)
    desk.set(Controls(run=ReindexRun(7, state, into="pages-7"), pauses=(ALL,)))
    if is_refused:
        with pytest.raises(AdminError, match=r"reindex 7 of pipeline 'test' .*'pages-7'.*keywise reindex cancel test"):
            desk.do(verb)
        assert desk.noted == []
    else:
        desk.do(verb)
    desk.set(Controls(run=ReindexRun(7, RunState.SCANNING), pauses=(ALL,)))
    desk.do(verb)
    assert desk.noted, "a run in place does not mind"


def test_a_key_is_reset_forced_and_removed_while_another_target_is_built():
    desk = Mover()
    desk.set(BESIDE)
    for verb in ("force", "remove", "reset"):
        desk.do(verb, "a")
    assert [what for what, *_ in desk.noted] == ["forced", "removed", "reset"]
