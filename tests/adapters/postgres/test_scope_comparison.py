"""The server compares two scopes of a ledger as keywise does that reads both."""

import itertools
import os
import random
from contextlib import AsyncExitStack, aclosing

import pytest

import keywise
from keywise.core.change import order_of
from keywise.core.entry import Entry
from keywise.core.transfer import TransferPage
from keywise.reindex.comparison import DIFFERENT_MAX, Comparison, KeyGap
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

_numbers = itertools.count(1)
NOW = 1e9
SUSPECT = Entry(order_of(5), updated_at=NOW, suspicions=1, suspected_at=NOW)
EXPIRED = Entry(None, False, NOW, 1 << 30, "w9", NOW - 1, intent=order_of(3), tried=order_of(3))
UNSURE = Entry(None, False, NOW, unknown=order_of(9), unknown_until=NOW + 50)


def ignore(change):
    pass


def random_entry(rng):
    marks = [Entry((0, version, generation), rng.random() < 0.3, NOW) for version in (1, 2) for generation in (0, 3)]
    return rng.choice([*marks, *marks, SUSPECT, EXPIRED, UNSURE, None])


async def fill(pipeline, entries):
    await pipeline.ledger.transfer.add(TransferPage(entries=list(entries.items())))


async def compared(live, other):
    comparison, gaps = Comparison(live.ledger, other.ledger, NOW), list[KeyGap]()
    async with aclosing(comparison.gaps()) as found:
        async for gap in found:
            gaps.append(gap)
    ended = (sorted(comparison.expired_live), sorted(comparison.expired_other))
    return sorted(gaps, key=lambda gap: gap.key), comparison.rows, ended, bool(comparison.unresolved)


class Scopes:
    """Two scopes in one database, and the second one again over a database of its own."""

    async def __aenter__(self):
        url = shared.postgres().create_database(f"scopes_{os.getpid()}_{next(_numbers)}")
        self._stack = AsyncExitStack()
        here, there = self._app(url), self._app(url)
        for app in (here, there):
            await self._stack.enter_async_context(app)
        self.live = await self._stack.enter_async_context(here.open("pages", work=False))
        self.other = await self._stack.enter_async_context(here.open("pages@1", work=False))
        self.remote = await self._stack.enter_async_context(there.open("pages@1", work=False))
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    def _app(self, url):
        app = keywise.App(url)
        for name in ("pages", "pages@1"):
            app.pipeline(name, key="id", version="version").source(url).apply(ignore)
        return app


def test_the_server_finds_the_gaps_that_reading_both_scopes_finds():
    async def story():
        rng = random.Random(7)
        async with Scopes() as scopes:
            for pipeline in (scopes.live, scopes.other):
                drawn = {f"k{number}": random_entry(rng) for number in range(400)}
                await fill(pipeline, {key: entry for key, entry in drawn.items() if entry is not None})
            differences = await scopes.live.ledger.transfer.compare(scopes.other.ledger.transfer, DIFFERENT_MAX)
            assert await scopes.live.ledger.transfer.compare(scopes.remote.ledger.transfer, DIFFERENT_MAX) is None
            by_server = await compared(scopes.live, scopes.other)
            return len(differences.entries), by_server, await compared(scopes.live, scopes.remote)

    different, by_server, by_reading = run(story())
    assert by_server == by_reading
    gaps, rows, (expired_live, expired_other), is_unresolved = by_server
    assert 0 < len(gaps) <= different < 400
    assert rows and expired_live and expired_other and is_unresolved


def test_the_server_gives_up_where_too_much_differs():
    async def story():
        async with Scopes() as scopes:
            await fill(scopes.live, {f"k{number}": Entry(order_of(1), updated_at=NOW) for number in range(10)})
            compare, other = scopes.live.ledger.transfer.compare, scopes.other.ledger.transfer
            return await compare(other, 10), len((await compare(other, 11)).entries)

    assert run(story()) == (None, 10)
