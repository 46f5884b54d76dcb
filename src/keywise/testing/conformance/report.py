"""What became of a plug's promises: each is kept, broken, or could not be checked, and says why."""

import asyncio
import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

from keywise.core.errors import SettingsError
from keywise.testing.conformance.promise import BrokenPromiseError, Promise, UncheckedError

PROMISE_MAX_S = 300.0

Bench = TypeVar("Bench")


class Verdict(enum.StrEnum):
    """What became of one promise."""

    KEPT = "kept"
    BROKEN = "broken"
    UNCHECKED = "unchecked"


class Checked(msgspec.Struct, frozen=True):
    """One promise, after its check."""

    name: str
    """Of the check."""
    text: str
    """The sentence that is promised."""
    verdict: Verdict
    why: str = ""
    """What was seen instead, or why it could not be checked."""

    def __str__(self) -> str:
        return f"{self.verdict.value:<9}  {self.text}{f' But {self.why}' if self.why else ''}"


class Conformance(msgspec.Struct):
    """All promises of one plug. It is true if none of them is broken, and prints one line for each."""

    role: str
    checked: list[Checked] = []

    def __bool__(self) -> bool:
        return not self.of(Verdict.BROKEN)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checked), self.summary])

    @property
    def summary(self) -> str:
        kept, broken, unchecked = (len(self.of(verdict)) for verdict in Verdict)
        text = f"{kept} promises kept, {broken} broken"
        return f"{text}, {unchecked} not checked" if unchecked else text

    def of(self, verdict: Verdict) -> list[Checked]:
        return [one for one in self.checked if one.verdict is verdict]


class NotConformingError(BrokenPromiseError):
    """A plug broke promises of its protocol: the message has all of them, and `report` the others too."""

    def __init__(self, report: Conformance) -> None:
        broken = report.of(Verdict.BROKEN)
        super().__init__("\n".join(f"{one.text} But {one.why}" for one in broken))
        self.report = report


async def hold(
    role: str,
    promises: Sequence[Promise[Bench]],
    make: Callable[..., AbstractAsyncContextManager[Bench]],
    on_checked: Callable[[Checked], None] | None,
) -> Conformance:
    """Check all promises, one after another, each on a bench of its own; raise in the end if one is broken."""
    report = Conformance(role)
    for promise in promises:
        checked = await _checked(promise, make)
        report.checked.append(checked)
        if on_checked is not None:
            on_checked(checked)
    if not report:
        raise NotConformingError(report)
    return report


async def _checked(promise: Promise[Bench], make: Callable[..., AbstractAsyncContextManager[Bench]]) -> Checked:
    try:
        async with asyncio.timeout(PROMISE_MAX_S):
            await promise(make)
    except UncheckedError as error:
        return Checked(promise.name, promise.text, Verdict.UNCHECKED, str(error))
    except BrokenPromiseError as error:
        return Checked(promise.name, promise.text, Verdict.BROKEN, error.seen)
    except SettingsError:
        raise
    except Exception as error:
        why = f"{type(error).__name__} was raised: {error}" if str(error) else f"{type(error).__name__} was raised."
        return Checked(promise.name, promise.text, Verdict.BROKEN, why)
    return Checked(promise.name, promise.text, Verdict.KEPT)
