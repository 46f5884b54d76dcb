"""Selects the dead letters that a command works on: by number, by time, by cause, or all of them."""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from keywise.cli.output import fail, iso, refuse
from keywise.core.dead_letter import DeadLetter, DeadLetterFilter
from keywise.core.errors import SettingsError
from keywise.core.settings import seconds
from keywise.flow.pipeline import OpenPipeline
from keywise.reindex.targets import target_beside

T = TypeVar("T")

PAGE = 100
"""How many letters a search by number reads first; each further read doubles it."""


class FoundLetter(msgspec.Struct):
    """A dead letter, and the pipeline that it belongs to."""

    pipeline: OpenPipeline
    number: int
    at: float
    """When it was stored, by the wall clock."""
    letter: DeadLetter


def _time_option(name: str, meaning: str) -> Any:
    """Return an option for a time.

    A duration means that long ago. A time without a zone is UTC, as in all output.
    """

    def parse(text: str) -> float:
        try:
            return time.time() - seconds(text)
        except SettingsError:
            pass
        try:
            moment = datetime.fromisoformat(text.removesuffix(" UTC"))
        except ValueError:
            refuse(f"{name}: {text!r} is no time; write 90m for 90 minutes ago, 2d, or 2026-01-31T12:00")
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()

    return typer.Option(parser=parse, metavar="TIME", help=f"{meaning}: 2h for 2 h ago, or 2026-01-31T12:00.")


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The letters to select; times are those of the wall clock."""

    since: Annotated[float | None, _time_option("--since", "Set aside since")] = None
    until: Annotated[float | None, _time_option("--until", "Set aside before")] = None
    cause: Annotated[str, typer.Option(metavar="TEXT", help="Whose cause contains this text.")] = ""

    def __bool__(self) -> bool:
        return self != Filter()

    def dead_letter_filter(self, ahead_s: float) -> DeadLetterFilter:
        """Convert to the clock of the store, which is `ahead_s` behind the wall clock."""
        given = {"since": self.since, "until": self.until}
        return DeadLetterFilter(
            cause=self.cause, **{name: at - ahead_s for name, at in given.items() if at is not None}
        )


async def newest(pipeline: OpenPipeline, limit: int, selection: Filter) -> list[FoundLetter]:
    """Return the newest selected letters of a pipeline."""
    ahead_s = time.time() - await pipeline.admin.now()
    letters = await pipeline.admin.dead_letters(limit, selection.dead_letter_filter(ahead_s))
    return [FoundLetter(pipeline, number, at + ahead_s, letter) for number, at, letter in letters]


async def look_beside(look: Callable[[list[OpenPipeline]], Awaitable[T]], pipelines: Sequence[OpenPipeline]) -> T:
    """Look at the letters of rows for targets beside the live ones; exit if there is no such target."""
    async with AsyncExitStack() as stack:
        others = []
        for pipeline in pipelines:
            found = target_beside(await pipeline.control_store.controls())
            if found is not None and pipeline.open_target is not None:
                others.append(await stack.enter_async_context(pipeline.open_target(*found)))
        if not others:
            fail("there is no target beside a live one; without --beside, see all other letters")
        return await look(others)


async def selected(pipelines: list[OpenPipeline], numbers: list[int], selection: Filter) -> list[FoundLetter]:
    """Return the letters with these numbers, or all selected ones if no number is given; the oldest first."""
    if numbers:
        found = await by_number(pipelines, numbers)
    else:
        counted = [(opened, (await opened.admin.counts()).dead) for opened in pipelines]
        found = [one for opened, dead in counted if dead for one in await newest(opened, dead, selection)]
    return sorted(found, key=lambda one: one.number)


async def by_number(pipelines: list[OpenPipeline], numbers: list[int]) -> list[FoundLetter]:
    """Return the letters with these numbers; exit if one does not exist, or exists in several pipelines."""
    found = [one for opened in pipelines for one in await _search(opened, set(numbers))]
    known = [one.number for one in found]
    missing = sorted(set(numbers) - set(known))
    if missing:
        fail(f"no dead letter has the number {' or '.join(map(str, missing))}; see keywise dead list")
    if len(known) > len(set(known)):
        refuse("more than one pipeline has a letter of that number; say which with --pipeline")
    return found


async def _search(pipeline: OpenPipeline, numbers: set[int]) -> list[FoundLetter]:
    limit = PAGE
    while True:
        letters = await newest(pipeline, limit, Filter())
        found = [one for one in letters if one.number in numbers]
        if len(letters) < limit or len(found) == len(numbers):
            return found
        limit *= 2


def summary(found: FoundLetter) -> dict[str, Any]:
    """Return the main fields of a letter as JSON."""
    letter = found.letter
    return {
        "number": found.number,
        "at": iso(found.at),
        "pipeline": found.pipeline.name,
        "key": letter.key or None,
        "version": letter.version,
        "cause": letter.cause,
    }
