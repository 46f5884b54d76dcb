"""From off to on, keys are observed until nobody runs them off any more, whatever is switched in between."""

from msgspec.structs import replace

from keywise.core.serial.contract import Mode, Switch
from keywise.serial.mode_transitions import removed, settled

USUAL_S = 10.0
ON, OBSERVE, OFF = Mode.ON, Mode.OBSERVE, Mode.OFF


def switch(mode: Mode, at: float, keys: str = "a") -> Switch:
    return Switch(keys=keys, mode=mode, is_pattern="*" in keys, at=at)


def after(*wanted: Switch, default: Mode = ON) -> list[Switch]:
    """The switches that are set by one command after another."""
    found: dict[tuple[str, bool], Switch] = {}
    for one in wanted:
        found[one.keys, one.is_pattern] = settled(one, list(found.values()), default, USUAL_S)
    return list(found.values())


def until(*wanted: Switch, default: Mode = ON) -> float:
    return after(*wanted, default=default)[-1].observe_until


def test_keys_that_were_off_are_observed_first():
    assert until(switch(OFF, 100), switch(ON, 200)) == 210
    assert until(switch(ON, 200)) == 0
    assert until(switch(ON, 200), default=OFF) == 210
    assert until(switch(OBSERVE, 100), switch(ON, 200)) == 0


def test_who_switches_again_changes_nothing_of_that():
    assert until(switch(OFF, 100), switch(ON, 200), switch(ON, 203)) == 210
    assert until(switch(OFF, 100), switch(OBSERVE, 200), switch(ON, 203)) == 210
    assert until(switch(OFF, 100), switch(OBSERVE, 200), switch(ON, 211)) == 0
    assert until(switch(ON, 200), switch(ON, 203), default=OFF) == 210
    assert until(switch(ON, 200), switch(ON, 211), default=OFF) == 0
    assert until(switch(OFF, 100), switch(ON, 200), switch(OFF, 203), switch(ON, 205)) == 215


def test_what_counts_is_the_switch_that_was_in_force():
    assert until(switch(OFF, 100, "*"), switch(ON, 200)) == 210
    assert until(switch(ON, 90), switch(OFF, 100, "*"), switch(ON, 200)) == 0
    assert until(switch(OFF, 100, "b"), switch(ON, 200)) == 0
    assert until(switch(OFF, 100, "a*"), switch(ON, 200, "*")) == 210
    assert until(switch(OFF, 100, "*"), switch(ON, 150, "a*"), switch(ON, 152, "a*")) == 160
    assert until(switch(OFF, 100, "a*"), switch(ON, 150, "*"), switch(ON, 200, "*")) == 0
    assert until(switch(OFF, 100, "b"), switch(ON, 200, "*")) == 0


def taken_away(keys: str, *wanted: Switch, default: Mode = ON) -> tuple[Mode, float] | None:
    made = removed(switch(ON, 203, keys), after(*wanted, default=default), default, USUAL_S)
    return None if made is None else (made.mode, made.observe_until)


def test_what_is_removed_settles_too():
    assert taken_away("a", switch(OFF, 100)) == (ON, 213)
    assert taken_away("a", switch(OFF, 100), switch(ON, 200)) == (ON, 210)
    assert taken_away("a", switch(OFF, 100), default=OBSERVE) == (OBSERVE, 213)
    assert taken_away("a", switch(OFF, 100), default=OFF) is None
    assert taken_away("a", switch(ON, 100)) is None
    assert taken_away("a", switch(OFF, 100), switch(ON, 190)) is None


def test_what_is_removed_leaves_the_keys_to_other_switches():
    assert taken_away("a", switch(ON, 50, "*"), switch(OFF, 100), default=OFF) == (ON, 213)
    assert taken_away("a", switch(OFF, 50, "*"), switch(OFF, 100)) is None
    assert taken_away("*", switch(OBSERVE, 50, "a*"), switch(OFF, 100, "*")) == (OBSERVE, 213)


def test_off_is_off_at_once():
    [made] = after(replace(switch(OFF, 200), observe_until=300.0))
    assert made.observe_until == 0
