"""`keywise status`: each pipeline in figures."""

import asyncio

import msgspec

from keywise.address import shown
from keywise.app import App
from keywise.cli.loading import AppOption, JsonOption, PipelineOption, chosen, load, warn_of_memory
from keywise.cli.speech import cell, display, table, tell_json
from keywise.status import Figures, figures_of

NUMBERS = ("keys", "tombstones", "claims", "suspects", "dead")


def status(app: AppOption = None, pipeline: PipelineOption = None, json: JsonOption = False) -> None:
    """Show each pipeline in figures.

    Its grade, and how many messages, keys, tombstones, live claims, suspects and dead letters there are.

    \b
    Example:
      keywise status --app shop:app
    """
    loaded = load(app)
    warn_of_memory(loaded)
    found = asyncio.run(_gathered(loaded, chosen(loaded, [pipeline])))
    if json:
        tell_json({"ledger": shown(loaded.ledger_url), "pipelines": msgspec.to_builtins(found)})
    else:
        _tell(found)


async def _gathered(app: App, names: list[str]) -> list[Figures]:
    found = []
    for name in names:
        async with app.open(name, work=False) as pipeline:
            found.append(await figures_of(pipeline))
    return found


def _tell(found: list[Figures]) -> None:
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
