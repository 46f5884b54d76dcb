"""An index is built beside the live one on a real OpenSearch while changes come, goes live, and makes way again."""

import asyncio
import itertools

import pytest
from msgspec.structs import replace

from adapters.publishing_stores import forget_deletions
from keywise.core.controls import Move, RunState
from keywise.core.events import Alarmed, SwapRefused
from keywise.reindex.barrier import Barrier, OvertakenError
from keywise.reindex.swap import Swap
from reindex.catalogue import Catalogue, row, run_of
from running import run
from servers import shared

pytestmark = pytest.mark.server("opensearch")

ROWS = {f"k{number}": 1 for number in range(30)}
_numbers = itertools.count(1)


def test_an_index_built_beside_goes_live_and_the_old_one_comes_back_with_all_that_was_written_since(tmp_path):
    server, name = shared.opensearch(), f"swapped_{next(_numbers)}"
    settings = {"number_of_replicas": 0, "refresh_interval": "7s"}
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": settings})
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}", ROWS)

    def aliases() -> dict[str, list[str]]:
        return {index: list(one["aliases"]) for index, one in server.ask("GET", f"/{name}-*/_alias").items()}

    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 1)
            await catalogue.build(f"{name}-{{generation}}")
            await catalogue.change("k1", 2)
            await catalogue.delete("k2", 2)
            await catalogue.until_settled("k2", 2)
            there = await catalogue.swap()
            assert (run_of(there).state, there.target, there.spare) == (RunState.COMPLETE, f"{name}-1", f"{name}-0")
            assert aliases() == {f"{name}-1": [name], f"{name}-0": [f"{name}-epoch-1"]}
            await catalogue.change("k3", 3)
            await catalogue.delete("k4", 3)
            await catalogue.until_settled("k4", 3)
            assert set(server.documents(f"{name}-0")) == ROWS.keys() - {"k2"}, "the old index gets no more changes"
            back = await catalogue.roll_back()
            assert (run_of(back).state, back.target, back.spare) == (RunState.COMPLETE, f"{name}-0", f"{name}-1")
            assert aliases() == {f"{name}-0": [name], f"{name}-1": [f"{name}-epoch-2"]}
            await catalogue.change("k5", 5)
            await catalogue.until_settled("k5", 5)
        return await catalogue.content()

    try:
        content = run(story(), limit_s=100)
    finally:
        built = server.ask("GET", f"/{name}-1/_settings?flat_settings=true")[f"{name}-1"]["settings"]
        server.ask("DELETE", f"/{name}-*")
    assert content == dict(sorted(({**ROWS, "k1": 2, "k3": 3, "k5": 5}).items() - {("k2", 1), ("k4", 1)}))
    assert built["index.refresh_interval"] == "7s"


def test_a_worker_that_learns_late_of_a_swap_hides_nothing_from_a_rollback(tmp_path):
    """It would write to the index that is live now, and note that for the old one, which would not get it any more."""
    server, name = shared.opensearch(), f"swapped_{next(_numbers)}"
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0}})
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}", ROWS)

    async def story():
        async with catalogue.working():
            await catalogue.build(f"{name}-1")
            async with catalogue.acting() as admin:
                before = run_of(await admin.pipeline.control_store.controls())
            await catalogue.swap()
            await catalogue.change("k1", 5)
            await catalogue.until_settled("k1", 5)
            await catalogue.run_late(before)
            controls = await catalogue.roll_back()
        return controls, await catalogue.content()

    try:
        controls, content = run(story(), limit_s=100)
    finally:
        server.ask("DELETE", f"/{name}-*")
    assert (run_of(controls).state, controls.target) == (RunState.COMPLETE, f"{name}-0")
    assert content == dict(sorted({**ROWS, "k1": 5}.items()))


def test_an_index_with_a_missing_or_an_older_document_is_refused_by_name(tmp_path):
    """Somebody has deleted one, and has brought another one back from a copy."""
    server, name = shared.opensearch(), f"swapped_{next(_numbers)}"
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0, "gc_deletes": "0s"}})
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}", ROWS)

    def plant() -> None:
        for key in ("k7", "k8"):
            server.ask("DELETE", f"/{name}-1/_doc/{key}")
        forget_deletions(f"{name}-1")
        server.ask("PUT", f"/{name}-1/_doc/k8?version=1&version_type=external", row("k8", 1))

    async def story():
        async with catalogue.working():
            for key in ROWS:
                await catalogue.change(key, 2)
            await catalogue.build(f"{name}-1")
            await asyncio.to_thread(plant)
            controls = await catalogue.swap()
            async with catalogue.acting() as admin:
                return controls, await admin.verify()

    try:
        controls, gate = run(story(), limit_s=100)
        alias = server.ask("GET", f"/{name}/_alias")
    finally:
        server.ask("DELETE", f"/{name}-*")
    assert (run_of(controls).state, controls.target, alias.keys()) == (RunState.CATCHING_UP, "", {f"{name}-0"})
    [refused] = [one for one in catalogue.events if isinstance(one, SwapRefused)]
    assert "29 in the target, 30 by the ledger" in refused.cause
    keys, sample = gate.failing
    assert (keys.name, sample.name) == ("keys", "sample")
    assert "'k7' (missing)" in sample.value and "'k8' (older)" in sample.value


def test_a_worker_that_was_stopped_before_its_call_does_not_move_the_name_after_a_rollback(tmp_path):
    """The call carries the epoch of the controls in which it was noted, and that epoch is over."""
    server, name = shared.opensearch(), f"swapped_{next(_numbers)}"
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0}})
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}", ROWS)

    async def story():
        async with catalogue.working():
            await catalogue.build(f"{name}-1")
            async with catalogue.acting() as admin:
                before = await admin.pipeline.control_store.controls()
            await catalogue.swap()
            await catalogue.roll_back()
        async with catalogue.acting() as admin:
            live = admin.pipeline
            noted = replace(before, move=Move(f"{name}-0", f"{name}-1", 1, is_called=True))
            async with live.open_target(f"{name}-1", 1) as other:
                with pytest.raises(OvertakenError):
                    await Swap(live, other, Barrier(live, other, 1), None).finish(noted)

    try:
        run(story(), limit_s=100)
        assert list(server.ask("GET", f"/_alias/{name}")) == [f"{name}-0"]
    finally:
        server.ask("DELETE", f"/{name}-*")


def test_a_swap_to_an_index_that_was_deleted_is_called_off(tmp_path):
    """Otherwise changes would wait behind its barrier for ever, and no operator could end that."""
    server, name = shared.opensearch(), f"swapped_{next(_numbers)}"
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0}})
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}", ROWS)

    async def story():
        async with catalogue.working():
            await catalogue.build(f"{name}-1")
        async with catalogue.acting() as admin:
            store = admin.pipeline.control_store
            before = await store.controls()
            # As a worker leaves the controls that is killed behind its barrier.
            assert await store.replace_controls(before, replace(before, move=Move(f"{name}-0", f"{name}-1", 1)))
            server.ask("DELETE", f"/{name}-1")
            async with catalogue.working():
                await catalogue.until(admin.pipeline, lambda controls: controls.move is None)
                await catalogue.change("k1", 2)
                await catalogue.until_settled("k1", 2)

    try:
        run(story(), limit_s=100)
    finally:
        server.ask("DELETE", f"/{name}-*")
    assert any(isinstance(one, Alarmed) and f"{name}-1" in one.cause for one in catalogue.events)
