"""A table of DynamoDB is reindexed while it throttles scans."""

from pathlib import Path

import pytest

from adapters.aws_credentials import credentials
from adapters.dynamodb.benches import created, url_of
from keywise.core import events
from keywise.core.controls import RunState
from keywise.reindex.worker import PAGE_ROWS
from reindex.reindex_rig import Works
from running import run
from servers import shared
from servers.dynamodb_faults import Asked, dynamodb_faults

__all__ = ["credentials"]

pytestmark = pytest.mark.server("dynamodb")

SEGMENTS = 4
ROWS = 5 * SEGMENTS * PAGE_ROWS // 2
"""So many that a segment has two or three pages, which are large enough to be halved."""
THROTTLED = 6
WRITES_AT_ONCE = 25


def filled(rows: int) -> str:
    """A table of its own with so many rows."""
    table = created("key")
    items = [{"key": {"S": f"k{number:05d}"}, "version": {"N": "1"}} for number in range(rows)]
    for start in range(0, rows, WRITES_AT_ONCE):
        puts = [{"PutRequest": {"Item": item}} for item in items[start : start + WRITES_AT_ONCE]]
        shared.dynamodb().ask("BatchWriteItem", RequestItems={table: puts})
    return table


def limits(scans: list[Asked]) -> list[int]:
    return [scan["Limit"] for scan in scans]


def test_throttled_scans_cost_no_attempt_restart_no_shard_and_make_pages_smaller(tmp_path: Path):
    table = filled(ROWS)

    async def story() -> None:
        async with dynamodb_faults(shared.dynamodb().url) as proxy:
            url = url_of(table, proxy.url, key="key", segments=str(SEGMENTS), region="us-east-1")
            works = Works(tmp_path, url)
            await works.start()
            proxy.asked.clear()
            left = THROTTLED

            def judge(action: str, asked: Asked) -> tuple[int, str] | None:
                nonlocal left
                # The first page of a segment comes through: a segment that began again would be seen.
                if action != "Scan" or "ExclusiveStartKey" not in asked or not left:
                    return None
                left -= 1
                return 400, "ProvisionedThroughputExceededException"

            proxy.judge = judge
            report = await works.work_until_ended(limit_s=60)
            assert (report.run.state, report.shards_read) == (RunState.COMPLETE, SEGMENTS)
            assert report.counts == {"read": ROWS, "applied": ROWS}
            assert report.reconciles and len(works.content()) == ROWS
            assert left == 0, "every one of them was throttled"
            assert works.emitted(events.Failed) == works.emitted(events.DeadLettered) == []
            assert all(entry.attempts == 0 for entry in (await works.shard_entries()).values())
            scans = proxy.of("Scan")
            firsts = [scan["Segment"] for scan in scans if "ExclusiveStartKey" not in scan]
            assert sorted(firsts) == list(range(SEGMENTS)), "no shard was read from its beginning again"
            asked = limits(scans)
            assert asked[0] == max(asked) == PAGE_ROWS
            assert min(asked) <= PAGE_ROWS // 2 ** (THROTTLED // 2), "each refusal halves the page"
            assert asked[-1] > min(asked), "and each page without one adds some rows"
            waits = [one for one in works.emitted(events.Unavailable) if one.what == "origin"]
            assert waits and "Throughput" in waits[0].cause

    run(story(), limit_s=100)
