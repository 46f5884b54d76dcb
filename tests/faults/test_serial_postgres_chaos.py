"""Holders of a merge queue on Postgres are killed, stopped past their lease and cut off; the judge finds no fault."""

from pathlib import Path

import pytest

from chaos.serial_kill import hunt
from chaos.serial_postgres import BACKENDS, on_postgres

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

TIMES = 10
"""Of each; `make chaos` does a hundred."""


@pytest.mark.parametrize("is_atomic", [False, True], ids=["outside", "in the transaction"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_kills_stops_and_lost_sessions_nothing_is_accepted_twice(tmp_path: Path, backend: str, is_atomic: bool):
    """Callers have an answer or an error in time, answers are those stored, and no session or lock is left."""
    with on_postgres(backend) as site:
        tally = hunt(tmp_path, site.url, TIMES, site, is_atomic=is_atomic)
    assert tally.faults == []
    assert (tally.kills, tally.stops) == (TIMES, TIMES)
    assert tally.cuts >= TIMES
    assert tally.told["done"] > 20, "the hunt goes on until so many more have ended well"
