"""One timed load of calls in a process of its own: a serial function on one of its stores, or a bare loop."""

import asyncio
import hashlib
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from typing import Any
from urllib.parse import unquote

import asyncpg
from redis.asyncio import BlockingConnectionPool, Redis

import keywise
from benchmarks.callers import TABLE, Ask, Load, as_it_is, enter, prepare, work
from keywise import Claim, Transaction

CONNECTIONS = 16
"""Of the bare loop. Whoever waits for a lock holds one, and the others wait for a connection."""
ANSWERS = "create table answers (id text primary key, key text not null, answer bigint not null)"
ANSWER = "insert into answers (id, key, answer) values ($1, $2, $3)"
SQLITE = "sqlite:///"
LOCK_MS = 30_000
LOOK_S, LOOK_MAX_S = 0.001, 0.016
"""How often the bare loop looks whether a lock in Redis is free: 1 ms at first, then twice as long each time."""
UNLOCK = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


@asynccontextmanager
async def bare(url: str, load: Load) -> AsyncIterator[Ask]:
    """What one would write by hand: lock, work and answer in one transaction."""
    await prepare(url, load.keys, ANSWERS)
    async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS, reset=as_it_is) as pool:

        async def ask(key: str) -> int:
            async with pool.acquire() as connection:
                # In one round trip.
                await connection.execute(f"begin; select pg_advisory_xact_lock({lock_of(key):d})")
                answer = await work(connection, key)
                await connection.execute(ANSWER, secrets.token_hex(16), key, answer)
                await connection.execute("commit")
                return answer

        yield ask


def lock_of(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), signed=True)


@asynccontextmanager
async def on_postgres(turns: str, url: str, load: Load) -> AsyncIterator[Ask]:
    await prepare(url, load.keys)
    app = keywise.App(url)

    @app.serial("take", key=str, turns=turns, run_here=True)
    async def take(claim: Claim, key: str, transaction: Transaction) -> int:
        return await work(transaction.connection, key)

    async with app:
        yield take


@asynccontextmanager
async def bare_sqlite(url: str, load: Load) -> AsyncIterator[Ask]:
    """The same by hand on a file, as durable as keywise keeps it: the file itself is the lock."""
    path = fill_sqlite(url, load.keys)
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.executescript("pragma journal_mode = wal; pragma synchronous = full")
        file.execute("create table answers (id text primary key, key text not null, answer integer not null)")

        async def ask(key: str) -> int:
            file.execute("begin immediate")
            answer = work_on_sqlite(file, key)
            file.execute("insert into answers values (?, ?, ?)", (secrets.token_hex(16), key, answer))
            file.execute("commit")
            # Others have their turn.
            await asyncio.sleep(0)
            return answer

        yield ask


@asynccontextmanager
async def on_sqlite(url: str, load: Load) -> AsyncIterator[Ask]:
    """The same work in a file."""
    fill_sqlite(url, load.keys)
    app = keywise.App(url)

    @app.serial("take", key=str)
    async def take(claim: Claim, key: str, transaction: Transaction) -> int:
        return work_on_sqlite(transaction.connection, key)

    async with app:
        yield take


def fill_sqlite(url: str, keys: int) -> str:
    path = unquote(url.removeprefix(SQLITE))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(TABLE)
        file.executemany("insert into slots values (?, 0)", [(f"k{number}",) for number in range(keys)])
    return path


def work_on_sqlite(connection: sqlite3.Connection, key: str) -> int:
    [[taken]] = connection.execute("select taken from slots where key = ?", (key,))
    connection.execute("update slots set taken = ? where key = ?", (taken + 1, key))
    return int(taken) + 1


@asynccontextmanager
async def bare_redis(url: str, load: Load) -> AsyncIterator[Ask]:
    """What one would write by hand: a lock with a time, the work, its answer, and the lock is let go."""
    async with connected(url) as redis:
        unlock = redis.register_script(UNLOCK)

        async def ask(key: str) -> int:
            id, look_s = secrets.token_hex(16), LOOK_S
            while not await redis.set(f"lock:{key}", id, nx=True, px=LOCK_MS):
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, LOOK_MAX_S)
            answer = await work_on_redis(redis, key)
            await redis.set(f"answer:{id}", answer)
            await unlock(keys=[f"lock:{key}"], args=[id])
            return answer

        yield ask


@asynccontextmanager
async def on_redis(url: str, load: Load) -> AsyncIterator[Ask]:
    app = keywise.App(url)
    async with connected(url) as redis, app:

        @app.serial("take", key=str, concurrency=CONNECTIONS)
        async def take(claim: Claim, key: str) -> int:
            return await work_on_redis(redis, key)

        yield take


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    redis: Any = Redis(connection_pool=BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS))
    try:
        await redis.flushdb()
        yield redis
    finally:
        await redis.aclose()


async def work_on_redis(redis: Any, key: str) -> int:
    taken = int(await redis.get(f"slot:{key}") or 0) + 1
    await redis.set(f"slot:{key}", taken)
    return taken


@asynccontextmanager
async def on_memory(url: str, load: Load) -> AsyncIterator[Ask]:
    """Nothing outlives the process."""
    app, slots = keywise.App("memory://"), dict[str, int]()

    @app.serial("take", key=str)
    async def take(claim: Claim, key: str) -> int:
        taken = slots.get(key, 0)
        await asyncio.sleep(0)
        slots[key] = taken + 1
        return slots[key]

    async with app:
        yield take


ASKERS: dict[str, Callable[[str, Load], AbstractAsyncContextManager[Ask]]] = {
    "bare": bare,
    "bare-sqlite": bare_sqlite,
    "bare-redis": bare_redis,
    "postgres-lock": partial(on_postgres, "postgres-lock"),
    "postgres-queue": partial(on_postgres, "postgres-queue"),
    "sqlite": on_sqlite,
    "redis": on_redis,
    "memory": on_memory,
}

if __name__ == "__main__":
    enter(ASKERS)
