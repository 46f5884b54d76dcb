"""A shop on a Postgres of its own: worker processes, a feed, and a table whose every write is logged by a trigger."""

import asyncio
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import asyncpg

import keywise
from chaos.fleet import until
from integration.command import command, environment
from keywise.errors import UnavailableError

T = TypeVar("T")

STARTED = "atomic (each effect exactly once)"
SHOP = """
import keywise

app = keywise.App({url!r})
shop = app.pipeline(
    "shop", key="key", version="version", deleted={{"gone": [True]}}, poll="50ms", backoff="10ms", backoff_max="100ms",
    lease="3s", margin="500ms", batch_max=100,
)
shop.source({url!r} + "?visibility=3s")
"""
TABLE_SINK = 'shop.sink({url!r} + "?table=stock")\n'
HANDLER = """

@shop.apply
async def keep(change: keywise.Change, transaction: keywise.Transaction) -> None:
    if change.deleted:
        await transaction.connection.execute("delete from stock where key = $1", change.key)
        return
    await transaction.connection.execute(
        "insert into stock values ($1, $2, $3) on conflict (key) do update "
        "set version = excluded.version, body = excluded.body",
        change.key, change.version, change.body.decode(),
    )
"""
TABLES = """
create table stock (key text primary key, version bigint, body text);
create table log (seq bigint generated always as identity, key text, version bigint, op text);
create function note() returns trigger language plpgsql as $$ begin
    insert into log (key, version, op) values (coalesce(new.key, old.key), new.version, tg_op);
    return null;
end $$;
create trigger noted after insert or update or delete on stock for each row execute function note();
"""


class PostgresShop:
    """A folder with the app, the workers that run it, and a producer."""

    def __init__(self, folder: Path, url: str, way: str = "one transaction", seed: int = 1) -> None:
        self.folder, self.url = folder, url
        sink = TABLE_SINK.format(url=url) if way == "one transaction" else HANDLER
        (folder / "shop.py").write_text(SHOP.format(url=url) + sink)
        self.workers: list[subprocess.Popen] = []
        self.sent = 0
        self._errors = (folder / "errors").open("ab")
        self._rng = random.Random(seed)
        self._versions: dict[str, int] = {}
        self._truth: dict[str, int] = {}
        self._history: list[dict] = []
        self._runner = asyncio.Runner()
        self._app = keywise.App(url, observers=[])
        self._app.pipeline("shop", key="key", version="version").source(url)
        self._runner.run(self._app.send("shop"))
        self.ask(lambda connection: connection.execute(TABLES))

    def start(self) -> subprocess.Popen:
        """One more worker, once its pipeline runs."""
        started = self._said(STARTED)
        arguments = command("run", "shop:app", "--plain")
        worker = subprocess.Popen(
            arguments, cwd=self.folder, env=environment(None), stdout=subprocess.DEVNULL, stderr=self._errors
        )
        self.workers.append(worker)
        until(lambda: self._said(STARTED) > started, "a worker to start", self.check)
        return worker

    def kill(self, worker: subprocess.Popen) -> None:
        """`kill -9`."""
        worker.kill()
        worker.wait(30)
        self.workers.remove(worker)

    def produce(self, count: int = 200, keys: int = 100) -> None:
        """Change some keys; send that out of order, and some older messages once more."""
        news = []
        for number in self._rng.choices(range(keys), k=count):
            key = f"k{number}"
            self._versions[key] = version = self._versions.get(key, 0) + 1
            is_gone = self._rng.random() < 0.1
            self._truth.pop(key, None) if is_gone else self._truth.update({key: version})
            news.append({"key": key, "version": version, "gone": is_gone})
        self._rng.shuffle(news)
        self._history += news
        again = self._rng.choices(self._history[-2000:], k=count // 5)
        self._send([*news, *again])

    def ask(self, act: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """Do something over a connection of its own."""

        async def asked() -> T:
            connection = await asyncpg.connect(self.url)
            try:
                return await act(connection)
            finally:
                await connection.close()

        return self._runner.run(asked())

    def rows(self, statement: str) -> list:
        return self.ask(lambda connection: connection.fetch(statement))

    def depth(self) -> int:
        [[depth]] = self.rows("select (select count(*) from keywise_ready) + (select count(*) from keywise_held)")
        return depth

    def writes(self) -> int:
        return self.rows("select count(*) from log")[0][0]

    def until_empty(self, limit_s: float = 60) -> None:
        until(lambda: self.depth() == 0, "the queue to be empty", self.check, limit_s=limit_s)

    def until_written(self, more: int) -> None:
        """Wait until some more writes have been logged, so that the workers are at it."""
        wanted = self.writes() + more
        until(lambda: self.writes() >= wanted or self.depth() == 0, "some writes", self.check)

    def check(self) -> None:
        for worker in self.workers:
            assert worker.poll() is None, (self.folder / "errors").read_text()[-3000:]

    def drain(self) -> None:
        """Let all workers end; each must end well."""
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            assert worker.wait(30) == 0, (self.folder / "errors").read_text()[-3000:]
        self.workers = []

    def faults(self) -> list[str]:
        """What the log and the table tell against the workers."""
        found, newest = [], dict[str, int]()
        for key, version, op in self.rows("select key, version, op from log order by seq"):
            if op != "DELETE" and version <= newest.get(key, 0):
                found.append(f"{key} was written at {version} after {newest[key]}")
            newest[key] = max(newest.get(key, 0), version or 0)
        stored = dict(self.rows("select key, version from stock"))
        if stored != self._truth:
            found.append(f"the table differs: {sorted(set(stored.items()) ^ set(self._truth.items()))[:10]}")
        found += (f"a dead letter of {cause}" for (cause,) in self.rows("select cause from keywise_letters"))
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait(30)
        self._runner.run(self._app.close())
        self._runner.close()
        self._errors.close()

    def _said(self, text: str) -> int:
        return (self.folder / "errors").read_text().count(text)

    def _send(self, bodies: list[dict]) -> None:
        """If the answer is lost, once more: a message too many does no harm."""
        while True:
            try:
                self._runner.run(self._app.send("shop", *bodies))
            except UnavailableError:
                continue
            self.sent += len(bodies)
            return
