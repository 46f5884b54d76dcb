"""What an operator has set for a whole pipeline: its era, and which keys are paused."""

from fnmatch import fnmatchcase

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


class Standing(msgspec.Struct, frozen=True):
    """What holds for all keys of a pipeline now. A ledger reads it in the step in which it decides."""

    era: int = 0
    pauses: tuple[Pause, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nobody has set anything."""
        return not self.era and not self.pauses

    @property
    def is_paused(self) -> bool:
        """Every key is paused."""
        return any(pause.is_pattern and pause.keys == EVERYTHING for pause in self.pauses)

    def pauses_key(self, key: str) -> bool:
        return any(pause.covers(key) for pause in self.pauses)


PLAIN = Standing()
