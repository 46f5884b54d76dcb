"""One timed load of calls in a process of its own: a serial function on one of its stores, or a bare loop."""

import hashlib
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from urllib.parse import unquote

import asyncpg

import keywise
from benchmarks.callers import TABLE, Ask, Load, as_it_is, enter, prepare, work
from keywise import Claim, Transaction

CONNECTIONS = 16
"""Of the bare loop. Whoever waits for a lock holds one, and the others wait for a connection."""
ANSWERS = "create table answers (id text primary key, key text not null, answer bigint not null)"
ANSWER = "insert into answers (id, key, answer) values ($1, $2, $3)"
SQLITE = "sqlite:///"


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
async def on_sqlite(url: str, load: Load) -> AsyncIterator[Ask]:
    """The same work in a file."""
    with closing(sqlite3.connect(unquote(url.removeprefix(SQLITE)))) as file, file:
        file.execute(TABLE)
        file.executemany("insert into slots values (?, 0)", [(f"k{number}",) for number in range(load.keys)])
    app = keywise.App(url)

    @app.serial("take", key=str)
    async def take(claim: Claim, key: str, transaction: Transaction) -> int:
        connection: sqlite3.Connection = transaction.connection
        [[taken]] = connection.execute("select taken from slots where key = ?", (key,))
        connection.execute("update slots set taken = ? where key = ?", (taken + 1, key))
        return int(taken) + 1

    async with app:
        yield take


ASKERS: dict[str, Callable[[str, Load], AbstractAsyncContextManager[Ask]]] = {
    "bare": bare,
    "postgres-lock": partial(on_postgres, "postgres-lock"),
    "postgres-queue": partial(on_postgres, "postgres-queue"),
    "sqlite": on_sqlite,
}

if __name__ == "__main__":
    enter(ASKERS)
