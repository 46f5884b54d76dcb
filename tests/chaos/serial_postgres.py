"""What chaos does to a merge queue on Postgres: its sessions are ended by the server, and none may be left behind."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from servers.postgres import PostgresServer, postgres_server

BACKENDS = {"postgres-lock": "keywise lock", "postgres-queue": "keywise%"}
"""With the sessions that are ended: those with the locks, or all."""


class Site:
    """Where a merge queue lives, and how its sessions are ended."""

    def __init__(self, server: PostgresServer, backend: str) -> None:
        self.url = server.url
        self.settings = {"turns": backend, "run_here": True}
        self._sessions = BACKENDS[backend]

    def cut(self, is_atomic: bool) -> int:
        """How many sessions were ended. A transaction's is one of the pool."""
        [[ended]] = self._ask(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name like $1",
            "keywise%" if is_atomic else self._sessions,
        )
        return ended

    def leftovers(self) -> list[str]:
        """Sessions and advisory locks that are there though all processes have ended."""
        for _ in range(1000):
            [[sessions]] = self._ask("select count(*) from pg_stat_activity where application_name like 'keywise%'")
            [[locks]] = self._ask("select count(*) from pg_locks where locktype = 'advisory'")
            if not sessions and not locks:
                return []
        return [f"{sessions} sessions and {locks} locks are left"]

    def _ask(self, statement: str, *arguments: object) -> list:
        async def ask() -> list:
            connection = await asyncpg.connect(self.url)
            try:
                return await connection.fetch(statement, *arguments)
            finally:
                await connection.close()

        return asyncio.run(ask())


@contextmanager
def on_postgres(backend: str) -> Iterator[Site]:
    with postgres_server() as server:
        yield Site(server, backend)
