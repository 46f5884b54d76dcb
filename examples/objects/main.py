"""Fills a bucket with log files while workers are killed, and compares two tables of their lines with the truth."""

import argparse
import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import obstore
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import real_servers
from examples.objects import report, uploads
from examples.objects.pipeline import PIPELINE, pipeline_at
from examples.objects.place import FOLDER, KEYWISE, NAIVE, Place
from examples.objects.uploads import LARGE
from examples.objects.workers import KEYWISE_COMMAND, NAIVE_COMMAND, Workers, started_workers

from keywise import adapters
from keywise.core.admin import LedgerAdmin
from keywise.core.source import Source
from keywise.core.url import Address

LOOK_S, REPORT_S = 0.02, 2.0
DEPTHS = (0.05, 0.2)
"""How much of a large file is written when workers are killed that read it: so many times, so that the run is short."""
KILLS_PER_FILE = len(DEPTHS)
BETWEEN_KILLS_S = 1.0
SETTLE_S = 240.0
"""How long the workers may take for what is left in the queues."""


def main() -> int:
    options = _options()
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    real_servers.end_on_sigterm()
    if options.servers:
        wanted = {"seaweedfs": options.store, "elasticmq": options.queues}
        real_servers.demand(*(server for server, url in wanted.items() if not url))
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with ExitStack() as stack:
        place = Place(str(options.folder.resolve()), options.store, options.queues)
        if options.servers:
            place = stack.enter_context(_with_servers(console, place))
        return asyncio.run(Story(console, options, place).run())


class Story:
    """One run: the files, the two consumers, and the moment from which time is counted."""

    def __init__(self, console: Console, options: argparse.Namespace, place: Place) -> None:
        self._console = console
        self._options = options
        self._place = place
        self._bucket = place.client()
        self._uploads = uploads.uploads(options.files, options.lines, options.seed)
        self._truth = uploads.truth(self._uploads)
        self._began = time.monotonic()
        self._done = asyncio.Event()
        self._sent = 0

    async def run(self) -> int:
        self._introduce()
        place, names = self._place, {one.name for one in self._uploads}
        async with AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(await _queue(place, name)) for name in (KEYWISE, NAIVE)]
            app = await stack.enter_async_context(pipeline_at(place))
            ledger = (await stack.enter_async_context(app.open(PIPELINE, work=False))).admin
            naive = stack.enter_context(started_workers(NAIVE_COMMAND, self._options.workers, place))
            keywise = stack.enter_context(started_workers(KEYWISE_COMMAND, self._options.workers, place))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._kill(ledger, keywise, naive))
                group.create_task(self._report())
                await self._fill(queues)
                self._say(f"the bucket is full: {len(self._truth)} of {len(names)} files are left, the others deleted")
                is_settled = await self._settle(ledger, queues[1])
                self._done.set()
            letters = (await ledger.counts()).dead
        if not is_settled:
            self._say(f"the workers did not come to an end within {SETTLE_S:g} s")
        found = [report.compare_naive(place, naive.killed, self._truth)]
        found.append(report.compare_keywise(place, keywise.killed, self._truth))
        report.print_report(self._console, found)
        self._console.print(f"dead letters: {letters}")
        self._print_commands()
        return 0 if is_settled and found[1].is_exact and not letters else 1

    async def _fill(self, queues: Sequence[Source]) -> None:
        """Write and delete files, and send what is announced by then."""
        due = uploads.notifications(self._uploads, self._options.seed)
        for one in self._uploads:
            if one.lines is None:
                await obstore.delete_async(self._bucket, one.name)
            else:
                await obstore.put_async(self._bucket, one.name, one.content())
            if messages := due.get(one.number):
                for queue in queues:
                    await queue.send(messages)
                self._sent += len(messages)
            due_s = self._options.seconds * one.number / len(self._uploads)
            await asyncio.sleep(max(0.0, self._began + due_s - time.monotonic()))

    async def _settle(self, ledger: LedgerAdmin, naive: Source) -> bool:
        """Wait until keywise has committed the newest state of every file, and the other queue is empty."""
        newest = {one.name: self._place.version(one.sequencer) for one in self._uploads}
        deadline = time.monotonic() + SETTLE_S
        while newest or await naive.depth():
            if time.monotonic() > deadline:
                return False
            for name, version in list(newest.items()):
                entry = await ledger.inspect(f"{self._place.root}/{name}")
                if entry is not None and entry.mark is not None and entry.mark[1] >= version:
                    del newest[name]
            await asyncio.sleep(LOOK_S)
        return True

    async def _kill(self, ledger: LedgerAdmin, keywise: Workers, naive: Workers) -> None:
        """Kill workers in the middle of large files. Each time, a naive one is killed too."""
        rng = random.Random(self._options.seed)
        left = {one.name: KILLS_PER_FILE for one in self._uploads if one.name.startswith(LARGE)}
        while not self._done.is_set():
            await asyncio.sleep(LOOK_S)
            for name in [name for name, kills in left.items() if kills]:
                entry = await ledger.inspect(f"{self._place.root}/{name}")
                written = entry.position.place if entry is not None and entry.position is not None else 0
                pids = [pid for pid in keywise.pids if entry is not None and f"-{pid}-" in entry.owner]
                # The second one dies further behind than the first.
                if not pids or written < self._options.lines * DEPTHS[-left[name]]:
                    continue
                keywise.kill(pids[0])
                naive.kill(rng.choice(naive.pids))
                self._say(f"killed a worker of each: keywise had written {written:,} lines of {name}")
                left[name] -= 1
                await asyncio.sleep(BETWEEN_KILLS_S)
                break

    async def _report(self) -> None:
        while not self._done.is_set():
            rows = report.count_rows(self._place.file(KEYWISE))
            self._say(f"{self._sent} messages sent, {rows:,} rows in the table of keywise")
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._done.wait()
            except TimeoutError:
                continue

    def _introduce(self) -> None:
        sent = sum(map(len, uploads.notifications(self._uploads, self._options.seed).values()))
        files = len({one.name for one in self._uploads})
        deleted = sum(1 for one in self._uploads if one.lines is None)
        self._console.print(
            f"{files} log files are written {len(self._uploads) - deleted} times and deleted {deleted} times; {sent} "
            f"messages announce that, some twice, late or out of order\n{self._options.workers} worker processes of "
            "keywise and of a naive consumer read the same files, and are killed"
        )

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}", markup=False)

    def _print_commands(self) -> None:
        if self._place != Place():
            return
        name = next(one.name for one in self._uploads if one.name.startswith(LARGE))
        app = "--app examples/objects/pipeline.py:app"
        self._console.print("\nAsk the ledger what happened to a file:")
        self._console.print(f"  .venv/bin/keywise why {self._place.root}/{name} {app}", style="cyan")


async def _queue(place: Place, consumer: str) -> Source:
    """The queue of a consumer; one of SQS is created first."""
    if place.queues:
        from aiobotocore.session import get_session

        endpoint = f"http://{place.queues}"
        async with get_session().create_client("sqs", region_name="us-east-1", endpoint_url=endpoint) as sqs:
            await sqs.create_queue(QueueName=consumer)
    return adapters.connect_source(Address(place.queue(consumer), consumer, {}))


@contextmanager
def _with_servers(console: Console, place: Place) -> Iterator[Place]:
    """Start the servers that are not given, as the tests start them."""
    from servers.elasticmq import elasticmq_server
    from servers.seaweedfs import ACCESS_KEY, SECRET_KEY, seaweedfs_server

    store, queues = place.store, place.queues
    with ExitStack() as stack:
        if not store:
            console.print("starting SeaweedFS …")
            store = stack.enter_context(seaweedfs_server()).url
        if not queues:
            console.print("starting ElasticMQ …")
            queues = stack.enter_context(elasticmq_server()).url.removeprefix("http://")
        os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        yield Place(place.folder, store, queues)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ingest log files from a bucket while workers are killed, beside a naive consumer.",
        epilog="example: .venv/bin/python examples/objects/main.py --servers --files 200",
    )
    parser.add_argument("--files", type=int, default=80, help="how many small log files there are")
    parser.add_argument("--lines", type=int, default=10_000, help="how many lines a large one has")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the bucket fills up")
    parser.add_argument("--workers", type=int, default=2, help="how many worker processes each consumer has")
    parser.add_argument("--seed", type=int, default=2026, help="what happens to the files")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is made again")
    parser.add_argument("--servers", action="store_true", help="start SeaweedFS and ElasticMQ for it")
    parser.add_argument("--store", default="", help="or the URL of a server that speaks S3, with --queues")
    parser.add_argument("--queues", default="", help="and HOST:PORT of one that speaks SQS")
    options = parser.parse_args()
    if bool(options.store) != bool(options.queues) and not options.servers:
        parser.error("--store and --queues belong together; give both, or --servers")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
