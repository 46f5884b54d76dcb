"""Old targets are dropped, and nothing else is; a drop that failed is not reported as done."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from keywise.core.errors import DatabaseError
from keywise.core.ledger import TransferableLedger
from keywise.reindex.plan import RunPlan
from keywise.reindex.targets import drop_old, require_targets
from reindex.catalogue import Catalogue, run_of
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


def test_a_target_whose_scope_cannot_be_cleared_is_not_reported_as_dropped(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
):
    """The scope is cleared first, because nothing finds it any more when its target is gone."""

    async def broken(transfer: object) -> None:
        raise DatabaseError("the database is broken")

    async def story() -> None:
        async with catalogue.working():
            await catalogue.build("pages_1")
        async with catalogue.acting() as admin:
            await admin.cancel()
            assert isinstance(admin.pipeline.ledger, TransferableLedger)
            with monkeypatch.context() as patched, pytest.raises(DatabaseError, match="is broken"):
                patched.setattr(type(admin.pipeline.ledger.transfer), "clear", broken)
                await admin.drop()
            assert not run_of(await admin.pipeline.control_store.controls()).is_dropped
            assert list(await require_targets(admin.pipeline).targets("pages")) == ["pages_1"]
            assert await admin.drop() == "pages_1"

    run(story(), limit_s=60)
