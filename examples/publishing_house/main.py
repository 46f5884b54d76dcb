"""Runs a publishing house in miniature, and compares the table that it makes with the truth."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.publishing_house import house, press, report
from examples.publishing_house.countdown import Countdown
from examples.publishing_house.press import Event

import keywise
from keywise.cli.live.show import live_view
from keywise.observe.run_view import View


def main() -> int:
    options = _options()
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    events = press.deliveries(options.events, options.documents)
    if options.check and not house.database_in(options.folder).exists():
        sys.exit(f"there is nothing to check in {options.folder}; run it without --check first")
    if not options.check:
        house.build(options.folder)
        asyncio.run(_publish(console, events, options.folder))
    return 0 if report.print_report(console, events, options.folder) else 1


async def _publish(console: Console, events: Sequence[Event], folder: Path) -> None:
    """Send and apply side by side, until every event has been settled."""
    documents = len({event.content_id for event in events})
    console.print(f"{len(events):,} events about {documents:,} documents: bursts, duplicates, reordering, stragglers")
    view = View(["search"])
    async with house.house_in(folder) as app:
        app.observers += [view, Countdown(len(events), when_done=app.stop)]
        with live_view(view, console, partial(console.print, markup=False)):
            async with asyncio.TaskGroup() as group:
                group.create_task(app.run(handle_signals=False))
                group.create_task(_send(app, events))


async def _send(app: keywise.App, events: Sequence[Event]) -> None:
    encode = msgspec.json.Encoder().encode
    for burst in press.bursts(events):
        await app.send("search", *(encode(event) for event in burst))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a publishing house in miniature, and check what it made.")
    parser.add_argument("--events", type=int, default=20_000, help="how many events are delivered")
    parser.add_argument("--documents", type=int, default=2_000, help="how many documents they are about")
    parser.add_argument("--folder", type=Path, default=house.FOLDER, help="where the database is made afresh")
    parser.add_argument("--check", action="store_true", help="only compare again what the last run has left there")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
