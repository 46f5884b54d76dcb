"""The design that keywise grew from: a lock and the latest version of each key in Redis, message by message.

Messages come from a Redis stream with a group of consumers. For each one: take `lock:KEY`, waiting for it if somebody
has it; leave the message alone if `latest:KEY` is not older; write; set `latest:KEY`; release the lock; ack.
"""

import asyncio
import secrets
from typing import Any

import redis.asyncio

from benchmarks import workload
from benchmarks.peers.entrance import enter
from benchmarks.peers.handler import Writer
from benchmarks.peers.locks import Locks
from benchmarks.peers.place import Place
from benchmarks.peers.record import Kind, clock_ns

STREAM, GROUP, AT_ONCE = "pages", "workers", 1000


async def fill(place: Place) -> None:
    client: Any = redis.asyncio.Redis.from_url(place.redis)
    await client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    bodies = place.bodies()
    for start in range(0, len(bodies), AT_ONCE):
        async with client.pipeline(transaction=False) as pipe:
            for body in bodies[start : start + AT_ONCE]:
                pipe.xadd(STREAM, {"body": body})
            await pipe.execute()
    await client.aclose()


async def work(place: Place) -> None:
    concurrency = int(place.settings["concurrency"])
    waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(int(place.settings["prefetch"]))
    async with Writer(place, concurrency) as writer, asyncio.TaskGroup() as group:
        worker = Worker(place, writer)
        group.create_task(worker.receive(waiting))
        for _ in range(concurrency):
            group.create_task(worker.handle_all(waiting))


class Worker:
    """One process that takes messages and brings them to an end, many side by side."""

    def __init__(self, place: Place, writer: Writer) -> None:
        self._redis: Any = redis.asyncio.Redis.from_url(place.redis)
        self._locks = Locks(self._redis)
        self._writer = writer
        self._prefetch = int(place.settings["prefetch"])

    async def receive(self, waiting: asyncio.Queue[tuple[bytes, bytes]]) -> None:
        name = secrets.token_hex(4)
        while True:
            found = await self._redis.xreadgroup(GROUP, name, {STREAM: ">"}, count=self._prefetch, block=1000)
            for _, messages in found:
                for number, fields in messages:
                    await waiting.put((number, fields[b"body"]))

    async def handle_all(self, waiting: asyncio.Queue[tuple[bytes, bytes]]) -> None:
        while True:
            await self._handle(*await waiting.get())

    async def _handle(self, number: bytes, body: bytes) -> None:
        change = workload.decode(body)
        key, version = change.content_id, change.payload_version
        is_newer = await self._locks.write_newer(
            key,
            version,
            lambda: self._writer.write(key, version, body),
            lambda pipe: pipe.xack(STREAM, GROUP, number),
        )
        if not is_newer:
            self._writer.recorder.note(Kind.SKIPPED, key, version, clock_ns())


if __name__ == "__main__":
    enter(fill, work)
