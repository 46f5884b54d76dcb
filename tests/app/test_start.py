"""A worker that starts before its servers waits for them; what waiting cannot mend ends it at once."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import keywise
from app.shop import QUICK
from keywise import Change
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.events import Available, Event, Settled, Started, Unavailable
from running import awaited, scaled
from servers import machine
from servers.redis import redis_server


class Bazaar:
    """An app with pipelines from queues to handlers that keep keys, and what it emitted."""

    def __init__(self, ledger: str) -> None:
        self.events: list[Event] = []
        self.stored: list[str] = []
        self.app = keywise.App(ledger, observers=[self.events.append])

    def pipeline(self, name: str, source: str) -> None:
        pipeline = self.app.pipeline(name, key="key", version="version", **QUICK)
        pipeline.source(source)

        @pipeline.apply
        async def keep(change: Change) -> None:
            self.stored.append(change.key)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, condition: Callable[[], object], running: asyncio.Task) -> None:
        async with asyncio.timeout(scaled(20)):
            while not condition():
                assert not running.done(), running
                await asyncio.wait([running], timeout=0.01)


def away() -> str:
    """The URL of a broker that is not there."""
    return f"amqp://guest:guest@127.0.0.1:{machine.free_port()}/?queue=shop"


@pytest.mark.server("redis")
@awaited
async def test_a_worker_waits_for_a_ledger_that_is_away_at_the_start(tmp_path: Path):
    with redis_server() as server:
        bazaar = Bazaar(server.url)
        bazaar.pipeline("shop", f"sqlite:///{tmp_path}/queue.db")
        await bazaar.app.send("shop", {"key": "a", "version": 1})
        server.stop()
        running = asyncio.create_task(bazaar.app.run(handle_signals=False))
        await bazaar.until(lambda: len(bazaar.of(Unavailable)) >= 3, running)
        server.start()
        await bazaar.until(lambda: bazaar.of(Settled), running)
        bazaar.app.stop()
        await running
        await bazaar.app.close()
    assert bazaar.stored == ["a"]
    waits = bazaar.of(Unavailable)
    assert {event.what for event in waits} == {"start"}
    assert [event.calls for event in waits] == list(range(1, len(waits) + 1))
    assert str(server.port) in waits[0].cause
    [back] = bazaar.of(Available)
    assert (back.what, back.calls) == ("start", len(waits))


@awaited
async def test_a_pipeline_that_can_start_does_not_wait_for_one_that_cannot(tmp_path: Path):
    bazaar = Bazaar(f"sqlite:///{tmp_path}/shop.db")
    bazaar.pipeline("away", away())
    bazaar.pipeline("here", f"sqlite:///{tmp_path}/shop.db")
    await bazaar.app.send("here", {"key": "a", "version": 1})
    running = asyncio.create_task(bazaar.app.run(handle_signals=False))
    await bazaar.until(lambda: bazaar.stored and len(bazaar.of(Unavailable)) >= 2, running)
    bazaar.app.stop()
    await running
    await bazaar.app.close()
    assert {event.pipeline for event in bazaar.of(Started)} == {"here"}
    assert {event.pipeline for event in bazaar.of(Unavailable)} == {"away"}


@awaited
async def test_a_worker_that_waits_for_its_start_can_be_stopped(tmp_path: Path):
    bazaar = Bazaar(f"sqlite:///{tmp_path}/shop.db")
    bazaar.pipeline("away", away())
    running = asyncio.create_task(bazaar.app.run(handle_signals=False))
    await bazaar.until(lambda: bazaar.of(Unavailable), running)
    bazaar.app.stop()
    await running
    assert bazaar.of(Started) == []


@awaited
async def test_a_worker_that_may_not_wait_raises(tmp_path: Path):
    bazaar = Bazaar(f"sqlite:///{tmp_path}/shop.db")
    bazaar.pipeline("away", away())
    with pytest.raises(UnavailableError, match="Connection refused"):
        await bazaar.app.run(handle_signals=False, wait=False)


@pytest.mark.server("redis")
@awaited
async def test_a_wrong_password_ends_a_worker_at_once(tmp_path: Path):
    with redis_server() as server:
        bazaar = Bazaar(server.url.replace("redis://", "redis://shop:wrong@"))
        bazaar.pipeline("shop", f"sqlite:///{tmp_path}/queue.db")
        with pytest.raises(DatabaseError, match="check user and password"):
            await bazaar.app.run(handle_signals=False)
    assert bazaar.events == []


@pytest.mark.server("redis")
@awaited
async def test_a_wrong_password_that_shows_while_waiting_ends_all(tmp_path: Path):
    """The server is away first, and then refuses the user."""
    with redis_server() as server:
        bazaar = Bazaar(server.url.replace("redis://", "redis://shop:wrong@"))
        bazaar.pipeline("shop", f"sqlite:///{tmp_path}/queue.db")
        server.stop()
        running = asyncio.create_task(bazaar.app.run(handle_signals=False))
        await bazaar.until(lambda: bazaar.of(Unavailable), running)
        server.start()
        with pytest.raises(DatabaseError, match="check user and password"):
            await running
