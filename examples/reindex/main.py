"""Rebuilds a search in a new shape while its catalogue is edited, swaps, rolls back, and compares it with the truth.

A naive script does the same beside it.
"""

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import real_servers
from examples.reindex import catalogue, report, searches
from examples.reindex.catalogue import Catalogue, folded
from examples.reindex.commands import Operator, Workers
from examples.reindex.naive import NaiveSearch
from examples.reindex.pipeline import pipeline_at
from examples.reindex.place import FIRST_COLUMNS, FOLDER, KEYWISE, NAIVE, PIPELINE, Place
from examples.reindex.report import Comparison
from examples.reindex.searches import FIELDS, Search, definition

WORD = "cafe"
LOST, CHANGED = "item-00003", "item-00007"
"""The planted error: one document of the new search is deleted by hand, and the title of another changed."""
LOOK_S, SETTLE_S = 0.05, 60.0


def main() -> int:
    options = _options()
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    real_servers.end_on_sigterm()
    if options.servers:
        wanted = {"postgres": options.database, "opensearch": options.search}
        real_servers.demand(*(server for server, url in wanted.items() if not url))
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with ExitStack() as stack:
        place = Place(str(options.folder.resolve()), options.database, options.search)
        if options.servers:
            place = stack.enter_context(_with_servers(console, place))
        return asyncio.run(_run_story(console, options, place))


async def _run_story(console: Console, options: argparse.Namespace, place: Place) -> int:
    """Open the searches and the catalogue, and run the story on them."""
    async with AsyncExitStack() as stack:
        search, naive = [await stack.enter_async_context(searches.opened(place, name)) for name in (KEYWISE, NAIVE)]
        if place.search:
            await search.begin()
        await naive.begin()
        connection = await stack.enter_async_context(catalogue.opened(place.catalogue))
        items = Catalogue(connection, options.items, options.seed)
        return await Story(console, options, place, items, (search, naive)).run()


class Story:
    """One run of the example: the catalogue, both searches, the workers and the operator."""

    def __init__(
        self,
        console: Console,
        options: argparse.Namespace,
        place: Place,
        items: Catalogue,
        searches: tuple[Search, Search],
    ) -> None:
        self._console = console
        self._options = options
        self._place = place
        self._catalogue = items
        self._search, self._copy = searches
        self._naive = NaiveSearch(self._copy)
        self._app = pipeline_at(place)
        self._running = msgspec.structs.replace(place, columns=",".join(FIRST_COLUMNS))
        """The place that the workers were started with."""
        self._workers = Workers(options.workers)
        self._operator = Operator(console, place)
        self._compared: list[Comparison] = []
        self._began = time.monotonic()

    async def run(self) -> int:
        try:
            async with self._app, asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._naive.consume()), group.create_task(self._edit())]
                await self._fill()
                await self._change_shape()
                self._catalogue.resume()
                await self._build()
                is_refused = await self._plant()
                await self._build_again()
                await self._go_live()
                await self._go_back()
                for task in tasks:
                    task.cancel()
        finally:
            await self._workers.stop()
        return self._end(is_refused=is_refused)

    async def _edit(self) -> None:
        await self._catalogue.edit(self._options.rate, (self._send, self._naive.send))

    async def _send(self, message: bytes) -> None:
        await self._app.send(PIPELINE, message)

    # The chapters.

    async def _fill(self) -> None:
        """Fill both searches from the catalogue, in their first shape."""
        self._console.print(
            f"a shop has {self._options.items:,} items; a search of keywise with {self._options.workers} workers and a "
            "naive one follow its catalogue"
        )
        await self._workers.start(self._running)
        await self._catalogue.fill()
        bodies = [msgspec.json.encode(item) for item in self._catalogue.items.values()]
        await self._app.send(PIPELINE, *bodies)
        for body in bodies:
            await self._naive.send(body)
        await self._settle()
        await self._say_found("in its first shape")

    async def _change_shape(self) -> None:
        """Give each item its words. The versions of the items stay, so no message announces it."""
        await self._workers.stop()
        await self._catalogue.migrate()
        await self._search.widen()
        await self._copy.widen()
        self._running = self._place
        await self._workers.start(self._running)
        self._say("each item has words for the search now: its title without capitals and accents")
        self._say("no message announces that, because no item has changed; so the search is built again, beside")
        self._say(f"editors change about {self._options.rate:g} items a second from here on")

    async def _build(self) -> None:
        mapping: list[str] = []
        if self._place.search:
            path = Path(self._place.folder) / "mapping.json"
            path.write_bytes(msgspec.json.format(msgspec.json.encode(definition(FIELDS))))
            mapping = ["--mapping", str(path)]
        await self._operator.run("start", PIPELINE, "--into", self._place.into, *mapping, "--wait")

    async def _plant(self) -> bool:
        """Damage the new search; return whether the gate names what is wrong, and refuses it."""
        changed = msgspec.structs.replace(self._catalogue.items[CHANGED], title="Something else")
        self._say(f"by hand, an operator deletes {LOST} in the new search, and changes the title of {CHANGED}")
        await self._search.damage(self._search.target(1), LOST, changed)
        seen = await self._operator.run("verify", PIPELINE, "--sample", "all", status=1)
        await self._operator.run("swap", PIPELINE, "--yes", status=1)
        return LOST in seen and CHANGED in seen

    async def _build_again(self) -> None:
        """Build the search again, as the gate advises, while the naive script builds its copy."""
        await self._operator.run("cancel", PIPELINE, "--yes")
        await self._operator.run("drop", PIPELINE, "--yes")
        await asyncio.gather(self._build(), self._naive.build(self._catalogue))
        await self._operator.run("verify", PIPELINE, "--sample", "all")

    async def _go_live(self) -> None:
        await self._operator.run("swap", PIPELINE, "--yes")
        await self._naive.swap()
        await self._compare("swap", with_words=True)
        await self._say_found("in its new shape")

    async def _go_back(self) -> None:
        """Go on editing, and then roll both searches back."""
        self._catalogue.resume()
        await asyncio.sleep(self._options.seconds)
        self._say(
            "the editors find the new search worse, and want the old one back, with all that they have done since"
        )
        await self._operator.run("rollback", PIPELINE, "--yes", "--why", "the editors want it back")
        await self._naive.roll_back()
        await self._compare("rollback", with_words=False)

    def _end(self, *, is_refused: bool) -> int:
        self._say(f"{self._catalogue.edits:,} edits")
        report.print_report(self._console, self._compared)
        for surprise in self._operator.surprises:
            self._console.print(surprise, style="red", markup=False)
        if not is_refused:
            self._console.print("the gate did not name what is wrong", style="red")
        self._print_commands()
        is_exact = all(one.is_exact for one in self._compared if one.search == KEYWISE)
        return 0 if is_exact and is_refused and not self._operator.surprises else 1

    # Helpers.

    async def _compare(self, moment: str, *, with_words: bool) -> None:
        """Pause the editors, wait until all changes are processed, and compare both searches with the catalogue."""
        await self._catalogue.pause()
        await self._settle()
        truth = self._catalogue.items
        for name, search in ((KEYWISE, self._search), (NAIVE, self._copy)):
            found = report.compare(name, moment, await search.items(), truth, with_words=with_words)
            self._compared.append(found)
            self._say(report.summary(found))

    async def _settle(self) -> None:
        """Wait until the newest change of each item is committed, at most for `SETTLE_S`."""
        await self._naive.settle()
        async with pipeline_at(self._running) as app, app.open(PIPELINE, work=False) as opened:
            deadline = time.monotonic() + SETTLE_S
            for name, version in self._catalogue.versions.items():
                while time.monotonic() < deadline:
                    entry = await opened.admin.inspect(name)
                    if entry is not None and entry.mark is not None and entry.mark[1] >= version:
                        break
                    await asyncio.sleep(LOOK_S)

    async def _say_found(self, shape: str) -> None:
        wanted = sum(folded(WORD) in folded(item.title) for item in self._catalogue.items.values())
        self._say(f"{shape}, a search for {WORD!r} finds {await self._search.find(WORD)} of {wanted} items")

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}", markup=False)

    def _print_commands(self) -> None:
        if self._place != Place():
            return
        self._console.print("\nAsk what was done, and what happened to an item:")
        for command in (f"reindex status {PIPELINE}", f"why {CHANGED}"):
            self._console.print(f"  .venv/bin/keywise {command} --app examples/reindex/pipeline.py:app", style="cyan")


@contextmanager
def _with_servers(console: Console, place: Place) -> Iterator[Place]:
    """Start the servers that are not given, as the tests start them."""
    from servers.opensearch import opensearch_server
    from servers.postgres import postgres_server

    database, search = place.database, place.search
    with ExitStack() as stack:
        if not database:
            console.print("starting PostgreSQL …")
            database = stack.enter_context(postgres_server()).create_database("shop")
        if not search:
            console.print("starting OpenSearch …")
            search = f"{stack.enter_context(opensearch_server()).url}/{PIPELINE}"
        yield Place(place.folder, database, search)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Build a search again beside the live one, and swap it in, while its catalogue is edited.",
        epilog="example: .venv/bin/python examples/reindex/main.py --servers --items 5000",
    )
    parser.add_argument("--items", type=int, default=1_000, help="how many items the catalogue has at first")
    parser.add_argument("--rate", type=float, default=100.0, help="how many of them are changed a second")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long the editors use the new search")
    parser.add_argument("--workers", type=int, default=2, help="how many worker processes there are")
    parser.add_argument("--seed", type=int, default=2026, help="what the editors do")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where all files go; it is emptied first")
    parser.add_argument("--servers", action="store_true", help="start PostgreSQL and OpenSearch for it")
    parser.add_argument("--database", default="", help="or the URL of an empty database of PostgreSQL, with --search")
    parser.add_argument("--search", default="", help="and opensearch://HOST:PORT/ALIAS, where it creates indexes")
    options = parser.parse_args()
    if bool(options.database) != bool(options.search) and not options.servers:
        parser.error("--database and --search belong together; give both, or --servers")
    if not 50 <= options.items <= searches.SHOWN_MAX // 2:
        parser.error(f"--items is from 50 to {searches.SHOWN_MAX // 2:,}, the most that one search shows")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
