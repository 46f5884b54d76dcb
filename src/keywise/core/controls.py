"""The controls of a pipeline: its era, its pauses, its last reindex, its target, and whether a resync is due."""

import enum
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

import msgspec

EVERYTHING = "*"
PAUSE_MAX_S = 5.0
"""How long a swap may keep changes waiting, if the operator does not say."""
SAMPLE_KEYS = 500
"""How many keys the gate of a swap compares with the origin, if the operator does not say."""


class Pause(msgspec.Struct, frozen=True):
    """An operator's pause of one key, or of all keys that match a pattern."""

    keys: str
    """A key, or a pattern with `*`, `?` and `[abc]`."""
    is_pattern: bool = False
    at: float = 0.0
    """When it was set, by the store's clock."""
    by: str = ""
    why: str = ""

    def covers(self, key: str) -> bool:
        return fnmatchcase(key, self.keys) if self.is_pattern else key == self.keys


class RunState(enum.StrEnum):
    """How far a reindex has come."""

    STARTING = "starting"
    """Its target is being created, and its shards are being written to the ledger; no worker reads them yet.

    If its start is interrupted, the next start writes all of its shards again.
    """
    SCANNING = "scanning"
    SWEEPING = "sweeping"
    """All shards are read. Postponed rows are written; in place, keys that the run has not written are looked up."""
    CATCHING_UP = "catching up"
    """The other target has all rows, and follows the live one until the swap."""
    COMPLETE = "complete"
    CANCELLED = "cancelled"


class ReindexRun(msgspec.Struct, frozen=True):
    """A run over the rows of an origin: it writes each again at its generation, or fills another target with them."""

    generation: int
    state: RunState = RunState.STARTING
    is_paused: bool = False
    shards: int = 0
    """How many shards the run has. The ledger may have more: those from this number on are of earlier runs."""
    is_partial: bool = False
    """The run reads only some rows. It cannot know which keys are gone, so its sweep writes postponed rows only."""
    starts: int = 0
    """How many starts have begun to write its shards: one that is interrupted is completed by another one."""
    starter: str = ""
    """The process of the last of these starts."""
    also_removed: bool = False
    """Also write rows at a version that an operator has removed."""
    delete_max: int | None = None
    """How many gone keys the run may delete without the operator's consent; None: 1 %, and at most 1,000."""
    started_at: float = 0.0
    """By the store's clock."""
    ended_at: float = 0.0
    by: str = ""
    why: str = ""
    into: str = ""
    """The target that the run fills beside the live one; empty for a run in place."""
    live: str = ""
    """The target that was live when a run beside began."""
    is_rollback: bool = False
    """The target was live before, so the run reads no rows: it only catches up and swaps."""
    swaps: bool = False
    """An operator has requested a swap to `into`, as soon as the gate allows it."""
    is_dropped: bool = False
    """The target that this run had filled was dropped after its end."""
    accept_dead: int = 0
    """How many rows may be missing in the target at the swap: dead letters, or keys that could not be written."""
    pause_max_s: float = PAUSE_MAX_S
    """How long a swap may keep changes waiting."""
    sample_keys: int = SAMPLE_KEYS
    """How many keys the gate of a swap compares with the origin."""
    notify: str = ""
    """The URL that gets a notice when the run has ended; `${NAME}` in it stands for a secret. Empty: no notice."""
    is_notified: bool = False
    """The notice was sent."""

    @property
    def identity(self) -> tuple[int, str, float]:
        """What distinguishes this run from any other: a rollback has the generation of the run before it."""
        return self.generation, self.into, self.started_at

    @property
    def is_beside(self) -> bool:
        """Whether the run fills another target beside the live one."""
        return bool(self.into)

    @property
    def is_active(self) -> bool:
        return self.state not in (RunState.COMPLETE, RunState.CANCELLED)


class Move(msgspec.Struct, frozen=True):
    """The barrier of a swap: the name of the sink moves to another target, and the ledger grants no claim meanwhile."""

    before: str
    """The target that the name stands for."""
    after: str
    token: int
    """The token of the claim under which a worker swaps; the next holder of that claim takes the barrier over."""
    is_called: bool = False
    """The store was asked to move the name, so it may have moved: from here on the swap only goes forward."""


class Controls(msgspec.Struct, frozen=True, dict=True):
    """The current controls of a pipeline. A ledger reads them in the same atomic step in which it decides a claim."""

    era: int = 0
    pauses: tuple[Pause, ...] = ()
    move: Move | None = None
    """The barrier of a swap. The shortcuts of the stores compare the text of these three fields, so they come first."""
    resync_at: float = 0.0
    """Since when a full resync is due, by the store's clock; 0 if none is.

    It is due after an outage in which more keys were written without the ledger than the journal can hold.
    """

    scale: str = ""
    """The scale of the versions of an object pipeline, fixed by its first event; empty before that, and for others."""

    run: ReindexRun | None = None
    """The last reindex, which may still be going on."""
    generation: int = 0
    """The highest generation of any run."""
    target: str = ""
    """The target that the name of the sink stands for since the last swap; empty before the first."""
    spare: str = ""
    """The target that was live before the last swap, and can be again; empty if there is none, or it was dropped."""
    spare_generation: int = 0
    """The generation of the run whose scope in the ledger describes the spare."""
    kept: tuple[str, ...] = ()
    """Targets that an operator has dropped and left in their store on purpose, so no run deletes them."""
    target_epoch: int = 0
    """How many swaps there were, rollbacks included."""
    swap_token: int = 0
    """The token of the last claim under which a worker has changed the controls for a swap. Tokens grow, so a worker
    that was stopped and has lost its claim finds a higher one, and changes nothing."""

    @property
    def is_plain(self) -> bool:
        """Whether the mark alone decides: neither an era, a pause nor a barrier is set."""
        return not self.era and not self.pauses and self.move is None

    @property
    def is_paused(self) -> bool:
        """Whether the whole pipeline is paused."""
        return any(pause.is_pattern and pause.keys == EVERYTHING for pause in self.pauses)

    @property
    def run_beside(self) -> ReindexRun | None:
        """The run that fills another target beside the live one now; None if there is none."""
        return self.run if self.run is not None and self.run.is_beside and self.run.is_active else None

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(pause.keys for pause in self.pauses if not pause.is_pattern)

    @cached_property
    def _patterns(self) -> tuple[Pause, ...]:
        return tuple(pause for pause in self.pauses if pause.is_pattern)

    def pauses_key(self, key: str) -> bool:
        return key in self._keys or any(pause.covers(key) for pause in self._patterns)

    def with_pause(self, pause: Pause) -> "Controls":
        """Return a copy with a pause, which replaces one of the same keys."""
        others = self.without(pause.keys, pause.is_pattern)
        return msgspec.structs.replace(others, pauses=(*others.pauses, pause))

    def with_era_above(self, highest: int) -> "Controls":
        """Return a copy with a new era, above the current one and above the highest era of any key."""
        return msgspec.structs.replace(self, era=1 + max(self.era, highest))

    def without(self, keys: str, is_pattern: bool) -> "Controls":
        """Return a copy without one pause, which is named exactly as it was set."""
        others = tuple(pause for pause in self.pauses if (pause.keys, pause.is_pattern) != (keys, is_pattern))
        return msgspec.structs.replace(self, pauses=others)

    def with_scale(self, scale: str) -> "Controls":
        """Return a copy with a scale of versions. One that is fixed stays."""
        return self if self.scale else msgspec.structs.replace(self, scale=scale)

    def with_resync(self, is_due: bool | None, now: float) -> "Controls":
        """Return a copy in which a full resync is due (True), not due (False) or unchanged (None).

        A resync that is already due keeps its start time.
        """
        if is_due is None or (is_due and self.resync_at):
            return self
        return msgspec.structs.replace(self, resync_at=now if is_due else 0.0)


PLAIN = Controls()


@lru_cache(maxsize=16)
def controls_of(text: str | bytes) -> Controls:
    """Read what `text_of` wrote. The result is cached: a ledger reads it in every batch, and it seldom changes."""
    return PLAIN if text == "{}" else msgspec.json.decode(text, type=Controls)


def text_of(controls: Controls) -> str:
    """Return controls as a database keeps them."""
    return msgspec.json.encode(controls).decode() if controls != PLAIN else "{}"
