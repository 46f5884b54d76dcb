"""`keywise why KEY`: all that is known of one key, and what would happen to it next."""

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from keywise.app import App
from keywise.cli.app_loader import AppOption, JsonOption, PipelineOption, chosen, load, warn_of_memory
from keywise.cli.commands.status import told_pause
from keywise.cli.output import (
    cell,
    count,
    display,
    duration,
    fail,
    moment,
    refuse,
    screen,
    stamp,
    table,
    tell_json,
    with_moments,
)
from keywise.core.history import HistoryRecord
from keywise.operate.inspect import LETTERS_MAX, LINES_SHOWN, Meeting, Story, story_of

LETTERS_SHOWN = 10
MOMENTS = {"now", "at", "kept_until", "since", "until", "next_at", "repair_at"}
"""Fields of a story that are moments."""

MEETS = {
    "granted": "is applied",
    "stale": "is stale: acked, nothing is written",
    "duplicate": "is a duplicate: acked, nothing is written",
    "busy": "waits for the key{wait}",
    "deferred": "waits for the newer write whose outcome is unknown{wait}",
    "isolated": "is applied, with nothing beside it, because the last holder died at work",
    "paused": "waits until its key is resumed",
    "limited": "waits for the rate of its key{wait}",
    "mixed": "becomes a dead letter: versioned and unversioned changes of one key have no order",
}

REASONS = {
    "stale": "something newer was committed already",
    "duplicate": "this version was committed already",
    "superseded": "something newer was committed while it waited",
    "claim lost": "somebody else has the key since",
    "taken over": "from a worker whose lease ran out",
}
"""Why a line of the history says what it says."""


def why(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    app: AppOption = None,
    pipeline: PipelineOption = None,
    lines: Annotated[int, typer.Option("--lines", metavar="N", min=0, help="How much of its history.")] = LINES_SHOWN,
    json: JsonOption = False,
) -> None:
    """Explain one key, and what happens next.

    Shows its mark, claim, failed tries, suspicion and dead letters, whether it is paused or limited,
    what a change to it would meet now, and what happened to it, newest first: which versions were refused, and why.

    Exits with status 1 if no pipeline knows the key.

    \b
    Example:
      keywise why page-17 --app shop:app
    """
    loaded = load(app)
    names = chosen(loaded, [pipeline])
    if not key:
        refuse("the key is empty; name one, as in keywise why page-17")
    if not _is_text(key):
        refuse(f"{key!r} is no UTF-8 text, so it cannot be a key")
    warn_of_memory(loaded)
    stories = asyncio.run(_stories(loaded, names, key, lines))
    if json:
        tell_json({"key": key, "pipelines": [with_moments(msgspec.to_builtins(story), MOMENTS) for story in stories]})
    for story in stories if not json else ():
        _tell(story)
    if not stories:
        fail(
            f"no change to {key!r} was committed, tried or set aside in {', '.join(names)}; it may still be queued "
            "(see keywise status), or its messages name another key"
        )


async def _stories(app: App, names: list[str], key: str, lines: int) -> list[Story]:
    stories = []
    for name in names:
        async with app.open(name, work=False) as opened:
            story = await story_of(opened, key, time.time(), lines)
            if story is not None:
                stories.append(story)
    return stories


def _tell(story: Story) -> None:
    facts = table("", "", fold=("",))
    facts.show_header = False
    for name, fact in _facts(story):
        facts.add_row(Text(name, "bold"), cell(fact))
    facts.add_row()
    facts.add_row(Text("next", "bold"), "a change that arrives now:")
    for meeting in story.next:
        wait = f", at most {duration(meeting.wait_s)}" if meeting.wait_s else ""
        facts.add_row("", f"{_range(meeting):<24} {MEETS[meeting.answer].format(wait=wait)}")
    screen().print(cell(f"{story.key!r} in {story.pipeline} ({story.grade})", "bold"))
    display(facts)
    if story.history:
        print()
        display(_history(story))
    print()


def _facts(story: Story) -> Iterator[tuple[str, str]]:
    """What is known, as lines with a name; only what is there, or whose absence says something."""
    yield from _about_mark(story)
    yield from _about_orders(story)
    yield from _about_claim(story)
    yield from _about_tries(story)
    yield from _about_suspicion(story)
    yield from _about_letters(story)


def _about_mark(story: Story) -> Iterator[tuple[str, str]]:
    mark = story.mark
    if mark is None:
        yield "mark", "none: nothing was committed yet"
        return
    era = f", era {mark.era}" if mark.era else ""
    generation = f", generation {mark.generation}" if mark.generation else ""
    when = f", committed {moment(mark.at, story.now)}" if mark.at is not None else ""
    yield "mark", f"{_named(mark.version)}{era}{generation}{when}"
    kept = "kept for ever" if mark.kept_until is None else f"kept until {moment(mark.kept_until, story.now)}"
    yield "tombstone", f"{'yes: the newest change is a deletion' if mark.deleted else 'no'}; {kept}"


def _about_orders(story: Story) -> Iterator[tuple[str, str]]:
    """What an operator has set, or the pipeline limits."""
    if story.era:
        is_new = story.mark is None or story.mark.era < story.era
        yield "era", f"{story.era}{'; whatever comes next is newer than all before' if is_new else ''}"
    if not story.pauses:
        yield "paused", "no"
    for pause in story.pauses:
        yield "paused", told_pause(pause, story.now)
    limit = story.limit
    if limit is not None:
        due = "now" if limit.next_at is None else f"not before {moment(limit.next_at, story.now)}"
        burst = f"{limit.n:,} at once, then " if limit.n > 1 else ""
        yield "rate", f"{burst}one in {duration(limit.per_s / limit.n)}; the next one {due}"


def _history(story: Story) -> Table:
    """What happened, newest first."""
    told = table("history", "what", "version", "by", "detail", numbers=("version",), fold=("detail",))
    for line in story.history:
        version = "" if line.version is None else str(line.version)
        told.add_row(stamp(line.at), cell(line.what), version, cell(line.by), cell(_reason(line)))
    return told


def _reason(line: HistoryRecord) -> str:
    return "; ".join(part for part in (REASONS.get(line.what, ""), line.detail) if part)


def _about_claim(story: Story) -> Iterator[tuple[str, str]]:
    holder, now = story.holder, story.now
    if holder is None:
        yield "claim", "free"
    else:
        isolated = ", isolated" if holder.isolated else ""
        yield "claim", f"held by {holder.owner}{isolated}, token {holder.token}"
        yield "since", moment(holder.since, now)
        ends = "ran out" if holder.is_over else "until"
        gave_up = "; the holder gave up, the outcome of its write is unknown" if holder.gave_up else ""
        yield "lease", f"{ends} {moment(holder.until, now)}{gave_up}"
        if holder.intent is not None:
            yield "intent", f"{_named(holder.intent)}; older changes wait for it"
    if story.unknown is not None:
        until = moment(story.unknown.until, now)
        waits = f"older changes {'wait' if story.unknown.until > now else 'waited'} for it until {until}"
        yield "unknown", f"{_named(story.unknown.version)} may be in the sink without being committed; {waits}"


def _about_tries(story: Story) -> Iterator[tuple[str, str]]:
    tries = story.tries
    if tries is None:
        return
    deaths = f", {tries.crashes} of {tries.crashes_max} workers died alone with it" if tries.crashes else ""
    yield "tries", f"{tries.attempts} of {tries.attempts_max} at {_named(tries.version)} failed{deaths}"
    yield (
        "next try",
        "not before " + moment(tries.next_at, story.now)
        if tries.next_at is not None
        else "when its message comes back",
    )


def _about_suspicion(story: Story) -> Iterator[tuple[str, str]]:
    suspicion = story.suspicion
    if suspicion is None:
        return
    yield "suspect", f"{count(suspicion.count, 'time')}, the last {moment(suspicion.since, story.now)}"
    if suspicion.repair_at is None:
        yield "repair", "by nobody: this pipeline has no refetch; give it one with @pipeline.refetch"
    else:
        yield "repair", f"by refetch, not before {moment(suspicion.repair_at, story.now)}"


def _about_letters(story: Story) -> Iterator[tuple[str, str]]:
    if not story.letters_are_all:
        yield "dead", f"looked for among the {LETTERS_MAX:,} newest letters only"
    for letter in story.letters[:LETTERS_SHOWN]:
        yield (
            "dead",
            f"letter {letter.number}, {_named(letter.version)}, {moment(letter.at, story.now)}: {letter.cause}",
        )
    if len(story.letters) > LETTERS_SHOWN:
        yield "dead", f"and {len(story.letters) - LETTERS_SHOWN:,} more; see keywise dead list"


def _range(meeting: Meeting) -> str:
    lowest, highest = meeting.lowest, meeting.highest
    if not meeting.versioned:
        return "no version"
    if lowest is None and highest is None:
        return "any version"
    if lowest is None:
        return f"up to version {highest}"
    if highest is None:
        return f"version {lowest} or above"
    return f"version {lowest}" if lowest == highest else f"versions {lowest} to {highest}"


def _named(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"


def _is_text(key: str) -> bool:
    try:
        return bool(key.encode())
    except UnicodeEncodeError:
        return False
