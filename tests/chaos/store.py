"""What all processes of a run share, whatever it is kept in: a queue, a ledger, a table, and a log of what was done."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

import keywise
from chaos.final_checks import Evidence
from chaos.sqlite_backend import SqliteShelf
from keywise.core.admin import LedgerCounts
from keywise.core.entry import Entry
from keywise.core.errors import UnavailableError

T = TypeVar("T")

MANY = 100_000


class Shelf(Protocol):
    """What a technology keeps: tables `stock` and `truth`, and what its triggers wrote down."""

    on: str
    ledger: str
    url: str
    """Of queue and table."""
    logs_marks: bool
    """Whether marks are told by the log; else the ledger is asked at the end."""

    def create(self, *, is_heavy: bool) -> None:
        """Make the tables beside those of keywise; in a heavy one, each write takes a millisecond or so."""

    def rows(self, statement: str) -> list[tuple]: ...

    def tell_truth(self, rows: Sequence[tuple]) -> None:
        """Keep what was sent last, as key, version, body and whether it is gone."""

    def restart(self) -> None:
        """Stop the server at once, and start it again."""

    def close(self) -> None: ...


class Store:
    """What is shared, its producer, and what everybody can see in it."""

    def __init__(
        self, folder: Path, shelf: Shelf | None = None, *, keys: int = 200, seed: int = 0, is_heavy: bool = False
    ) -> None:
        self.folder = folder
        self.shelf: Any = shelf or SqliteShelf(folder)
        self.sent = 0
        self._keys = [f"k{number}" for number in range(keys)]
        self._versions = dict.fromkeys(self._keys, 0)
        self._history: list[bytes] = []
        self._rng = random.Random(seed)
        self._runner = asyncio.Runner()
        self.app = keywise.App(self.shelf.ledger, observers=[])
        # What the producer does not say (its settings, its handler) does not matter: it only sends and looks.
        queue = getattr(self.shelf, "queue", self.shelf.url)
        self.app.pipeline("stock", key="key", version="version").source(queue).apply(_never)
        self.counts()
        self.shelf.create(is_heavy=is_heavy)

    def close(self) -> None:
        self._runner.run(self.app.close())
        self._runner.close()
        self.shelf.close()

    def send(self, *bodies: dict | bytes) -> None:
        """Append messages, whoever is in the way meanwhile; what they say is the truth from now on."""
        self._tell_truth([body for body in bodies if isinstance(body, dict)])
        # If only the answer was lost, they are sent twice: a message too many does no harm.
        self._insist(lambda: self.app.send("stock", *bodies))
        self.sent += len(bodies)

    def produce(self, count: int) -> None:
        """Change some keys; send that out of order, and some older messages once more."""
        news = []
        for key in self._rng.choices(self._keys, k=count):
            self._versions[key] += 1
            news.append({"key": key, "version": self._versions[key], "gone": self._rng.random() < 0.15})
        self._tell_truth(news)
        bodies = [msgspec.json.encode(one) for one in news]
        self._history += bodies
        again = self._rng.choices(self._history[-5000:], k=count // 5)
        self._rng.shuffle(bodies)
        self.send(*bodies, *again)

    def resync(self) -> None:
        """Send the truth about every key once more."""
        self.send(*(bytes(body) for (body,) in self.rows("select body from truth order by key")))

    def rows(self, statement: str) -> list[tuple]:
        return self.shelf.rows(statement)

    def backlog(self) -> int:
        """How many messages nobody has taken yet."""
        if hasattr(self.shelf, "backlog"):
            return self.shelf.backlog()
        return self.rows("select count(*) from keywise_ready")[0][0]

    def content(self) -> dict[str, int]:
        return dict(self.rows("select key, version from stock"))

    def truth(self) -> dict[str, int]:
        return dict(self.rows("select key, version from truth where not gone"))

    def evidence(self) -> Evidence:
        """What there is to be judged."""
        return Evidence(
            log=self.rows("select key, version, op, suspicions from history"),
            takeovers=self.rows("select key, suspect_before, suspect_after from takeovers"),
            content=self.content(),
            truth=self.truth(),
            newest=dict(self.rows("select key, version from truth")),
            marks=None if self.shelf.logs_marks else self._marks(),
        )

    def depth(self) -> int:
        if hasattr(self.shelf, "depth"):
            return self.shelf.depth()
        return self._look(lambda pipeline: pipeline.sources[0][1].depth())

    def visible(self) -> int:
        """How many messages a new worker would get at once."""
        return len(self._look(lambda pipeline: pipeline.sources[0][1].receive(MANY, 0.0)))

    def counts(self) -> LedgerCounts:
        return self._look(lambda pipeline: pipeline.admin.counts())

    def entry(self, key: str) -> Entry | None:
        return self._look(lambda pipeline: pipeline.admin.inspect(key))

    def held(self) -> list[str]:
        """Keys under a claim, whether its lease lasts or not."""
        return [key for (key,) in self.rows("select key from held")]

    def held_by(self, pid: int) -> set[str]:
        """Keys under a claim of one process."""

        async def claimed(pipeline: Any) -> set[str]:
            keys = await pipeline.control_store.held("", MANY)
            entries = {key: await pipeline.admin.inspect(key) for key in keys}
            return {key for key, entry in entries.items() if entry is not None and f"-{pid}-" in entry.owner}

        return self._look(claimed)

    def letters(self) -> dict[str, str]:
        """The cause of each dead letter by its key."""
        found = self._look(lambda pipeline: pipeline.admin.dead_letters(1000))
        return {letter.key: letter.cause for _, _, letter in found}

    def _marks(self) -> dict[str, int]:
        async def marks(pipeline: Any) -> dict[str, int]:
            entries = {key: await pipeline.admin.inspect(key) for key in self._keys}
            return {key: entry.mark[1] for key, entry in entries.items() if entry is not None and entry.mark}

        return self._look(marks)

    def _look(self, act: Callable[[Any], Awaitable[T]]) -> T:
        async def look() -> T:
            async with self.app.open("stock", work=False) as pipeline:
                return await act(pipeline)

        return self._insist(look)

    def _insist(self, act: Callable[[], Awaitable[T]]) -> T:
        """Try until it can be reached."""
        while True:
            try:
                return self._runner.run(act())
            except UnavailableError:
                continue

    def _tell_truth(self, news: list[dict]) -> None:
        """Before the message of it is sent, so that what is refetched is never older than what was delivered."""
        rows = [
            (one["key"], one["version"], msgspec.json.encode(one), one.get("gone", False))
            for one in sorted(news, key=lambda one: one["version"])
        ]
        if rows:
            self.shelf.tell_truth(rows)


async def _never(change: keywise.Change) -> None:
    raise AssertionError("the producer applies nothing")
