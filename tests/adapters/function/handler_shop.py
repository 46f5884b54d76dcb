"""Shops whose target is a handler of the test's own, and what their ledger remembers afterwards."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from app.shop import QUICK, Shop
from keywise.core.dead_letter import DeadLetter

SHORT = {"lease": "500ms", "margin": "100ms"}
"""Leases that run out while a test waits; with a source of the same visibility."""


def shop_with(
    handler: Callable, folder: Path, *, refetch: Callable | None = None, queue: str = "shop", **options: object
) -> Shop:
    """A shop with a log table, whose changes go to the handler; two shops may share a folder."""
    shop = Shop(folder)
    shop.execute("create table if not exists log (key text, version integer)")
    route = {} if "read" in options else {"key": "key", "version": "version", "deleted": {"gone": [True]}}
    pipeline = shop.app.pipeline("shop", **(route | QUICK | options))
    pipeline.source(f"{shop.url}?queue={queue}&visibility={options.get('lease', '60s')}")
    pipeline.apply(handler)
    if refetch is not None:
        pipeline.refetch(refetch)
    return shop


def bodies(count: int, version: int = 1) -> list[dict]:
    return [{"key": f"k{number}", "version": version} for number in range(count)]


def keys(count: int) -> set[str]:
    return {f"k{number}" for number in range(count)}


async def handle_all(shop: Shop, *sent: object, limit_s: float = 20.0) -> list[DeadLetter]:
    """Send, work until all of it is acked, and return the dead letters."""
    await shop.app.send("shop", *sent)
    try:
        await shop.work_until_empty(limit_s=limit_s)
        return await shop.letters()
    finally:
        await shop.app.close()


async def handle_until(shop: Shop, done: Callable[[], Awaitable[bool]], *sent: object) -> None:
    """Send, and work until a condition holds."""
    await shop.app.send("shop", *sent)
    try:
        await shop.work_until(done)
    finally:
        await shop.app.close()


def logged(shop: Shop) -> list[tuple[str, int]]:
    """What handlers have written into the log, sorted."""
    return sorted(shop.rows("select key, version from log"))


def marked(shop: Shop) -> list[tuple[str, int]]:
    """What the ledger holds for applied, sorted."""
    return sorted(shop.rows("select key, version from keywise_marks"))


def seen_by_others(file: Path, table: str) -> int:
    """How many rows of a table somebody else sees now."""
    with closing(sqlite3.connect(file)) as connection:
        [count] = connection.execute(f"select count(*) from {table}").fetchone()
    return count


async def passed(seconds: float) -> None:
    """Let a handler take its time without holding up the loop."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)
