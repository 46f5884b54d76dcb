"""An alias that was moved by hand while a target was built: the swap is refused before any change waits for it."""

import itertools

import pytest

from keywise.core.controls import RunState
from keywise.core.events import Alarmed
from reindex.catalogue import Catalogue, run_of
from running import run
from servers import shared

pytestmark = pytest.mark.server("opensearch")

_numbers = itertools.count(1)


def test_an_alias_that_was_moved_by_hand_is_refused_until_it_is_moved_back(tmp_path):
    server, name = shared.opensearch(), f"moved_{next(_numbers)}"
    server.ask("PUT", f"/{name}-0", {"aliases": {name: {}}, "settings": {"number_of_replicas": 0}})
    catalogue = Catalogue(f"sqlite:///{tmp_path / 'ledger.db'}", f"{server.url}/{name}", {"k1": 1, "k2": 1})

    def move(before: str, after: str) -> None:
        actions = [{"remove": {"index": before, "alias": name}}, {"add": {"index": after, "alias": name}}]
        server.ask("POST", "/_aliases", {"actions": actions})

    async def story():
        async with catalogue.working():
            await catalogue.build(f"{name}-1")
            move(f"{name}-0", f"{name}-1")
            async with catalogue.acting() as admin:
                [line] = [one for one in (await admin.verify()).failing if one.name == "name"]
            refused = await catalogue.swap()
            move(f"{name}-1", f"{name}-0")
            return line, refused, await catalogue.swap()

    try:
        line, refused, controls = run(story(), limit_s=100)
    finally:
        server.ask("DELETE", f"/{name}-*")
    assert line.value == f"the name of the sink stands for {name}-1, and not for {name}-0"
    assert line.advice == f"it was moved by other means; let it stand for {name}-0 again"
    assert (run_of(refused).state, refused.target, refused.move) == (RunState.CATCHING_UP, "", None)
    assert controls.target == f"{name}-1"
    assert not [one for one in catalogue.events if isinstance(one, Alarmed)]
