"""Workers of a reindex are killed while rows are edited; no write is older than one before it, and nothing is lost."""

import asyncio
from pathlib import Path

import pytest

from chaos.reindex_hunt import KILLED, ReindexHuntPlan, ReindexTally, hunt_reindex
from keywise.reindex.worker import SHARDS_AT_ONCE
from running import scaled
from servers.opensearch import OpenSearchServer, opensearch_server
from servers.postgres import postgres_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(900)]

ROWS, KILLS = 20_000, 10
"""`make chaos` has a million rows, and kills a worker each second."""
LEASE_MAX_S = 25.0


def _hunted(folder: Path, opensearch: OpenSearchServer | None, rows: int, seed: int) -> ReindexTally:
    plan = ReindexHuntPlan(
        rows=rows,
        shard_rows=1000,
        kills=KILLS,
        every_s=0.2,
        updates_per_s=200,
        # A busy machine needs longer for a page, and a claim has to outlive it.
        lease_s=min(LEASE_MAX_S, scaled(1.0)),
        seed=seed,
        limit_s=200,
    )
    with postgres_server() as postgres:
        return asyncio.run(hunt_reindex(folder, plan, postgres.url, opensearch))


def _check(tally: ReindexTally) -> None:
    assert tally.faults == []
    # On a fast machine, the run may end before the last ones.
    assert KILLS / 2 <= tally.kills <= KILLS
    assert 0 < tally.rows_again <= tally.kills * SHARDS_AT_ONCE * tally.page_rows
    assert tally.updates > 0 and tally.writes > tally.rows
    assert 0 < tally.p99_s[KILLED] < float("inf"), "every live update was written, or a newer one"
    assert tally.dead_letters == 0


def test_after_kills_a_reindex_of_a_table_ends_right_and_few_rows_are_read_again(tmp_path: Path):
    _check(_hunted(tmp_path, None, ROWS, 7))


@pytest.mark.server("opensearch")
def test_after_kills_a_reindex_of_an_index_ends_right_and_few_rows_are_read_again(tmp_path: Path):
    with opensearch_server() as opensearch:
        _check(_hunted(tmp_path, opensearch, ROWS, 8))
