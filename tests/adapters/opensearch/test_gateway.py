"""Pipelines into a real OpenSearch behind a gateway, which says nothing of what the engine does."""

import pytest

from adapters.opensearch.index_shop import Press, new_index, played, shown
from keywise.core import events
from keywise.core.change import Outcome, order_of
from servers import shared
from servers.fault_proxy import fault_proxy

pytestmark = pytest.mark.server("opensearch")

PAGE = "<html>the gateway waits for the engine</html>"
SHORT = {"lease": "3s", "margin": "500ms", "attempts_max": 1}


@pytest.mark.parametrize("status", [502, 503, 504])
def test_the_answer_of_a_gateway_does_not_tell_what_the_engine_did(tmp_path, status):
    """The engine has written it, so nobody else may have the key before the lease has run out."""
    name, _ = new_index()

    async def story() -> None:
        async with fault_proxy(shared.opensearch().port) as proxy:
            press = Press(tmp_path, f"opensearch://127.0.0.1:{proxy.port}/{name}", **SHORT)
            proxy.answer(b"_bulk", status, PAGE.encode())
            await press.handles({"id": "page", "v": 5})
            assert {event.outcome for event in press.emitted(events.Settled)} == {Outcome.APPLIED}
            entry = await press.entry("page")
            # On a busy machine one more lease may run out before its call, and is one more suspicion.
            assert entry.mark == order_of(5) and entry.suspicions >= 1
            assert press.causes()[0] == f"status {status}, {PAGE}"
            await press.app.close()

    played(story())
    assert shared.opensearch().ask("GET", f"/{name}/_doc/page")["_seq_no"] == 0, "it was written once"


def test_an_engine_that_is_away_behind_its_gateway_buries_nothing(tmp_path):
    """However often it is tried: no change is to blame."""
    name, _ = new_index()

    async def story() -> None:
        async with fault_proxy(shared.opensearch().port) as proxy:
            press = Press(tmp_path, f"opensearch://127.0.0.1:{proxy.port}/{name}?batch_max=2", **SHORT)
            for status in [502, 503, 504] * 3:
                proxy.answer(b"_bulk", status, PAGE.encode())
            await press.handles(*({"id": f"p{number}", "v": 1} for number in range(6)))
            assert proxy.pending == 0
            assert await press.letters() == [] and press.emitted(events.Failed) == []
            await press.app.close()

    played(story())
    assert len(shown(name)) == 6
