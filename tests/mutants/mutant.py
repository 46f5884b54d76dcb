"""One broken variant, and how it takes the place of the sound one."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from keywise.core.sink import Grade

EVERYWHERE = (Grade.PLAIN, Grade.CONDITIONAL, Grade.ATOMIC)
LEASED = (Grade.PLAIN, Grade.CONDITIONAL)
MISTAKES = (TypeError, AttributeError, NameError, LookupError, AssertionError, ValueError)
"""A variant that raises one of these does not fit the code any more, which shows nothing."""


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
    def alive(self) -> Iterator[list[str]]:
        """The variant is in place meanwhile; yields the errors that it raises and that its sound form never would."""
        sound, errors = self.owner.__dict__[self.attribute], list[str]()
        setattr(self.owner, self.attribute, _watched(self.broken, errors))
        try:
            yield errors
        finally:
            setattr(self.owner, self.attribute, sound)


def _watched(broken: Callable[..., Any], errors: list[str]) -> Callable[..., Any]:
    """Note the mistakes of a variant: somebody may swallow them, and what follows looks as if a rule were broken."""

    @contextmanager
    def watching() -> Iterator[None]:
        try:
            yield
        except MISTAKES as error:
            errors.append(f"{type(error).__name__}: {error}")
            raise

    @functools.wraps(broken)
    def called(*arguments: Any, **options: Any) -> Any:
        with watching():
            return broken(*arguments, **options)

    @functools.wraps(broken)
    async def awaited(*arguments: Any, **options: Any) -> Any:
        with watching():
            return await broken(*arguments, **options)

    return awaited if inspect.iscoroutinefunction(broken) else called
