"""From SQS to a table in SQLite: the table ends exact, and a message that waits stays with its worker."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

import keywise
from adapters.rabbitmq.test_pipeline import history
from adapters.sqs.benches import created, fresh, source_at
from adapters.sqs.waiting import received, until
from running import run
from servers import shared
from servers.aws_answers import aws_answers

pytestmark = pytest.mark.server("elasticmq")

QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "100ms", "evict_delay": "200ms"}


def url_of(port: int, queue: str) -> str:
    return f"sqs://127.0.0.1:{port}/{queue}?tls=off&settled=0s"


def test_the_table_ends_exact_under_duplicates_and_disorder(tmp_path: Path):
    bodies, truth = history(seed=11, keys=30, versions=8)
    file = tmp_path / "shop.db"

    async def story() -> None:
        queue = created(shared.elasticmq(), fresh("stock"))
        app = keywise.App(f"sqlite:///{file}")
        pipeline = app.pipeline("stock", key="key", version="version", deleted={"gone": [True]}, **QUICK)
        pipeline.source(url_of(shared.elasticmq().port, queue)).sink(f"sqlite:///{file}?table=stock")
        async with source_at(shared.elasticmq().port, queue) as source, app:
            await source.send(bodies)
            work = asyncio.create_task(app.run(handle_signals=False))

            async def is_drained() -> bool:
                return await source.depth() == 0

            await until(is_drained)
            app.stop()
            await work

    run(story(), limit_s=60)
    with sqlite3.connect(file) as connection:
        assert dict(connection.execute("select key, version from stock").fetchall()) == truth


def test_messages_are_received_once_however_long_they_wait_and_work():
    """Five changes of 1.5 seconds each, one at a time, on a visibility timeout of six seconds."""
    applied: list[str] = []

    async def story() -> None:
        queue = created(shared.elasticmq(), fresh("slow"))
        app = keywise.App("memory://")
        pipeline = app.pipeline("slow", key="key", version="version", lease="6s", concurrency=1, **QUICK)

        @pipeline.apply
        async def work_on(change: keywise.Change) -> None:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=1.5)
            applied.append(change.key)

        async with aws_answers(shared.elasticmq().url) as aws:
            pipeline.source(url_of(aws.port, queue))
            async with source_at(shared.elasticmq().port, queue) as source, app:
                await source.send([b'{"key": "k%d", "version": 1}' % number for number in range(5)])
                work = asyncio.create_task(app.run(handle_signals=False))

                async def is_drained() -> bool:
                    return await source.depth() == 0

                await until(is_drained)
                app.stop()
                await work
            visible = [asked["VisibilityTimeout"] for asked in aws.of("ReceiveMessage")]
            assert set(visible) == {6} and aws.receives_of(queue) == 5

    run(story(), limit_s=60)
    assert sorted(applied) == sorted(f"k{number}" for number in range(5))


def test_a_dead_letter_keeps_attributes_and_group_and_a_replay_sends_them_again(tmp_path: Path):
    async def story() -> None:
        queue = created(shared.elasticmq(), fresh("bad"))
        app = keywise.App(f"sqlite:///{tmp_path}/shop.db")
        pipeline = app.pipeline("stock", key="key", version="version", **QUICK)
        pipeline.source(url_of(shared.elasticmq().port, queue)).sink(f"sqlite:///{tmp_path}/shop.db?table=stock")
        async with source_at(shared.elasticmq().port, queue) as source, app:
            await source.send_again(b"no json", {"sender": "cms"}, "g")
            work = asyncio.create_task(app.run(handle_signals=False))
            async with app.open("stock", work=False) as opened:

                async def is_dead() -> bool:
                    return (await opened.admin.counts()).dead == 1

                await until(is_dead)
                [(_, _, letter)] = await opened.admin.dead_letters(10)
            app.stop()
            await work
            assert (letter.body, letter.headers, letter.routing_key) == (b"no json", {"sender": "cms"}, "g")
        # In another queue: a long poll that the pipeline has broken off may go on in the server, and take the message.
        async with source_at(shared.elasticmq().port, created(shared.elasticmq(), fresh("again"))) as source:
            await source.send_again(letter.body, letter.headers or {}, letter.routing_key)
            [again] = await received(source, 1)
            assert (again.headers, again.routing_key) == ({"sender": "cms"}, "g")

    run(story())
