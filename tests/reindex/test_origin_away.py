"""The origin goes away while a target catches up or is swapped: changes go on, and a worker still stops."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from keywise.core.controls import RunState
from keywise.core.errors import UnavailableError
from keywise.core.events import Unavailable
from keywise.reindex.shards import ShardLedger
from reindex.catalogue import Catalogue, run_of
from reindex.reindex_rig import Catalogue as Origin
from reindex.reindex_rig import Works, row
from running import run

ROWS = {f"k{number}": 1 for number in range(10)}


async def fails(keys: Sequence[str]) -> None:
    raise UnavailableError("the origin is away")


async def hangs(keys: Sequence[str]) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def catalogue(tmp_path):
    """Its origin may lag for long, so the gate lets a swap begin with a key that lags."""
    url = f"sqlite:///{tmp_path / 'pages.db'}"
    return Catalogue(url, f"{url}?table=pages", ROWS, horizon="30s", drain="1s")


@pytest.mark.parametrize(("meets", "cause"), [(fails, "the origin is away"), (hangs, "longer than changes may wait")])
def test_a_swap_is_called_off_if_the_origin_goes_away_behind_its_barrier(
    catalogue: Catalogue, meets: Callable[[Sequence[str]], Awaitable[None]], cause: str
):
    causes = []

    async def story():
        async with catalogue.working(), catalogue.acting() as admin:
            pipeline = admin.pipeline

            async def away_behind_the_barrier(keys: Sequence[str]) -> None:
                if (await pipeline.control_store.controls()).move is not None:
                    await meets(keys)

            await catalogue.build("pages_{generation}")
            # The row follows later, so each pass asks for it.
            await catalogue.app.send("pages", {"id": "k1", "v": 2})
            await catalogue.until_settled("k1", 2)
            catalogue.origin.before_fetch = away_behind_the_barrier
            await admin.swap(pause_max_s=0.5)
            await catalogue.until(pipeline, lambda controls: controls.move is not None)
            await catalogue.until(pipeline, lambda controls: controls.move is None)
            causes.extend(await catalogue.causes(admin))
            await admin.cancel()
            await catalogue.change("k3", 2)
            await catalogue.until_settled("k3", 2)

    run(story())
    assert any(cause in one for one in causes), causes


@pytest.mark.parametrize("meets", [fails, hangs])
def test_a_worker_stops_while_it_waits_for_the_origin(catalogue: Catalogue, meets):
    async def story():
        is_waiting = asyncio.Event()

        async def away(keys: Sequence[str]) -> None:
            is_waiting.set()
            await meets(keys)

        async with catalogue.working():
            await catalogue.build("pages_{generation}")
            catalogue.origin.before_fetch = away
            await catalogue.change("k1", 2)
            await is_waiting.wait()
        # The worker has stopped; another one finds the origin again.
        catalogue.origin.before_fetch = nothing
        async with catalogue.working():
            return run_of(await catalogue.swap())

    async def nothing(keys: Sequence[str]) -> None:
        pass

    assert run(story()).state is RunState.COMPLETE


def test_an_error_of_the_ledger_is_not_reported_as_one_of_the_origin(tmp_path, monkeypatch):
    origin = Origin(*(row(f"k{number}", 1) for number in range(10)))
    works, advance, failures = Works(tmp_path, origin), ShardLedger.advance, iter([True])

    async def away_once(*arguments):
        if next(failures, False):
            raise UnavailableError("the ledger is away")
        return await advance(*arguments)

    monkeypatch.setattr(ShardLedger, "advance", away_once)
    report = run(works.runs())
    assert report.run.state is RunState.COMPLETE
    parts = {one.what for one in works.events if isinstance(one, Unavailable)}
    assert parts == {"ledger"}
