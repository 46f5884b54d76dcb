"""Old targets are dropped, and nothing else is."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from keywise.reindex.plan import RunPlan
from keywise.reindex.targets import drop_old, require_targets
from reindex.catalogue import Catalogue
from running import run

ROWS = {f"k{number}": 1 for number in range(5)}


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    url = f"sqlite:///{tmp_path / 'pages.db'}"
    return Catalogue(url, f"{url}?table=pages", ROWS)


def test_the_target_of_a_run_that_begins_meanwhile_is_not_dropped_as_an_old_one(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
):
    async def story() -> tuple[list[str], Sequence[str]]:
        async with catalogue.acting() as admin, catalogue.acting() as other:
            sink = require_targets(admin.pipeline)
            targets = sink.targets

            async def begun_meanwhile(pipeline: str) -> Sequence[str]:
                await other.start(RunPlan(into="pages_1", is_checked=False))
                return await targets(pipeline)

            monkeypatch.setattr(sink, "targets", begun_meanwhile)
            return await drop_old(admin.pipeline, 0), await targets("pages")

    dropped, left = run(story())
    assert (dropped, list(left)) == ([], ["pages_1"])
