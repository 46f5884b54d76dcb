"""Object pipelines on real stores and queues, run in this process: what is put, announced, written and emitted."""

import asyncio
import itertools
import json
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote_plus

import asyncpg
import obstore
from obstore.store import S3Store

import keywise
from keywise import Delete, Put
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Entry
from keywise.core.events import Event, Ignored
from keywise.flow.pipeline import OpenPipeline
from running import scaled
from servers import seaweedfs, shared
from servers.seaweedfs import SeaweedServer

QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "100ms"}
"""Retries that do not hold up a test."""
FIRST_SEQUENCER = 0x0055AED6DC00000000
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": seaweedfs.ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": seaweedfs.SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "nowhere",
    "AWS_SHARED_CREDENTIALS_FILE": "nowhere",
}
"""ElasticMQ takes any credentials, so those of SeaweedFS suit both."""

E = TypeVar("E", bound=Event)
_numbers = itertools.count(1)


def fresh(thing: str) -> str:
    """A name that no other test uses."""
    return f"{thing}{os.getpid()}x{next(_numbers)}"


class Folder:
    """Objects as files. Its notifications are JSON, read by a function."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / ".keep").touch()
        self.folder = folder
        self.url = self.root = f"file://{folder}"
        self.dialect: Any = read_announcement

    def uri(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, content: bytes) -> None:
        """As a careful producer does: the file appears whole."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.parent / ".new"
        beside.write_bytes(content)
        beside.rename(path)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink()

    def put_message(self, name: str, version: int) -> bytes:
        return announcement(self.uri(name), version)

    def delete_message(self, name: str, version: int) -> bytes:
        return announcement(self.uri(name), version, deleted=True)


class Bucket:
    """A bucket of SeaweedFS. Its notifications are those of Amazon S3, names encoded as there."""

    dialect = "s3"

    def __init__(self, server: SeaweedServer | None = None, *, port: int = 0) -> None:
        """`port` is that of a proxy through which the pipeline reads."""
        server = server or shared.seaweed()
        self.name = fresh("bucket")
        self.root = f"s3://{self.name}"
        endpoint = f"http://127.0.0.1:{port}" if port else server.url
        self.url = f"{self.root}?endpoint={endpoint}&region=us-east-1"
        keys = {"access_key_id": seaweedfs.ACCESS_KEY, "secret_access_key": seaweedfs.SECRET_KEY}
        self._client = S3Store(
            self.name, endpoint=server.url, region="us-east-1", client_options={"allow_http": True}, **keys
        )

    def uri(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, content: bytes) -> None:
        obstore.put(self._client, name, content, use_multipart=False)

    def delete(self, name: str) -> None:
        obstore.delete(self._client, name)

    def put_message(self, name: str, version: int) -> bytes:
        return s3_message(self.s3_record(name, version))

    def delete_message(self, name: str, version: int) -> bytes:
        return s3_message(self.s3_record(name, version, event="ObjectRemoved:Delete"))

    def s3_record(self, name: str, version: int, *, event: str = "ObjectCreated:Put") -> dict[str, Any]:
        entity = {"key": quote_plus(name, safe="/"), "sequencer": f"{FIRST_SEQUENCER + version:018X}"}
        return {"eventSource": "aws:s3", "eventName": event, "s3": {"bucket": {"name": self.name}, "object": entity}}


Place = Folder | Bucket


def s3_message(*records: dict[str, Any]) -> bytes:
    return json.dumps({"Records": records}).encode()


def announcement(uri: str, version: int, *, deleted: bool = False) -> bytes:
    return json.dumps({"uri": uri, "version": version, "deleted": deleted}).encode()


def read_announcement(message: dict[str, Any]) -> Put | Delete:
    kind = Delete if message["deleted"] else Put
    return kind(message["uri"], message["version"])


def ndjson(count: int, first: int = 0, **fields: Any) -> bytes:
    """So many records, numbered from `first` on."""
    lines = (json.dumps({"n": number} | fields) + "\n" for number in range(first, first + count))
    return "".join(lines).encode()


class ObjectRig:
    """An app with one object pipeline called `logs`."""

    def __init__(
        self, place: Place, ledger: str, *, queue: str = "", dialect: Any = None, sink: str = "", **options: Any
    ) -> None:
        self.place = place
        self.ledger = ledger
        self.events: list[Event] = []
        self.app = keywise.App(ledger, observers=[self.events.append])
        self.logs = self.app.objects("logs", store=place.url, **({"format": "ndjson"} | QUICK | options))
        self.logs.source(queue or ledger, dialect=dialect or place.dialect)
        if sink:
            self.logs.sink(sink)

    def emitted(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def ignored(self) -> dict[str, int]:
        """How many parts of notifications were skipped, by reason."""
        counts: Counter[str] = Counter()
        for event in self.emitted(Ignored):
            counts[event.reason] += event.changes
        return dict(counts)

    @asynccontextmanager
    async def opened(self, name: str = "logs") -> AsyncIterator[OpenPipeline]:
        async with self.app.open(name, work=False) as pipeline:
            yield pipeline

    async def send(self, *bodies: bytes) -> None:
        await self.app.send("logs", *bodies)
        await self.app.close()

    async def put(self, name: str, content: bytes, version: int = 1) -> None:
        """Put an object and announce it."""
        self.place.put(name, content)
        await self.send(self.place.put_message(name, version))

    async def work_until(self, done: Callable[[], Awaitable[bool]], *, limit_s: float = 60.0) -> None:
        """Run the app until a condition holds, then let it drain."""
        running = asyncio.create_task(self.app.run(handle_signals=False))
        try:
            async with asyncio.timeout(scaled(limit_s)):
                while not running.done() and not await done():
                    await asyncio.wait([running], timeout=0.02)
        finally:
            while not running.done():
                self.app.stop()
                await asyncio.wait([running], timeout=0.05)
        await running

    async def work_until_empty(self, *, limit_s: float = 60.0) -> None:
        """Run the app until every message is acked."""
        async with self.opened() as pipeline:
            [(_, source)] = pipeline.sources

            async def is_empty() -> bool:
                return await source.depth() == 0

            await self.work_until(is_empty, limit_s=limit_s)

    async def entry(self, name: str) -> Entry | None:
        async with self.opened() as pipeline:
            return await pipeline.admin.inspect(self.place.uri(name))

    async def letters(self, name: str = "logs") -> list[DeadLetter]:
        """The dead letters, by key."""
        async with self.opened(name) as pipeline:
            return sorted((letter for _, _, letter in await pipeline.admin.dead_letters(100)), key=lambda one: one.key)

    async def rows(self, columns: str = "object, ordinal, version, body") -> list[tuple[Any, ...]]:
        """The rows of the table `logs` beside the ledger, as another program sees them."""
        statement = f"select {columns} from logs order by object, ordinal"
        if self.ledger.startswith("sqlite"):
            with closing(sqlite3.connect(self.ledger.removeprefix("sqlite:///"))) as connection:
                return connection.execute(statement).fetchall()
        connection = await asyncpg.connect(self.ledger)
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    async def records(self) -> dict[str, list[int]]:
        """What the table holds of each object: the numbers of its records, by name."""
        found: dict[str, list[int]] = {}
        for uri, body in await self.rows("object, body"):
            found.setdefault(uri.removeprefix(f"{self.place.root}/"), []).append(json.loads(body)["n"])
        return found


def sqlite_rig(folder: Path, place: Place | None = None, **options: Any) -> ObjectRig:
    """Queue, ledger and record table in one SQLite file; the objects are in a folder unless a place is given."""
    ledger = f"sqlite:///{folder}/ledger.db"
    sink = options.pop("sink", _record_table(ledger, options))
    return ObjectRig(place or Folder(folder / "objects"), ledger, sink=sink, **options)


def postgres_rig(folder: Path, place: Place | None = None, **options: Any) -> ObjectRig:
    """Queue, ledger and record table in one Postgres database."""
    ledger = shared.postgres().create_database(fresh("objects"))
    sink = options.pop("sink", _record_table(ledger, options))
    return ObjectRig(place or Folder(folder / "objects"), ledger, sink=sink, **options)


def _record_table(ledger: str, options: dict[str, Any]) -> str:
    """The URL of a table that stores whole records, or the fields that the option `columns` lists."""
    columns = options.pop("columns", "")
    return f"{ledger}?table=logs&columns={columns}" if columns else f"{ledger}?table=logs"


def orders_of(steps: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """All orders in which a queue can deliver messages."""
    return list(itertools.permutations(steps))
