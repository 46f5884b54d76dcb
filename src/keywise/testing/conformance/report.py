"""The verdict on each promise of an adapter: kept, broken or unchecked, and why."""

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
    """The result of one check."""

    KEPT = "kept"
    BROKEN = "broken"
    UNCHECKED = "unchecked"


class Checked(msgspec.Struct, frozen=True):
    """One promise, with the result of its check."""

    name: str
    """The name of the check."""
    text: str
    """The sentence of the promise."""
    verdict: Verdict
    why: str = ""
    """What was observed instead, or why the promise could not be checked."""

    def __str__(self) -> str:
        return f"{self.verdict.value:<9}  {self.text}{f' But {self.why}' if self.why else ''}"


class Conformance(msgspec.Struct):
    """The verdicts on all promises of one adapter. It is true if none is broken, and prints one line for each."""

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
    """An adapter broke promises of its contract. The message lists them; `report` has the verdicts on all."""

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
    """Check all promises one after another, each with a fixture of its own; raise at the end if one is broken."""
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
