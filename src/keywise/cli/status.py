"""`keywise status`: each pipeline in figures."""

import asyncio
import time
from collections.abc import Iterator

import msgspec

from keywise.address import shown
from keywise.app import App
from keywise.cli.loading import AppOption, JsonOption, PipelineOption, chosen, load, warn_of_memory
from keywise.cli.speech import cell, count, display, moment, screen, table, tell_json, with_moments
from keywise.cli.watching import EveryOption, WatchOption, looking
from keywise.standing import EVERYTHING, Pause
from keywise.status import Figures, figures_of

PAUSES_SHOWN = 5
NUMBERS = ("keys", "tombstones", "claims", "suspects", "dead")


def status(
    app: AppOption = None,
    pipeline: PipelineOption = None,
    watch: WatchOption = False,
    every: EveryOption = None,
    json: JsonOption = False,
) -> None:
    """Show each pipeline in figures.

    Its grade, how many messages, keys, tombstones, live claims, suspects and dead letters there are,
    what is paused, its era, and alarms of the last hour with what to do about them.

    \b
    Example:
      keywise status --app shop:app
      keywise status --app shop:app --watch --every 2s
    """
    loaded = load(app)
    warn_of_memory(loaded)
    names = chosen(loaded, [pipeline])
    looking(lambda: _look(loaded, names, json), watch=watch, every=every, json=json)


def _look(app: App, names: list[str], json: bool) -> None:
    found = asyncio.run(_gathered(app, names))
    if json:
        tell_json({"ledger": shown(app.ledger_url), "pipelines": with_moments(msgspec.to_builtins(found), {"at"})})
    else:
        _tell(found, time.time())


async def _gathered(app: App, names: list[str]) -> list[Figures]:
    found = []
    for name in names:
        async with app.open(name, work=False) as pipeline:
            found.append(await figures_of(pipeline, time.time()))
    return found


def _tell(found: list[Figures], now: float) -> None:
    keys = table("pipeline", "grade", *NUMBERS, numbers=NUMBERS)
    queues = table("pipeline", "depth", "way", "source", numbers=("depth",), fold=("source",))
    for figures in found:
        census = (figures.keys, figures.tombstones, figures.claims, figures.suspects, figures.dead)
        keys.add_row(cell(figures.pipeline), figures.grade.value, *(f"{number:,}" for number in census))
        for source in figures.sources:
            queues.add_row(cell(figures.pipeline), f"{source.depth:,}", source.way, cell(source.source))
    display(keys)
    print()
    display(queues)
    for figures in found:
        for note in _notes(figures, now):
            screen().print(cell(f"{figures.pipeline}: {note}"))


def told_pause(pause: Pause, now: float) -> str:
    """What is paused since when, by whom, and why."""
    keys = repr(pause.keys) if not pause.is_pattern else f"keys like {pause.keys!r}"
    if pause.is_pattern and pause.keys == EVERYTHING:
        keys = "every key"
    by = f" by {pause.by}" if pause.by else ""
    return f"{keys}{by}, {moment(pause.at, now)}{': ' + pause.why if pause.why else ''}"


def _notes(figures: Figures, now: float) -> Iterator[str]:
    """What an operator has set, and what is wrong; nothing for most pipelines."""
    if figures.era:
        yield f"era {figures.era}"
    for pause in figures.pauses:
        if pause.is_pattern:
            yield f"paused: {told_pause(pause, now)}"
    keys = [pause for pause in figures.pauses if not pause.is_pattern]
    if keys:
        named = ", ".join(repr(pause.keys) for pause in keys[:PAUSES_SHOWN])
        more = f" and {len(keys) - PAUSES_SHOWN:,} more" if len(keys) > PAUSES_SHOWN else ""
        yield f"paused: {count(len(keys), 'key')}: {named}{more}"
    for alarm in figures.alarms:
        yield f"ALARM, {moment(alarm.at, now)}: {alarm.detail}"
