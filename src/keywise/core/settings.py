"""Every limit and duration, in one frozen value that is checked once."""

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from keywise.core.errors import SettingsError

HISTORIES = ("events", "all", "none")
LEDGER_DOWN = ("wait", "write-anyway")
_WORDS = ("history", "on_ledger_down", "journal")
"""Settings that are no numbers."""
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a pipeline works; the defaults suit most."""

    batch_max: int = 1000
    """The most changes in one batch."""
    prefetch: int = 4000
    """The most deliveries that one consumer holds; at most half of them may belong to blocked keys."""
    evict_delay_s: float = 0.5
    """How long a delivery stays away that found no room behind a blocked key; each further time twice as long."""
    evict_delay_max_s: float = 60.0
    """The longest time that such a delivery stays away."""
    concurrency: int = 16
    """The most handlers that run at the same time."""
    lease_s: float = 30.0
    """How long a claim lasts without renewal. The keys of a dead worker wait for as long."""
    margin_s: float = 2.0
    """How long before the end of its lease a worker stops using a claim, so that clocks may differ a little."""
    runtime_max_s: float = 600.0
    """A handler that runs for longer counts as hung, and its claim is no longer renewed."""
    redelivery_s: float = 3600.0
    """The longest time from the last attempt at a message to its next delivery, and from a commit to the sending of an
    older version."""
    retention_s: float | None = None
    """How long the ledger remembers an idle key at least; None: for ever. A delivery that was sent longer ago, to a key
    that the ledger does not remember, becomes a dead letter: the ledger cannot decide whether it is stale."""
    horizon_s: float = 120.0
    """How long after a key became suspect a late write may still take effect. A repair waits for as long."""
    attempts_max: int = 5
    """Attempts at one change before it becomes a dead letter."""
    crashes_max: int = 3
    """How many workers may die while they run one change alone before it becomes a dead letter."""
    backoff_s: float = 0.5
    """The first retry waits about so long; each further one twice as long."""
    backoff_max_s: float = 60.0
    poll_s: float = 0.5
    """How long a receive waits for the first message."""
    drain_s: float = 20.0
    """How long running work may continue after the first signal to stop."""
    repair_s: float = 10.0
    """How often a worker looks for suspect keys to repair."""
    body_max_bytes: int = 8 * 1024 * 1024
    history: str = "events"
    """What the history keeps: `events` (refusals, failures, takeovers, dead letters and operators' acts),
    `all` (applied changes too), or `none` (operators' acts only)."""
    history_age_s: float = 30 * 86400.0
    """How long a record of the history is kept."""
    history_lines_max: int = 100_000
    """The most records in the history of a pipeline; the oldest are deleted first."""
    maintenance_s: float = 60.0
    """How often one of the workers prunes keys and trims the history."""
    on_ledger_down: str = "wait"
    """What a worker does while it cannot reach the ledger: `wait`, or `write-anyway` (write without a claim, after the
    key was recorded in the journal; the key is suspect afterwards)."""
    ledger_grace_s: float = 5.0
    """The ledger counts as down after it has not answered for this long; a lost connection alone is no outage."""
    journal: str | None = None
    """The folder of the journal for `write-anyway`. It must outlive the worker and belong to one app."""
    journal_keys_max: int = 10_000
    """The most keys in the journal of one worker; beyond it, a full resync is due."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_whole = getattr(self, field.name), field.type in (int, "int")
            if field.name in _WORDS or (value is None and field.name == "retention_s"):
                continue
            name = public_name(field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SettingsError(f"{name}={value!r} must be a number")
            if not 0 < value < float("inf"):
                raise SettingsError(f"{name}={value} must be above zero, and finite")
            if is_whole and not isinstance(value, int):
                raise SettingsError(f"{name}={value} must be a whole number")
        if self.history not in HISTORIES:
            raise SettingsError(f"history={self.history!r} is not known; write one of {', '.join(HISTORIES)}")
        self._check_ledger_down()
        _check_margin(self.lease_s, self.margin_s)
        if self.runtime_max_s < self.lease_s:
            raise SettingsError(f"runtime_max={self.runtime_max_s} is below lease={self.lease_s}; raise it")
        if self.retention_s is not None and self.retention_s < self.redelivery_s:
            raise SettingsError(
                f"retention={self.retention_s} is below redelivery={self.redelivery_s}: a message could come back "
                "after its key was forgotten; raise retention, or lower redelivery if no message waits so long"
            )
        if self.prefetch < self.batch_max:
            raise SettingsError(
                f"prefetch={self.prefetch} is below batch_max={self.batch_max}: no batch could fill; raise prefetch"
            )

    def _check_ledger_down(self) -> None:
        if self.on_ledger_down not in LEDGER_DOWN:
            raise SettingsError(
                f"on_ledger_down={self.on_ledger_down!r} is not known; write one of {', '.join(LEDGER_DOWN)}"
            )
        journal: object = self.journal
        if journal is not None and (not isinstance(journal, str) or not journal):
            raise SettingsError(
                f"journal={self.journal!r} names no folder; write for example journal='/var/lib/shop/journal'"
            )
        if self.on_ledger_down == "write-anyway" and self.journal is None:
            raise SettingsError(
                "on_ledger_down='write-anyway' needs a folder for its notes, which outlives the worker (in a "
                "container: on a volume); write for example journal='/var/lib/shop/journal'"
            )

    def evict_s(self, deliveries: int) -> float:
        """How long a message stays away that finds no room at its first, second, … delivery.

        At most half of the redelivery time: its next delivery has to come in time for what the ledger remembers.
        """
        longest_s = min(self.evict_delay_max_s, max(self.evict_delay_s, self.redelivery_s / 2))
        return min(self.evict_delay_s * 2.0 ** min(max(deliveries, 1) - 1, 60), longest_s)

    def check_visibility(self, visibility_s: float | None, source: str) -> None:
        """Refuse a source whose deliveries come back while their claim still runs."""
        if visibility_s is not None and visibility_s < self.lease_s:
            raise SettingsError(
                f"lease={self.lease_s:g} is longer than the visibility of {source} ({visibility_s:g} s): "
                f"messages would come back while they are worked on; "
                f"set visibility={self.lease_s * 2:g}s on the source, or a shorter lease"
            )

    def check_ack_timeout(self, ack_timeout_s: float, source: str) -> None:
        """Refuse a source that takes deliveries back while a handler may still work on them."""
        if ack_timeout_s <= self.runtime_max_s:
            raise SettingsError(
                f"runtime_max={self.runtime_max_s:g} is not below the acknowledgement timeout of {source} "
                f"({ack_timeout_s:g} s): its broker would end the channel while a handler works; lower runtime_max, "
                "or raise consumer_timeout at the broker and say so with ack_timeout="
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialSettings:
    """How a serial function works; the defaults suit most."""

    timeout_s: float = 30.0
    """How long a caller waits for its answer, unless it says otherwise."""
    concurrency: int = 16
    """Keys that one process works on side by side, at the most."""
    lease_s: float = 30.0
    """A process that was not heard of for so long is lost: its keys go on, and what it ran is not run again."""
    margin_s: float = 2.0
    """How much earlier than the store a process considers itself lost, and breaks off what it runs."""
    attempts_max: int = 5
    """Tries at one request whose function says that nothing happened, and turns of one that writes in the store's own
    transaction and whose runners were lost; all of them inside of its deadline."""
    backoff_s: float = 0.05
    """The first retry waits about so long; each further one twice as long."""
    backoff_max_s: float = 2.0
    run_s: float = 0.005
    """Turns of one key are taken together as long as they are over after about so long. If the process dies, all of
    them are lost, though some had not begun."""
    transaction_s: float = 0.02
    """Calls that write in the store's own transaction share one, those of several keys too, as long as it is over after
    about so long."""
    poll_s: float = 0.5
    """How often a process that waits looks by itself."""
    view_s: float = 2.0
    """How often a process that is called asks for the switches; for so long it may take a key to be off that is on."""
    drain_s: float = 20.0
    """How long running work may go on after the app was closed."""
    retention_s: float = 7 * 86400.0
    """How long answers and the history are kept; the same id that comes later is run again."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            name = public_name(field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise SettingsError(f"{name}={value!r} must be a number above zero, and finite")
            if field.type in (int, "int") and not isinstance(value, int):
                raise SettingsError(f"{name}={value} must be a whole number")
        _check_margin(self.lease_s, self.margin_s)


def public_name(field: str) -> str:
    """The name under which people give a setting: durations carry their unit in the value."""
    return field.removesuffix("_s")


def named_settings(options: Mapping[str, Any], known: Collection[str], words: Collection[str] = ()) -> dict[str, Any]:
    """Turn options into the fields of settings; an unknown one is refused with the nearest known one.

    `words` are other options of the caller, which a misspelt one may mean as well.
    """
    fields_by_name = {public_name(field): field for field in known}
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name not in fields_by_name:
            raise unknown_setting(name, {*fields_by_name, *words})
        field = fields_by_name[name]
        given[field] = seconds(value) if field != name and value is not None else value
    return given


def unknown_setting(name: str, known: Collection[str]) -> SettingsError:
    """The refusal of an option, which says what to write instead."""
    near = difflib.get_close_matches(name, known, 1)
    if name != public_name(name) and public_name(name) in known:
        hint = f"write {public_name(name)}="
    elif near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = f"known are: {', '.join(sorted(known))}"
    return SettingsError(f"unknown setting {name!r}; {hint}")


def _check_margin(lease_s: float, margin_s: float) -> None:
    """The one who set a short lease may never have heard of the margin."""
    if margin_s >= lease_s / 2:
        raise SettingsError(
            f"lease={lease_s:.10g}s is too short for margin={margin_s:.10g}s, which is 2s unless it is set: "
            f'write margin="{lease_s / 4:.10g}s" as well, or a lease above {2 * margin_s:.10g}s; '
            "the margin has to be below half of the lease"
        )


def seconds(duration: float | str) -> float:
    """Seconds from a number or from text such as `500ms`, `5s`, `10m`, `2h`, `7d`."""
    if isinstance(duration, int | float) and not isinstance(duration, bool) and not math.isnan(duration):
        return float(duration)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", str(duration).strip())
    if match is None:
        raise SettingsError(f"duration {duration!r} is not understood; write for example 500ms, 5s, 10m, 2h or 7d")
    return float(match[1]) * UNITS_S[match[2]]
