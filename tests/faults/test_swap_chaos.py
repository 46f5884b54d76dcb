"""A name moves there and back while rows are edited and workers are killed and stopped; no update is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from chaos.swap_hunt import SwapPlan, SwapTally, hunt_swaps
from chaos.swap_stores import SqliteTables, SwapStore, opensearch_indexes, postgres_tables
from running import scaled
from servers.opensearch import opensearch_server
from servers.postgres import postgres_server

pytestmark = pytest.mark.timeout(1200)

MOVES = 10
"""Swaps and rollbacks together; `make chaos` moves the name a hundred times."""


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[SwapStore]:
    yield SqliteTables(folder / "swaps.sqlite")


@asynccontextmanager
async def postgres(folder: Path) -> AsyncIterator[SwapStore]:
    with postgres_server() as server:
        async with postgres_tables(server.url) as store:
            yield store


@asynccontextmanager
async def opensearch(folder: Path) -> AsyncIterator[SwapStore]:
    with postgres_server() as server, opensearch_server() as engine:
        async with opensearch_indexes(server.url, engine) as store:
            yield store


STORES = [
    pytest.param(sqlite, id="sqlite"),
    pytest.param(postgres, id="postgres", marks=pytest.mark.server("postgres")),
    pytest.param(opensearch, id="opensearch", marks=[pytest.mark.server("postgres"), pytest.mark.server("opensearch")]),
]


@pytest.mark.parametrize("opened", STORES)
def test_swaps_and_rollbacks_lose_nothing(
    tmp_path: Path, opened: Callable[[Path], AbstractAsyncContextManager[SwapStore]]
):
    plan = SwapPlan(
        moves=MOVES,
        back_and_forth=5,
        keys=200,
        updates_per_s=50,
        every_s=min(25.0, scaled(0.75)),
        late=0.3,
        # A busy machine takes longer over everything, and leases have to outlive that.
        lease_s=min(25.0, scaled(0.5)),
        horizon_s=scaled(0.75),
        pause_max_s=scaled(1.25),
        seed=3,
        limit_s=200,
    )

    async def hunted() -> SwapTally:
        async with opened(tmp_path) as store:
            return await hunt_swaps(tmp_path, plan, store)

    tally = asyncio.run(hunted())
    assert tally.faults == []
    assert (tally.swaps, tally.rollbacks) == (2, 8)
    assert tally.kills + tally.stops > 0 and tally.updates > 0
    assert tally.writes > plan.keys
    if tally.on == "opensearch":
        assert tally.late_calls > 0
