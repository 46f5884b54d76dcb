"""Connections to Redis that lead nowhere any more: cut off while idle, or to what has become a replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from chaos.fleet import until
from keywise.adapters.redis import database as redis_module
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Commit, LeaseTerms, LedgerPolicy
from keywise.core.errors import UnavailableError
from running import run
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

TERMS = LeaseTerms("w1", 60.0)


class Name:
    """Leads new connections to one server; those that are there stay where they are."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.url = ""

    @asynccontextmanager
    async def known(self) -> AsyncIterator["Name"]:
        async with asyncio.TaskGroup() as tasks:
            listener = await asyncio.start_server(
                lambda *caller: tasks.create_task(self._lead(*caller)), "127.0.0.1", 0
            )
            self.url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
            yield self
            listener.close()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.server.port)
        await asyncio.gather(_pumped(reader, back), _pumped(there, writer))


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def test_after_a_failover_the_first_refusal_leads_to_the_new_master(monkeypatch):
    monkeypatch.setattr(redis_module, "IDLE_S", 600.0)

    async def story(old: RedisServer, new: RedisServer) -> None:
        new.command("REPLICAOF", "127.0.0.1", str(old.port))
        async with Name(old).known() as name, RedisLedger(RedisDatabase(name.url), "shop", LedgerPolicy()) as ledger:
            together = [ledger.claim([ChangeHeader(key, order_of(1))], TERMS) for key in "abcd"]
            for results in await asyncio.gather(*together):
                await ledger.commit([Commit(claim) for claim in results.granted])
            old.command("SET", "last", "written")
            until(lambda: "written" in new.command("GET", "last"), "the replica to have it all")
            new.command("REPLICAOF", "NO", "ONE")
            old.command("REPLICAOF", "127.0.0.1", str(new.port))
            name.server = new
            with pytest.raises(UnavailableError, match="read only"):
                await ledger.claim([ChangeHeader("a", order_of(2))], TERMS)
            assert len((await ledger.claim([ChangeHeader("a", order_of(2))], TERMS)).granted) == 1
            assert ledger.losses == 0

    with redis_server(repl_diskless_sync_delay="0") as old, redis_server() as new:
        run(story(old, new))


def test_connections_that_were_cut_off_while_nobody_used_them_are_not_noticed(monkeypatch):
    async def story(server: RedisServer) -> None:
        async with RedisLedger(RedisDatabase(server.url), "shop", LedgerPolicy()) as ledger:
            await asyncio.gather(*(ledger.counts() for _ in range(4)))
            assert server.command("CLIENT", "KILL", "TYPE", "normal") != ":0\r\n"
            monkeypatch.setattr(redis_module, "IDLE_S", -1.0)
            await ledger.counts()

    with redis_server() as server:
        run(story(server))
