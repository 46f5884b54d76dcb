"""A queue of RabbitMQ, consumed as it is.

Messages come as they are asked for, and belong to the channel that they came on until they are acked.
A message that is put off is copied to a delay queue of ours; only when that is confirmed, the original is acked.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

from keywise.address import Address, shown
from keywise.change import Delivery
from keywise.databases.rabbitmq import NOT_FOUND, OPTIONS, Broker, Link, broker_at, refusal_code
from keywise.databases.rabbitmq_delays import Wait, wait_of, waits_of
from keywise.databases.rabbitmq_intake import WORN_AT, Intake
from keywise.databases.rabbitmq_messages import copied_properties, fresh_properties
from keywise.databases.rabbitmq_outlet import Message, Outlet, Rejection
from keywise.errors import AddressError, DatabaseError, UnavailableError
from keywise.settings import seconds

SCHEMES = ("amqp", "amqps")

ACK_TIMEOUT_S = 1_800.0
"""What a broker is set to by default."""
DELIVERY_LIMIT_MIN = WORN_AT + 2
"""With less, a message may be thrown away before it is made anew."""
PREFETCH = 2_000
PREFETCH_MAX = 65_535
QUEUE_MAX_BYTES = 255
IDLE_S = 1.0
"""If nobody asks for so long, nothing more comes, and what came ahead goes back."""
FRESH_S = 2.0
"""So long nothing is put into a new quorum queue: if the broker crashed then, it would forget what it had confirmed."""
EARLY_S = (1.0, 5.0)
"""The delays that are needed most: what finds no room behind a blocked key waits for five seconds by default."""
ABSENT_S = 60.0
"""How long a delay queue that was not there is believed to be missing."""


class RabbitSource:
    """One queue of a broker."""

    visibility_s: float | None = None
    database: object | None = None

    def __init__(
        self,
        broker: Broker,
        queue: str,
        *,
        prefetch: int = PREFETCH,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        management: str = "",
        second_s: float = 1.0,
    ) -> None:
        self.ack_timeout_s = ack_timeout_s
        """How long the broker lets a delivery be held."""
        self._management = management
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._second_s = second_s
        """How long a second of a delay takes, to check what time does."""
        self._link = Link(broker, f"taking from {queue}")
        self._outlet = Outlet(broker)
        self._opening = asyncio.Lock()
        self._intake: Intake | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._usable_at: dict[str, float] = {}
        """Delay queues that are there, and from when on they can be trusted."""
        self._absent: dict[str, float] = {}
        """Delay queues that were not there, and until when that is believed."""

    async def __aenter__(self) -> Self:
        try:
            await self._ready(self._queue)
            if self._management:
                await self._learn_limits()
        except BaseException:
            await self._link.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._rest_later(None)
        if self._intake is not None:
            self._broker.intakes.discard(self._intake)
        await self._link.close()
        await self._outlet.close()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        self._rest_later(None)
        intake = await self._opened()
        try:
            if wait_s > 0:
                await intake.wait(limit, wait_s)
            else:
                await intake.pull(limit)
        except DatabaseError as error:
            raise self._while_running(error) from error
        finally:
            self._rest_later(IDLE_S)
        intake.check()
        if worn := intake.worn():
            await self._renew(intake, worn)
        return intake.hand_over(limit)

    async def extend(self, deliveries: Sequence[Delivery], visibility_s: float) -> None:
        """They are hidden as long as the channel lives."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        if self._intake is not None:
            self._intake.ack(deliveries)

    async def release(self, deliveries: Sequence[Delivery], delay_s: float) -> None:
        intake = self._intake
        if intake is None or not (mine := intake.mine(deliveries)):
            return
        try:
            await self._put([(one.body, copied_properties(properties, one)) for one, properties in mine], delay_s)
        except (DatabaseError, UnavailableError) as error:
            # Whoever releases forgets them, and they would be here until the channel ends.
            intake.put_back_later(deliveries, delay_s)
            raise self._while_running(error) from error
        intake.ack(deliveries)

    async def send(self, bodies: Sequence[bytes], *, delay_s: float = 0.0) -> None:
        now, prefix = time.time(), secrets.token_hex(8)
        messages = [
            (body, fresh_properties(body, f"{prefix}.{number}", now)) for number, body in enumerate(bodies, start=1)
        ]
        await self._put(messages, delay_s)

    async def depth(self) -> int:
        """What is ready or delayed, and what this process holds; a broker tells nobody what other processes hold."""
        ready = await self._ready(self._queue)
        held = sum(len(intake) for intake in self._broker.intakes if intake.queue == self._queue)
        return ready + held + await self._delayed()

    # Taking.

    async def _learn_limits(self) -> None:
        limits = await asyncio.to_thread(self._broker.limits_of, self._queue, self._management)
        if limits.ack_timeout_s is not None:
            self.ack_timeout_s = limits.ack_timeout_s
        if limits.delivery_limit is not None and limits.delivery_limit < DELIVERY_LIMIT_MIN:
            raise DatabaseError(
                f"{self._broker.name}: the queue {self._queue!r} has the delivery limit {limits.delivery_limit}, and "
                f"would throw away messages whose workers were restarted; raise it to {DELIVERY_LIMIT_MIN} or more"
            )

    async def _opened(self) -> Intake:
        async with self._opening:
            if self._intake is None or self._intake.is_over:
                if self._intake is not None:
                    self._broker.intakes.discard(self._intake)
                    self._intake = None
                else:
                    # Early, so that they can be used when they are needed, and a user without the rights finds out now.
                    for delay_s in EARLY_S:
                        await self._declare(wait_of(self._queue, delay_s, time.time()))
                channel = await self._link.channel()
                self._intake = Intake(self._broker.name, channel, self._queue, self._prefetch)
                self._broker.intakes.add(self._intake)
            return self._intake

    async def _renew(self, intake: Intake, worn: Sequence[Delivery]) -> None:
        """A fresh copy at the end of the queue has all its lives before it."""
        copies = [(one.body, copied_properties(properties, one)) for one, properties in intake.mine(worn)]
        try:
            await self._put(copies, 0.0)
        except (DatabaseError, UnavailableError):
            intake.hand_over_next(worn)
        else:
            intake.ack(worn)

    def _rest_later(self, seconds: float | None) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if seconds is not None and self._intake is not None:
            self._resting = asyncio.get_running_loop().call_later(seconds, self._intake.rest)

    # Putting.

    async def _put(self, messages: Sequence[Message], delay_s: float) -> None:
        """Into the queue, or into a delay queue first."""
        if not messages:
            return
        try:
            if delay_s <= 0:
                await self._outlet.publish(self._queue, messages)
            else:
                await self._put_off(messages, delay_s * self._second_s)
        except Rejection as error:
            if error.is_missing:
                raise self._missing() from error
            raise UnavailableError(
                f"{self._broker.name}: the queue {self._queue!r} takes no more messages; raise its length limit"
            ) from error

    async def _put_off(self, messages: Sequence[Message], delay_s: float) -> None:
        wait = wait_of(self._queue, delay_s, time.time())
        for _, properties in messages:
            properties.expiration = wait.expiration
        await self._declare(wait)
        await asyncio.sleep(self._usable_at[wait.queue] - asyncio.get_running_loop().time())
        try:
            await self._outlet.publish(wait.queue, messages)
        except Rejection as error:
            if not error.is_missing:
                raise
            # Somebody has deleted it; whoever puts something off next makes it anew.
            self._usable_at.pop(wait.queue, None)
            raise UnavailableError(f"{self._broker.name}: the queue {wait.queue!r} was deleted") from error

    async def _declare(self, wait: Wait) -> None:
        if wait.queue in self._usable_at:
            return
        try:
            await self._ready(wait.queue)
        except DatabaseError as error:
            if refusal_code(error) != NOT_FOUND:
                raise
            await self._outlet.declare(wait.queue, wait.arguments(self._queue))
        # One that was found may have been made by somebody else a moment ago.
        self._usable_at[wait.queue] = asyncio.get_running_loop().time() + FRESH_S * self._second_s
        self._absent.pop(wait.queue, None)

    # Looking.

    async def _ready(self, queue: str) -> int:
        channel = await self._link.channel()
        try:
            answer = await channel.ask("queue_declare", queue=queue, passive=True)
        finally:
            channel.close()
        return int(answer.method.message_count)

    async def _delayed(self) -> int:
        now, delayed = time.time(), 0
        for wait in waits_of(self._queue, now):
            if self._absent.get(wait.queue, 0.0) > now:
                continue
            try:
                delayed += await self._ready(wait.queue)
            except DatabaseError as error:
                if refusal_code(error) != NOT_FOUND:
                    raise
                self._absent[wait.queue] = now + ABSENT_S
        return delayed

    def _missing(self) -> DatabaseError:
        return DatabaseError(
            f"{self._broker.name}: no queue is called {self._queue!r}; declare it first: keywise consumes queues as "
            "they are"
        )

    def _while_running(self, error: DatabaseError | UnavailableError) -> DatabaseError | UnavailableError:
        """A queue that vanished may be declared again, and everything else goes on meanwhile."""
        if isinstance(error, DatabaseError) and refusal_code(error) in (0, NOT_FOUND):
            return UnavailableError(str(error))
        return error


def connect(address: Address) -> RabbitSource:
    """`amqp://user:password@host:5672/vhost?queue=NAME`; the queue is named like the pipeline by default."""
    options = address.take("queue", "prefetch", "ack_timeout", "management", *OPTIONS)
    broker = broker_at(address, options)
    prefetch = options.get("prefetch", str(PREFETCH))
    if not prefetch.isdecimal() or not 1 <= int(prefetch) <= PREFETCH_MAX:
        raise AddressError(
            f"{shown(address.url)}: prefetch={prefetch} has to be a whole number from 1 to {PREFETCH_MAX}"
        )
    queue = options.get("queue", address.name)
    if not 0 < len(queue.encode()) <= QUEUE_MAX_BYTES:
        raise AddressError(f"{shown(address.url)}: the name of a queue has from 1 to {QUEUE_MAX_BYTES} bytes")
    management = options.get("management", "")
    if management and (urlsplit(management).scheme not in ("http", "https") or not urlsplit(management).hostname):
        raise AddressError(
            f"{shown(address.url)}: management={management} is no address of an API; write for example "
            "management=http://localhost:15672"
        )
    return RabbitSource(
        broker,
        queue,
        prefetch=int(prefetch),
        ack_timeout_s=seconds(options.get("ack_timeout", ACK_TIMEOUT_S)),
        management=management,
    )
