"""The one-change handler of all contenders: one upsert by itself, noted in the log."""

from typing import Any, Self

import asyncpg

from benchmarks import workload
from benchmarks.peers.record import Kind, Recorder, clock_ns
from benchmarks.peers.store import UPSERT


class Writer:
    """Writes changes with connections of its own."""

    def __init__(self, url: str, log: str, connections: int, kind: Kind = Kind.WROTE) -> None:
        self.recorder = Recorder(log)
        self._url = url
        self._connections = connections
        self._kind = kind
        self._pool: Any = None

    async def __aenter__(self) -> Self:
        # Without the round trip with which the pool cleans a connection after each use: there is nothing to clean.
        size = self._connections
        self._pool = await asyncpg.create_pool(self._url, min_size=size, max_size=size, reset=_nothing)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pool.close()

    async def write_body(self, body: bytes | str) -> None:
        """For queues that know nothing of keys and versions."""
        change = workload.decode(body)
        await self.write(change.content_id, change.payload_version, body)

    async def write(self, key: str, version: int, body: bytes | str) -> None:
        began_ns = clock_ns()
        text = body if isinstance(body, str) else body.decode()
        await self._pool.execute(UPSERT, key, version, text)
        self.recorder.note(self._kind, key, version, began_ns)


async def _nothing(connection: object) -> None:
    pass
