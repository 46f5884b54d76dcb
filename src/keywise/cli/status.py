"""`keywise status`: each pipeline in figures."""

import asyncio

import msgspec

from keywise.address import shown
from keywise.app import App
from keywise.cli.loading import AppOption, JsonOption, PipelineOption, chosen, load, warn_of_memory
from keywise.cli.speech import cell, display, table, tell_json
from keywise.status import Figures, figures_of

NUMBERS = ("depth", "keys", "tombstones", "claims", "suspects", "dead")


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
    columns = ("pipeline", "grade", *NUMBERS, "way", "source")
    made = table(*columns, numbers=NUMBERS, fold=("way", "source"))
    for figures in found:
        census = (figures.keys, figures.tombstones, figures.claims, figures.suspects, figures.dead)
        counts = [f"{number:,}" for number in census]
        for index, source in enumerate(figures.sources):
            # What belongs to the pipeline as a whole is told once.
            name, grade = (figures.pipeline, figures.grade.value) if index == 0 else ("", "")
            rest = counts if index == 0 else [""] * len(counts)
            made.add_row(cell(name), grade, f"{source.depth:,}", *rest, source.way, cell(source.source))
    display(made)
