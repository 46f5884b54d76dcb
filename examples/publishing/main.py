"""Starts a content management system, two stores and the workers between them, and shows each document in all three."""

import argparse
import asyncio
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import real_servers
from examples.publishing import processes, screen, shelves
from examples.publishing.cms import Cms, Event
from examples.publishing.exchange import Exchange, FileExchange, RabbitExchange
from examples.publishing.pipelines import pipelines_at
from examples.publishing.place import FOLDER, NAMES, Place

import keywise

LOOK_S = 0.25
SETTLE_S = 60.0


def main() -> int:
    options = _options()
    console = Console(file=sys.stdout, highlight=False)
    real_servers.end_on_sigterm()
    if options.servers:
        wanted = {"rabbitmq": options.broker, "opensearch": options.search}
        real_servers.demand(*(server for server, url in wanted.items() if not url))
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with ExitStack() as stack:
        port = stack.enter_context(processes.started_store())
        broker, search = options.broker, options.search
        if options.servers:
            if not broker:
                console.print("starting RabbitMQ …")
                broker = stack.enter_context(processes.started_broker())
            if not search:
                console.print("starting OpenSearch …")
                search = stack.enter_context(processes.started_search())
        place = Place(str(options.folder.resolve()), f"http://127.0.0.1:{port}", broker, search)
        return asyncio.run(_publish(console, options, place))


async def _publish(console: Console, options: argparse.Namespace, place: Place) -> int:
    """Edit for a while, then wait until both stores show what the editors see."""
    cms, app = Cms(options.documents, options.seed), pipelines_at(place)
    _record(cms, place)
    async with (
        app,
        RabbitExchange(place) if place.broker else FileExchange(app) as exchange,
        app.open("search", work=False) as opened,
    ):
        with processes.started_workers(options.workers, place):
            is_right = await _watch(console, cms, place, opened.sink, _edit(exchange, cms, place, options.seconds))
        letters = await _letters(app)
    console.print(f"dead letters: {letters}", style="bold")
    return 0 if is_right and not letters else 1


async def _watch(console: Console, cms: Cms, place: Place, sink: Any, edit: Any) -> bool:
    """Show all documents until nothing is edited any more and both stores are right, or until nobody would wait."""
    editing, deadline = asyncio.create_task(edit), float("inf")
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            search, store = await shelves.read_search(sink, cms.ids), await shelves.read_store(place.store)
            live.update(screen.drawn(cms, search, store), refresh=console.is_terminal)
            is_right = not screen.wrong(cms, search) and not screen.wrong(cms, store)
            if editing.done():
                deadline = min(deadline, time.monotonic() + SETTLE_S)
                if is_right or time.monotonic() > deadline:
                    break
            await asyncio.sleep(LOOK_S)
    await editing
    console.print(screen.drawn(cms, search, store))
    return is_right


async def _edit(exchange: Exchange, cms: Cms, place: Place, seconds: float) -> None:
    for burst in cms.first_editions():
        await _send(exchange, cms, place, burst)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await _send(exchange, cms, place, cms.burst())
        await asyncio.sleep(0.05)


async def _send(exchange: Exchange, cms: Cms, place: Place, events: list[Event]) -> None:
    """What is recorded first can be fetched again by whoever doubts what he holds."""
    _record(cms, place)
    await exchange.publish([msgspec.json.encode(event) for event in events])


def _record(cms: Cms, place: Place) -> None:
    fresh = place.records.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(cms.newest))
    fresh.replace(place.records)


async def _letters(app: keywise.App) -> int:
    found = 0
    for name in NAMES:
        async with app.open(name, work=False) as pipeline:
            found += (await pipeline.admin.counts()).dead
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Publish documents into two stores, and show them everywhere.")
    parser.add_argument("--documents", type=int, default=15, help="how many documents there are")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long editors are at work")
    parser.add_argument("--workers", type=int, default=2, help="how many worker processes there are")
    parser.add_argument("--seed", type=int, default=2024, help="what the editors do")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is made afresh")
    parser.add_argument("--servers", action="store_true", help="start a RabbitMQ and an OpenSearch for it")
    parser.add_argument("--broker", default="", help="or the URL of a RabbitMQ; without it the queues are in SQLite")
    parser.add_argument("--search", default="", help="and of an index in OpenSearch; else the search is a table")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
