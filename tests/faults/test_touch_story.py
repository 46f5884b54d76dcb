"""A reindex of a DynamoDB table under throttling, live edits, poisoned rows and kills."""

from pathlib import Path

import pytest

from adapters.aws_credentials import credentials
from chaos.touch_story import TouchPlan, play
from ingest.object_rig import fresh
from running import run
from servers import shared

__all__ = ["credentials"]

pytestmark = [pytest.mark.server("dynamodb"), pytest.mark.server("postgres")]


def test_every_row_is_touched_but_the_poisoned_ones_and_no_shard_starts_again(tmp_path: Path):
    plan = TouchPlan()
    ledger = shared.postgres().create_database(fresh("touch"))
    tally = run(play(tmp_path, shared.dynamodb(), ledger, plan, lambda report, tally: None), limit_s=2 * plan.limit_s)
    assert tally.faults == []
    assert (tally.kills, tally.dead_letters, tally.untouched) == (plan.kills, plan.poisoned, 0)
    assert tally.throttled >= plan.rows / plan.throttle_every
    assert tally.edits >= plan.rows / plan.edit_every / 2
