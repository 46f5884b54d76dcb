"""From a queue to a table of DynamoDB: the table ends exact, and throttling costs no attempt."""

from pathlib import Path

import msgspec
import pytest

from adapters.dynamodb.benches import created, rows, url_of
from adapters.rabbitmq.test_pipeline import history
from app.shop import QUICK, Shop
from keywise import Retry
from keywise.core import events
from running import run
from servers import shared
from servers.dynamodb_faults import dynamodb_faults

pytestmark = pytest.mark.server("dynamodb")


class Press(Shop):
    """A queue and a ledger in SQLite, and a table."""

    def __init__(self, folder: Path, url: str, **options: object) -> None:
        super().__init__(folder)
        defined = self.app.pipeline("shop", key="key", version="version", deleted={"gone": [True]}, **QUICK, **options)
        defined.source(self.url).sink(url)

    async def handles(self, bodies: list[bytes]) -> None:
        await self.app.send("shop", *map(msgspec.json.decode, bodies))
        await self.work_until_empty(limit_s=100)


def shown(table: str) -> dict[str, int]:
    return {key: row["version"] for key, row in rows(table).items() if "keywise_deleted" not in row}


def test_the_table_ends_exact_and_throttling_costs_no_attempt(tmp_path: Path):
    """One attempt is all that a change has: a throttled one would be a dead letter if it counted."""
    bodies, truth = history(seed=5, keys=100, versions=3)

    async def story() -> None:
        table = created()
        async with dynamodb_faults(shared.dynamodb().url) as proxy:
            proxy.throttle_every = 20
            press = Press(tmp_path, url_of(table, proxy.url), retry=Retry(attempts=1))
            await press.handles(bodies)
            assert proxy.throttled > 0
        assert shown(table) == truth
        assert press.emitted(events.DeadLettered) == press.emitted(events.Failed) == []
        await press.app.close()

    run(story(), limit_s=120)


def test_the_table_ends_exact_when_answers_are_lost(tmp_path: Path):
    bodies, truth = history(seed=6, keys=100, versions=3)

    async def story() -> None:
        table = created()
        async with dynamodb_faults(shared.dynamodb().url) as proxy:
            proxy.throttle_every, proxy.lose_every = 20, 19
            press = Press(tmp_path, url_of(table, proxy.url, generation="reindexVersion"), lease="3s", margin="0.5s")
            await press.handles(bodies)
            assert proxy.lost > 0
        assert shown(table) == truth
        assert press.emitted(events.DeadLettered) == []
        await press.app.close()

    run(story(), limit_s=120)
