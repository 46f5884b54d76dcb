"""Workers of an object pipeline are killed at random moments; every record of every object is written all the same."""

from pathlib import Path

import pytest

from chaos.object_hunt import ObjectPlan, ObjectSizes, hunt_objects
from servers.opensearch import opensearch_server
from servers.postgres import postgres_server

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(600)]

KILLS = 10
"""`make chaos` kills a hundred times, and has a gigabyte of objects."""


def test_after_kills_every_record_is_in_the_table_and_was_written_once(tmp_path: Path):
    sizes = ObjectSizes(small=300, medium=20, medium_records=2000, large=2, large_records=30_000, record_bytes=200)
    plan = ObjectPlan(kills=KILLS, sizes=sizes, part_records=500, every_s=1.5, seed=5, limit_s=200)
    with postgres_server() as postgres:
        tally = hunt_objects(tmp_path, plan, postgres)
    assert tally.faults == []
    assert (tally.repeated, tally.dead_letters) == (0, 0)
    assert tally.kills == KILLS and tally.takeovers > 0


@pytest.mark.server("opensearch")
def test_after_kills_every_record_is_in_the_index_and_few_were_written_again(tmp_path: Path):
    sizes = ObjectSizes(small=100, medium=10, medium_records=1000, large=1, large_records=10_000, record_bytes=200)
    plan = ObjectPlan(kills=5, sizes=sizes, part_records=200, every_s=1.5, seed=6, limit_s=200)
    with postgres_server() as postgres, opensearch_server() as opensearch:
        tally = hunt_objects(tmp_path, plan, postgres, opensearch)
    assert tally.faults == []
    assert tally.kills == 5 and tally.takeovers > 0
