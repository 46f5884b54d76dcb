"""From Pub/Sub to a table in SQLite: the table ends exact, waiting messages stay with their worker, none is lost."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

import keywise
from adapters.pubsub.benches import PROJECT, created, fresh, source_at, topic_of
from adapters.pubsub.waiting import received, until
from adapters.rabbitmq.test_pipeline import history
from running import run
from servers import shared
from servers.pubsub_answers import pubsub_answers

pytestmark = pytest.mark.server("pubsub")

QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "100ms", "evict_delay": "200ms"}


def url_of(subscription: str, address: str = "") -> str:
    return f"pubsub://{PROJECT}/{subscription}?settled=0s&emulator={address or shared.pubsub().address}"


def is_drained(subscription: str) -> bool:
    return shared.pubsub().unacked(topic_of(subscription)) == 0


def test_the_table_ends_exact_under_duplicates_and_disorder(tmp_path: Path):
    """Pub/Sub itself hands over in any order, so the versions decide."""
    bodies, truth = history(seed=11, keys=30, versions=8)
    file = tmp_path / "shop.db"

    async def story() -> None:
        name = await created(fresh("stock"))
        app = keywise.App(f"sqlite:///{file}")
        pipeline = app.pipeline("stock", key="key", version="version", deleted={"gone": [True]}, **QUICK)
        pipeline.source(url_of(name)).sink(f"sqlite:///{file}?table=stock")
        async with source_at(shared.pubsub().address, name) as source, app:
            await source.send(bodies)
            work = asyncio.create_task(app.run(handle_signals=False))
            await until(lambda: is_drained(name))
            app.stop()
            await work

    run(story(), limit_s=60)
    with sqlite3.connect(file) as connection:
        assert dict(connection.execute("select key, version from stock").fetchall()) == truth


def test_messages_are_received_once_however_long_they_wait_and_work():
    """Four changes of three seconds each, one at a time, on an ack deadline of ten seconds."""
    applied: list[str] = []

    async def story() -> None:
        name = await created(fresh("slow"), attempts_max=5)
        app = keywise.App("memory://")
        pipeline = app.pipeline("slow", key="key", version="version", lease="6s", concurrency=1, **QUICK)

        @pipeline.apply
        async def work_on(change: keywise.Change) -> None:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=3.0)
            applied.append(change.key)

        async with pubsub_answers(shared.pubsub().address) as proxy:
            pipeline.source(url_of(name, proxy.address))
            async with source_at(shared.pubsub().address, name) as source, app:
                await source.send([b'{"key": "k%d", "version": 1}' % number for number in range(4)])
                work = asyncio.create_task(app.run(handle_signals=False))
                await until(lambda: is_drained(name))
                app.stop()
                await work
            assert {one.ack_deadline_seconds for one in proxy.of("ModifyAckDeadline")} == {10}
            receipts = [receipt for one in proxy.of("Acknowledge") for receipt in one.ack_ids]
            assert len(receipts) == 4 and all(receipt.endswith(":1") for receipt in receipts), "some came twice"

    run(story(), limit_s=60)
    assert sorted(applied) == [f"k{number}" for number in range(4)]


def test_the_last_delivery_becomes_a_dead_letter_of_ours_and_a_replay_is_applied(tmp_path: Path):
    """Four workers give the message back. At the fifth delivery, Pub/Sub would take it away if that one died too."""

    async def story() -> None:
        name = await created(fresh("worn"), attempts_max=5)
        app = keywise.App(f"sqlite:///{tmp_path}/shop.db")
        pipeline = app.pipeline("stock", key="key", version="version", **QUICK)
        pipeline.source(url_of(name)).sink(f"sqlite:///{tmp_path}/shop.db?table=stock")
        async with source_at(shared.pubsub().address, name) as source, app:
            await source.send_again(b'{"key": "k", "version": 3}', {"sender": "cms"}, "g")
            for _ in range(4):
                await source.release(await received(source, 1), 0.0)
            await source.send([b'{"key": "other", "version": 1}'])
            work = asyncio.create_task(app.run(handle_signals=False))
            await until(lambda: is_drained(name))
            async with app.open("stock", work=False) as opened:
                [(_, _, letter)] = await opened.admin.dead_letters(10)
                assert (letter.key, letter.version, letter.headers, letter.routing_key) == (
                    "k",
                    3,
                    {"sender": "cms"},
                    "g",
                )
                assert letter.cause.startswith("delivered 5 times, and the dead-letter policy")
            async with source_at(shared.pubsub().address, f"{name}_dead") as letters:
                assert await letters.receive(1, 0.0) == [], "Pub/Sub has taken the message away"
            await source.send_again(letter.body, letter.headers or {}, letter.routing_key)
            await until(lambda: is_drained(name))
            app.stop()
            await work

    run(story(), limit_s=60)
    with sqlite3.connect(f"{tmp_path}/shop.db") as connection:
        assert dict(connection.execute("select key, version from stock").fetchall()) == {"k": 3, "other": 1}


def test_a_dead_letter_keeps_attributes_and_ordering_key(tmp_path: Path):
    async def story() -> None:
        name = await created(fresh("bad"))
        app = keywise.App(f"sqlite:///{tmp_path}/shop.db")
        pipeline = app.pipeline("stock", key="key", version="version", **QUICK)
        pipeline.source(url_of(name)).sink(f"sqlite:///{tmp_path}/shop.db?table=stock")
        async with source_at(shared.pubsub().address, name) as source, app:
            await source.send_again(b"no json", {"sender": "cms"}, "g")
            work = asyncio.create_task(app.run(handle_signals=False))
            await until(lambda: is_drained(name))
            async with app.open("stock", work=False) as opened:
                [(_, _, letter)] = await opened.admin.dead_letters(10)
            app.stop()
            await work
        assert (letter.body, letter.headers, letter.routing_key) == (b"no json", {"sender": "cms"}, "g")

    run(story())
