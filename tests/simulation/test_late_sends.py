"""What a simulated producer sends later than was declared may be applied, and nothing else that is old."""

from dataclasses import replace

import pytest

from keywise.core.sink import Grade
from keywise.testing.simulator.world import World

KEY = "key-0"


def world_that_forgets() -> World:
    world = World(1, Grade.ATOMIC)
    world.settings = replace(world.settings, retention_s=30.0)
    world.auditor.committed[KEY] = (0, 2, 0)
    world.auditor._committed_at[KEY] = world.store_now()
    world.auditor.write(KEY, (0, 2, 0), deleted=False)
    return world


@pytest.mark.parametrize(("late_s", "is_excused"), [(29.0, False), (31.0, True)])
def test_an_old_version_is_excused_only_if_it_was_sent_too_late(late_s: float, is_excused: bool):
    world = world_that_forgets()
    world.store_ahead_s += late_s
    world.auditor.sent(KEY, (0, 1, 0))
    world.auditor.write(KEY, (0, 1, 0), deleted=False)
    assert (world.auditor.violations == []) is is_excused


def test_another_old_version_of_the_same_key_is_not_excused():
    world = world_that_forgets()
    world.store_ahead_s += 31.0
    world.auditor.sent(KEY, (0, 1, 0))
    world.auditor.write(KEY, (0, 0, 0), deleted=False)
    assert world.auditor.violations == [f"{KEY}: v0 written after v2"]
