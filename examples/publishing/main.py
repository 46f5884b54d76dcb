"""Starts a content management system, two stores and the workers between them, and shows each document in all three."""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.publishing import pipelines, screen, shelves
from examples.publishing.cms import Cms, Event

import keywise

HERE = Path(__file__).parent
LOOK_S = 0.25
SETTLE_S = 60.0


def main() -> int:
    options = _options()
    console = Console(file=sys.stdout, highlight=False)
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with _started_store() as port:
        place = {
            pipelines.FOLDER_VARIABLE: str(options.folder.resolve()),
            pipelines.STORE_VARIABLE: f"http://127.0.0.1:{port}",
        }
        with _started_workers(options.workers, place):
            return asyncio.run(_publish(console, options, port))


async def _publish(console: Console, options: argparse.Namespace, port: int) -> int:
    """Edit for a while, then wait until both stores show what the editors see."""
    cms = Cms(options.documents, options.seed)
    async with (
        pipelines.pipelines_in(options.folder, f"http://127.0.0.1:{port}") as app,
        app.open("search", work=False) as opened,
    ):
        sink: Any = opened.sink
        with Live(console=console, auto_refresh=False, transient=True) as live:
            editing = asyncio.create_task(_edit(app, cms, options.seconds))
            deadline = time.monotonic() + options.seconds + SETTLE_S
            while True:
                search, store = await shelves.read_search(sink, cms.ids), await shelves.read_store(port)
                live.update(screen.drawn(cms, search, store), refresh=console.is_terminal)
                is_right = not screen.wrong(cms, search) and not screen.wrong(cms, store)
                if editing.done() and (is_right or time.monotonic() > deadline):
                    break
                await asyncio.sleep(LOOK_S)
            await editing
        console.print(screen.drawn(cms, search, store))
        letters = await _letters(app)
    console.print(f"dead letters: {letters}", style="bold")
    return 0 if is_right and not letters else 1


async def _edit(app: keywise.App, cms: Cms, seconds: float) -> None:
    for burst in cms.first_editions():
        await _send(app, burst)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await _send(app, cms.burst())
        await asyncio.sleep(0.05)


async def _send(app: keywise.App, events: list[Event]) -> None:
    """To both queues, as an exchange with two queues would."""
    bodies = [msgspec.json.encode(event) for event in events]
    for name in pipelines.NAMES:
        await app.send(name, *bodies)


async def _letters(app: keywise.App) -> int:
    found = 0
    for name in pipelines.NAMES:
        async with app.open(name, work=False) as pipeline:
            found += (await pipeline.operator.census()).dead
    return found


@contextmanager
def _started_store() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "store.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


@contextmanager
def _started_workers(count: int, place: dict[str, str]) -> Iterator[None]:
    """As on a server: processes that know nothing of each other."""
    command = [sys.executable, "-m", "keywise", "run", f"{HERE / 'pipelines.py'}:app", "--plain"]
    environment = {**os.environ, **place, "PYTHONPATH": str(HERE.parents[1])}
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Publish documents into two stores, and show them everywhere.")
    parser.add_argument("--documents", type=int, default=15, help="how many documents there are")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long editors are at work")
    parser.add_argument("--workers", type=int, default=2, help="how many worker processes there are")
    parser.add_argument("--seed", type=int, default=2024, help="what the editors do")
    parser.add_argument("--folder", type=Path, default=pipelines.FOLDER, help="where everything is made afresh")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
