"""Rules for switching a key from `off` to `on`: it stays in `observe` until all calls without a lock must have ended.

A switch to `on` or `observe` stores the end of that time in `observe_until`. The time is counted from the last moment
at which the keys were off, also if other switches were set since.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from keywise.core.serial.contract import Mode, Switch
from keywise.core.serial.rules import switch_of

EVERY_KEY = "*"


def settled(wanted: Switch, before: Sequence[Switch], default: Mode, usual_s: float) -> Switch:
    """A switch as it is to be set: until when it only observes is known by those that were set before."""
    if wanted.mode is Mode.OFF:
        return replace(wanted, observe_until=0.0)
    return replace(wanted, observe_until=_off_until(wanted, before, default, usual_s))


def removed(wanted: Switch, before: Sequence[Switch], default: Mode, usual_s: float) -> Switch | None:
    """What stands in for a switch that is to be removed, since its keys may still run off; None: nothing has to."""
    rest = [one for one in before if (one.keys, one.is_pattern) != (wanted.keys, wanted.is_pattern)]
    governing = _governing(wanted, rest)
    mode = default if governing is None else governing.mode
    until = _off_until(wanted, before, default, usual_s)
    return replace(wanted, mode=mode, observe_until=until) if until and mode is not Mode.OFF else None


def _off_until(wanted: Switch, before: Sequence[Switch], default: Mode, usual_s: float) -> float:
    """Until when some of the keys may still run off; 0: none does."""
    now = wanted.at
    if wanted.is_pattern:
        whole = [one for one in before if one.is_pattern and one.keys in (wanted.keys, EVERY_KEY)]
        since = max((one.at for one in whole), default=None)
        # Keys that have a switch of their own go by that, and older patterns do not count beside one for all of them.
        ruling = [one for one in before if one.is_pattern and (since is None or one.at >= since)]
        is_by_default = since is None
    else:
        governing = switch_of(wanted.keys, before)
        ruling = [] if governing is None else [governing]
        is_by_default = governing is None
    until = [now + usual_s if one.mode is Mode.OFF else one.observe_until for one in ruling]
    if is_by_default and default is Mode.OFF:
        until.append(now + usual_s)
    return max((one for one in until if one > now), default=0.0)


def _governing(wanted: Switch, rest: Sequence[Switch]) -> Switch | None:
    """The switch that counts for the keys without the one that is removed; of a pattern, for most of its keys."""
    if not wanted.is_pattern:
        return switch_of(wanted.keys, rest)
    return max((one for one in rest if one.is_pattern), key=lambda one: one.at, default=None)
