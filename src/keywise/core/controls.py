"""What an operator has set for a whole pipeline: its era, and which keys are paused."""

from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

import msgspec

EVERYTHING = "*"


class Pause(msgspec.Struct, frozen=True):
    """An operator's word that a key, or all keys like a pattern, are not to be worked on."""

    keys: str
    """A key, or a pattern with `*`, `?` and `[abc]`."""
    is_pattern: bool = False
    at: float = 0.0
    """By the store's clock."""
    by: str = ""
    why: str = ""

    def covers(self, key: str) -> bool:
        return fnmatchcase(key, self.keys) if self.is_pattern else key == self.keys


class Controls(msgspec.Struct, frozen=True, dict=True):
    """What holds for all keys of a pipeline now. A ledger reads it in the step in which it decides."""

    era: int = 0
    pauses: tuple[Pause, ...] = ()
    resync_at: float = 0.0
    """Since when a full resync is due, by the store's clock: more keys are in doubt than were noted. 0: it is not."""

    @property
    def is_plain(self) -> bool:
        """Nobody has set anything."""
        return not self.era and not self.pauses

    @property
    def is_paused(self) -> bool:
        """Every key is paused."""
        return any(pause.is_pattern and pause.keys == EVERYTHING for pause in self.pauses)

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(pause.keys for pause in self.pauses if not pause.is_pattern)

    @cached_property
    def _patterns(self) -> tuple[Pause, ...]:
        return tuple(pause for pause in self.pauses if pause.is_pattern)

    def pauses_key(self, key: str) -> bool:
        return key in self._keys or any(pause.covers(key) for pause in self._patterns)

    def with_pause(self, pause: Pause) -> "Controls":
        """The same with a pause; one of the same keys is replaced."""
        others = self.without(pause.keys, pause.is_pattern)
        return msgspec.structs.replace(others, pauses=(*others.pauses, pause))

    def with_era_above(self, highest: int) -> "Controls":
        """The same with an era above its own and above the highest that a key has."""
        return msgspec.structs.replace(self, era=1 + max(self.era, highest))

    def without(self, keys: str, is_pattern: bool) -> "Controls":
        """The same without one pause, named as it was made."""
        others = tuple(pause for pause in self.pauses if (pause.keys, pause.is_pattern) != (keys, is_pattern))
        return msgspec.structs.replace(self, pauses=others)

    def with_resync(self, is_due: bool | None, now: float) -> "Controls":
        """The same with a full resync that is due since now, unless it is already; False ends it, None leaves it."""
        if is_due is None or (is_due and self.resync_at):
            return self
        return msgspec.structs.replace(self, resync_at=now if is_due else 0.0)


PLAIN = Controls()


@lru_cache(maxsize=16)
def controls_of(text: str) -> Controls:
    """What `text_of` wrote. A ledger reads it in every batch, and it seldom changes."""
    return PLAIN if text == "{}" else msgspec.json.decode(text, type=Controls)


def text_of(controls: Controls) -> str:
    """Controls as a database keeps them."""
    return msgspec.json.encode(controls).decode() if controls != PLAIN else "{}"
