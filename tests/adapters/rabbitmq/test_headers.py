"""Keys, versions and trace ids in the headers and the routing key of a message: read sees them, also after a copy."""

import asyncio
from pathlib import Path

import pika
import pytest

import keywise
from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import owner
from adapters.rabbitmq.test_pipeline import QUICK
from adapters.rabbitmq.waiting import left_in, until
from keywise import Change, Delivery, PermanentError, Put, Snooze
from keywise.core.events import DeadLettered, Event
from keywise.operate.replay import replay
from running import awaited
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")


class Shop:
    """An app whose messages have their key in the routing key, and their version in a header."""

    def __init__(self, folder: Path, queue: str) -> None:
        self.events: list[Event] = []
        self.calls: list[tuple[str, int | None, str]] = []
        self.answers: list[object] = []
        """What the handler returns or raises, call by call."""
        self.app = keywise.App(f"sqlite:///{folder}/shop.db", observers=[self.events.append])
        pipeline = self.app.pipeline("stock", read=self._read, **QUICK)
        pipeline.source(f"{shared.rabbitmq().url}?queue={queue}")
        pipeline.apply(self._handle)

    def _read(self, body: dict, delivery: Delivery) -> Put:
        assert delivery.headers is not None
        return Put(delivery.routing_key.removeprefix("stock."), int(delivery.headers["version"]))

    async def _handle(self, change: Change[dict]) -> object:
        self.calls.append((change.key, change.version, (change.headers or {})["trace"]))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("times", [1, 3])
@awaited
async def test_read_sees_headers_and_routing_key_also_of_copies(tmp_path: Path, times: int):
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("headers"))
        await they._channel.ask("queue_bind", queue=queue, exchange="amq.direct", routing_key="stock.lamp")
        properties = pika.BasicProperties(delivery_mode=2, headers={"version": 7, "trace": "t1"})
        they._channel.raw.basic_publish("amq.direct", "stock.lamp", b"{}", properties)
        shop = Shop(tmp_path, queue)
        # A snoozed message is copied through a delay queue, each time; then it becomes a dead letter.
        shop.answers = [*[Snooze("100ms")] * (times - 1), PermanentError("no")]
        async with shop.app:
            working = asyncio.create_task(shop.app.run(handle_signals=False))
            await until(lambda: [one for one in shop.events if isinstance(one, DeadLettered)])
            async with shop.app.open("stock", work=False) as pipeline:
                [(number, _, letter)] = await pipeline.admin.dead_letters(10)
                assert (letter.routing_key, letter.headers) == ("stock.lamp", {"version": "7", "trace": "t1"})
                await replay(pipeline, number, letter)
            await until(lambda: len(shop.calls) == times + 1)
            await until(lambda: left_in(queue, 0))
            shop.app.stop()
            await working
    assert shop.calls == [("lamp", 7, "t1")] * (times + 1)
