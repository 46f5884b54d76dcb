"""Pipelines from a queue in SQLite to a handler, with a ledger in Redis: as they work, die, and lose their marks."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import keywise
from app.shop import QUICK
from chaos.fleet import until
from cli.command import command, environment
from keywise.core.change import order_of
from keywise.core.errors import SettingsError, UnavailableError
from keywise.core.events import Alarmed, Event
from running import run
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

SHOP = """
import time
from pathlib import Path

import keywise

app = keywise.App({ledger!r})
shop = app.pipeline(
    "shop", key="key", version="version", poll="50ms", backoff="10ms", backoff_max="100ms", lease="1s", margin="200ms",
    horizon="500ms", repair="100ms",
)
shop.source("sqlite:///queue.db?visibility=1s")


@shop.apply
def keep(change: keywise.Change[dict]) -> None:
    with Path("log").open("a") as log:
        log.write(f"{{change.key}} {{change.version}}\\n")
    Path(change.key).write_text(str(change.version))
    time.sleep(change.value.get("seconds", 0) if not Path("killed").exists() else 0)


@shop.refetch
def truth(key: str) -> dict:
    return {{"key": key, "version": 2}}
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Shop:
    """One app, whose handler keeps what it was told last."""

    def __init__(self, folder: Path, ledger: str) -> None:
        self.events: list[Event] = []
        self.stored: dict[str, int] = {}
        self.app = keywise.App(ledger, observers=[self.events.append])
        pipeline = self.app.pipeline("shop", key="key", version="version", **QUICK)
        pipeline.source(f"sqlite:///{folder}/queue.db")

        @pipeline.apply
        async def keep(change: keywise.Change) -> None:
            self.stored[change.key] = change.version

    async def works_on(self, *bodies: dict) -> None:
        await self.app.send("shop", *bodies)
        async with self.app.open("shop", work=False) as pipeline:
            [(_, source)] = pipeline.sources
            while await source.depth():
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)


def running(shop: Shop, story) -> None:
    """Let the app work while a story is told, then drain it."""

    async def main() -> None:
        async with shop.app:
            work = asyncio.create_task(shop.app.run(handle_signals=False))
            try:
                await story()
            finally:
                shop.app.stop()
                await work

    run(main(), limit_s=60)


def test_newest_wins_and_what_is_older_is_stale(server, tmp_path):
    shop = Shop(tmp_path, server.url)

    async def story() -> None:
        await shop.works_on({"key": "a", "version": 2}, {"key": "b", "version": 1})
        await shop.works_on({"key": "a", "version": 1}, {"key": "b", "version": 3})

    running(shop, story)
    assert shop.stored == {"a": 2, "b": 3}


def test_what_was_lost_while_nothing_ran_raises_an_alarm_at_the_next_start(server, tmp_path):
    url = f"{server.url}?witness={tmp_path}/state"
    shops = [Shop(tmp_path, url), Shop(tmp_path, url)]
    for number, shop in enumerate(shops):

        async def story(shop: Shop = shop, number: int = number) -> None:
            await shop.works_on({"key": "a", "version": 2})
            while number and not [event for event in shop.events if isinstance(event, Alarmed)]:
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)

        running(shop, story)
        server.command("FLUSHALL")
    assert [event for event in shops[0].events if isinstance(event, Alarmed)] == []
    assert all("lost writes" in event.cause for event in shops[1].events if isinstance(event, Alarmed))
    assert shops[1].stored == {"a": 2}, "what was applied before is applied again"


def test_a_worker_goes_on_after_a_restart_and_tells_what_was_lost(server, tmp_path):
    shop = Shop(tmp_path, server.url)

    async def story() -> None:
        await shop.works_on({"key": "a", "version": 2})
        server.restart()
        await insisted(shop, {"key": "b", "version": 1})
        assert alarms(shop) == []
        server.lose()
        server.start()
        await insisted(shop, {"key": "c", "version": 1})
        while not alarms(shop):
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)

    running(shop, story)
    assert shop.stored == {"a": 2, "b": 1, "c": 1}

    async def told() -> None:
        async with shop.app.open("shop", work=False) as pipeline:
            assert (await pipeline.control_store.controls()).resync_at > 0
            assert "alarm" in [line.what for line in await pipeline.history_store.history("", 10)]

    run(told())


def test_what_would_need_a_transaction_is_refused(server, tmp_path):
    app = keywise.App(server.url)
    app.pipeline("table", key="key").source(f"sqlite:///{tmp_path}/a.db").sink(f"sqlite:///{tmp_path}/a.db?table=t")
    handled = app.pipeline("handled", key="key").source(f"sqlite:///{tmp_path}/a.db")

    @handled.apply
    async def keep(change: keywise.Change, transaction: keywise.Transaction) -> None: ...

    async def opened(name: str) -> None:
        async with app.open(name):
            pass

    for name in ("table", "handled"):
        with pytest.raises(SettingsError, match="takes no transaction"):
            run(opened(name))


def test_a_key_whose_worker_was_killed_is_taken_over_suspected_and_repaired(server, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP.format(ledger=server.url))
    app = keywise.App(server.url, observers=[])
    app.pipeline("shop", key="key", version="version").source(f"sqlite:///{tmp_path}/queue.db").apply(_never)
    runner = asyncio.Runner()
    runner.run(app.send("shop", {"key": "a", "version": 1, "seconds": 60}))
    first = start(tmp_path)
    until((tmp_path / "a").exists, "the handler to write")
    first.kill()
    first.wait(30)
    (tmp_path / "killed").touch()
    second = start(tmp_path)

    async def entry():
        async with app.open("shop", work=False) as pipeline:
            return await pipeline.admin.inspect("a")

    def is_repaired() -> bool:
        found = runner.run(entry())
        return found is not None and found.mark == order_of(2) and not found.suspicions and not found.token

    until(is_repaired, "the key to be repaired", limit_s=60)
    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0
    runner.run(app.close())
    runner.close()
    log = (tmp_path / "log").read_text().splitlines()
    assert log[0] == "a 1" and log[-1] == "a 2", log
    assert len(log) >= 3, "the change was tried again before the repair"


def start(folder: Path) -> subprocess.Popen:
    """A worker process."""
    return subprocess.Popen(
        command("run", "shop:app", "--plain"),
        cwd=folder,
        env=environment(None),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def alarms(shop: Shop) -> list[Event]:
    return [event for event in shop.events if isinstance(event, Alarmed)]


async def insisted(shop: Shop, *bodies: dict) -> None:
    """The queue is there; only who looks at the pipeline needs the ledger, and asks again."""
    while True:
        try:
            return await shop.works_on(*bodies)
        except UnavailableError:
            continue


async def _never(change: keywise.Change) -> None:
    raise AssertionError("only the workers apply anything")
