"""The file that all processes of a run share; triggers in it log every write, every mark and every takeover."""

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

import keywise
from keywise.errors import UnavailableError
from keywise.protocols import Census
from keywise.rules import Entry

WEIGHT = 100_000
"""Makes each write cost about a millisecond, as in a table with many indexes, so that kills fall inside batches."""
TABLES = """
create table stock (key text primary key, version integer, body text);
create table truth (key text primary key, version integer, body blob, gone integer);
create table log (seq integer primary key autoincrement, key text, version integer, op text, suspect integer);
create table takeovers (key text, suspect_before integer, suspect_after integer);
create trigger inserted after insert on stock begin
    insert into log (key, version, op, suspect) values (new.key, new.version, 'write',
        (select suspect from keywise_active where key = new.key));
end;
create trigger updated after update on stock begin
    insert into log (key, version, op, suspect) values (new.key, new.version, 'write',
        (select suspect from keywise_active where key = new.key));
end;
create trigger marked_first after insert on keywise_marks begin
    insert into log (key, version, op) values (new.key, new.version, iif(new.deleted, 'tombstone', 'mark'));
end;
create trigger marked after update on keywise_marks
    when (old.version, old.deleted) is not (new.version, new.deleted) begin
    insert into log (key, version, op) values (new.key, new.version, iif(new.deleted, 'tombstone', 'mark'));
end;
create trigger deleted after delete on stock begin
    -- The version is that of the tombstone which follows.
    insert into log (key, op) values (old.key, 'delete');
end;
create trigger heavy_insert before insert on stock begin select length(hex(randomblob({weight}))); end;
create trigger taken_over before insert on keywise_active when new.token != 0 begin
    insert into takeovers select key, suspect, new.suspect from keywise_active as held
        where held.scope = new.scope and held.key = new.key and held.token not in (0, new.token);
end;
"""


class Store:
    """The shared file, its producer, and what everybody can see in it."""

    def __init__(self, folder: Path, *, keys: int = 200, seed: int = 0, weight: int = 1) -> None:
        self.folder = folder
        self.file = folder / "stock.db"
        self.sent = 0
        self._keys = [f"k{number}" for number in range(keys)]
        self._versions = dict.fromkeys(self._keys, 0)
        self._history: list[bytes] = []
        self._rng = random.Random(seed)
        self._runner = asyncio.Runner()
        self.app = keywise.App(f"sqlite:///{self.file}", observers=[])
        # What the producer does not say (its settings, its handler) does not matter: it only sends and looks.
        self.app.pipeline("stock", key="key", version="version").source(self.app.ledger_url).apply(_never)
        self.send()
        with self.connection() as connection:
            connection.executescript(TABLES.format(weight=weight))

    def close(self) -> None:
        self._runner.run(self.app.close())
        self._runner.close()

    def send(self, *bodies: dict | bytes) -> None:
        """Append messages, whoever holds the file meanwhile; what they say is the truth from now on."""
        self._tell_truth([body for body in bodies if isinstance(body, dict)])
        while True:
            try:
                self._runner.run(self.app.send("stock", *bodies))
            except UnavailableError:
                continue
            self.sent += len(bodies)
            return

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

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """What another program has; it commits at the end."""
        with closing(sqlite3.connect(self.file, timeout=30)) as connection, connection:
            yield connection

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else can write: a process that is stopped meanwhile does not hold up the others later."""
        with self.connection() as connection:
            connection.execute("begin immediate")
            yield

    def rows(self, statement: str) -> list[tuple]:
        with self.connection() as connection:
            return connection.execute(statement).fetchall()

    def backlog(self) -> int:
        """How many messages nobody has taken yet."""
        return self.rows("select count(*) from keywise_ready")[0][0]

    def content(self) -> dict[str, int]:
        return dict(self.rows("select key, version from stock"))

    def truth(self) -> dict[str, int]:
        return dict(self.rows("select key, version from truth where not gone"))

    def depth(self) -> int:
        return self._look(lambda pipeline: pipeline.sources[0][1].depth())

    def visible(self) -> int:
        """How many messages a new worker would get at once."""
        return len(self._look(lambda pipeline: pipeline.sources[0][1].receive(100_000, 0.0)))

    def census(self) -> Census:
        return self._look(lambda pipeline: pipeline.operator.census())

    def entry(self, key: str) -> Entry | None:
        return self._look(lambda pipeline: pipeline.operator.inspect(key))

    def held(self) -> list[str]:
        """Keys under a claim, whether its lease lasts or not."""
        return [key for (key,) in self.rows("select key from keywise_active where token != 0 order by key")]

    def letters(self) -> dict[str, str]:
        """The cause of each dead letter by its key."""
        found = self._look(lambda pipeline: pipeline.operator.letters(1000))
        return {letter.key: letter.cause for _, _, letter in found}

    def _look(self, act):
        async def look():
            async with self.app.open("stock", work=False) as pipeline:
                return await act(pipeline)

        return self._runner.run(look())

    def _tell_truth(self, news: list[dict]) -> None:
        """Before the message of it is sent, so that what is refetched is never older than what was delivered."""
        rows = [
            (one["key"], one["version"], msgspec.json.encode(one), one.get("gone", False))
            for one in sorted(news, key=lambda one: one["version"])
        ]
        if rows:
            with self.connection() as connection:
                connection.executemany(
                    "insert into truth values (?, ?, ?, ?) on conflict (key) do update set "
                    "version = excluded.version, body = excluded.body, gone = excluded.gone",
                    rows,
                )


async def _never(change: keywise.Change) -> None:
    raise AssertionError("the producer applies nothing")
