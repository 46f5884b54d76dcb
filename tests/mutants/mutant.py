"""One broken variant, and how it takes the place of the sound one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from keywise.core.sink import Grade

EVERYWHERE = (Grade.PLAIN, Grade.CONDITIONAL, Grade.ATOMIC)
LEASED = (Grade.PLAIN, Grade.CONDITIONAL)


class Mutant(msgspec.Struct, frozen=True):
    """What is put in place of what, and on which grade it must be seen."""

    name: str
    rule: int
    """Its number in the protocol section of the architecture."""
    owner: Any
    attribute: str
    broken: Callable[..., Any]
    grade: Grade = Grade.PLAIN

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The variant is in place meanwhile."""
        sound = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.broken)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, sound)
