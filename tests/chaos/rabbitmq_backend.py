"""A queue in RabbitMQ, beside ledger and table in a SQLite file: a quorum queue with a low limit and a graveyard."""

import asyncio
from collections.abc import Sequence
from typing import Any

from chaos.fleet import pause
from chaos.sqlite_backend import SqliteShelf
from keywise.adapters.rabbitmq.broker import Broker, BrokerLink
from keywise.adapters.rabbitmq.delay_queues import DelayQueues
from keywise.adapters.rabbitmq.publisher import Publisher
from keywise.adapters.rabbitmq.source import PREPARED_DELAYS_S
from keywise.core.errors import KeywiseError
from servers.rabbitmq import RabbitServer

QUEUE, GRAVEYARD = "stock", "graveyard"
LIMIT = 12
"""So often a message may come from channels that are lost; what comes more often is thrown into the graveyard.

keywise copies a message that came back three times, but a worker that has just started needs two seconds before it can:
with a limit of 6, faults that follow each other within tenths of a second were faster now and then."""
MANY = 1_000_000
ARGUMENTS = {
    "x-queue-type": "quorum",
    "x-delivery-limit": LIMIT,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": GRAVEYARD,
}


class RabbitShelf:
    """A queue of its own; only its broker is restarted, and only connections to it are cut."""

    on = "rabbitmq"
    logs_marks = True

    def __init__(self, server: RabbitServer, beside: SqliteShelf, arguments: dict[str, Any] | None = None) -> None:
        self._server = server
        self._beside = beside
        self.ledger, self.url = beside.ledger, beside.url
        self.queue = f"{server.url}?queue={QUEUE}"
        self._runner = asyncio.Runner()
        self._link: BrokerLink | None = None
        self._runner.run(self._declare(GRAVEYARD, {"x-queue-type": "quorum"}))
        self._runner.run(self._declare(QUEUE, ARGUMENTS if arguments is None else arguments))
        pause(self._runner.run(self._prepare_delays()))  # A queue whose broker crashes right then never has a leader.

    def create(self, *, is_heavy: bool) -> None:
        self._beside.create(is_heavy=is_heavy)

    def rows(self, statement: str) -> list[tuple]:
        return self._beside.rows(statement)

    def tell_truth(self, rows: Sequence[tuple]) -> None:
        self._beside.tell_truth(rows)

    def backlog(self) -> int:
        """Nothing more is sent while nobody can tell."""
        try:
            return self._runner.run(self._ready())
        except KeywiseError:
            return MANY

    def depth(self) -> int:
        """What any worker holds, and what waits in a delay queue or lies in the graveyard, counts too."""
        try:
            return self._server.messages()
        except RuntimeError:
            return MANY  # A queue that has no leader yet cannot tell.

    def buried(self) -> int:
        """How many messages the queue has thrown away."""
        return self._server.messages(GRAVEYARD)

    def restart(self) -> None:
        self._server.restart()

    def cut(self) -> None:
        self._server.cut_connections()

    def close(self) -> None:
        if self._link is not None:
            self._runner.run(self._link.close())
        self._runner.close()
        self._beside.close()

    async def _ready(self) -> int:
        channel = await self._opened().channel()
        answer = await channel.ask("queue_declare", queue=QUEUE, passive=True)
        channel.close()
        return int(answer.method.message_count)

    async def _declare(self, queue: str, arguments: dict[str, Any]) -> None:
        channel = await self._opened().channel()
        await channel.ask("queue_declare", queue=queue, durable=True, arguments=arguments)
        channel.close()

    async def _prepare_delays(self) -> float:
        """Make the delay queues; return in how many seconds they can be used."""
        broker = Broker(self._server.url)
        publisher = Publisher(broker)
        delay_queues = DelayQueues(broker, self._opened(), publisher, QUEUE)
        usable_in_s = [await delay_queues.usable_in_s(delay_s) for delay_s in PREPARED_DELAYS_S]
        await publisher.close()
        return max(usable_in_s)

    def _opened(self) -> BrokerLink:
        if self._link is None:
            self._link = BrokerLink(Broker(self._server.url), "looking")
        return self._link
