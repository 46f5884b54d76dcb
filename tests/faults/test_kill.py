"""Workers are killed with `kill -9` at random moments, and by their own changes; the store ends right all the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import Worker, drained, until
from chaos.hunt import Plan, hunt
from chaos.store import Store
from chaos.witness import EXIT_OF_POISON
from keywise.core.entry import Level

KILLS = {"queue_transaction": 10, "transacted": 5, "leased": 5}
"""That have to fall inside an open batch."""


@pytest.mark.parametrize("way", KILLS)
def test_after_kills_inside_batches_nothing_is_lost_and_nothing_goes_backwards(tmp_path, way):
    """Nothing is applied twice on the atomic grade; on the plain one, every takeover is suspected and repaired."""
    tally = hunt(tmp_path, way, Plan(KILLS[way], seed=2, every_s=0.2))
    assert tally.faults == []
    assert tally.kills_inside >= KILLS[way], f"only {tally.kills_inside} of {tally.kills} kills fell inside a batch"
    assert tally.verdict.writes > 100
    assert (tally.verdict.takeovers > 0, tally.repairs > 0) == (way != "queue_transaction", way == "leased")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


POISON = {"key": "poison", "version": 2, "do": "exit"}
DEATHS_MAX = 2
MORTAL = {
    "lease": "500ms",
    "margin": "100ms",
    "visibility": "500ms",
    "poll": "50ms",
    "backoff": "10ms",
    "crashes_max": DEATHS_MAX,
}


def deaths_until_empty(store: Store, worker: Worker) -> int:
    """Start the worker again whenever a change has killed it, until nothing is left to do."""
    deaths = 0

    def is_over() -> bool:
        nonlocal deaths
        if worker.process.poll() is not None:
            assert worker.end() == EXIT_OF_POISON, worker.notes[-1000:]
            deaths += 1
            worker.start(wait=False)
        return store.depth() == 0

    worker.start()
    until(is_over, "the queue to be empty")
    until(lambda: worker.is_started, "the last worker to start", worker.check)
    drained(worker)
    return deaths


@pytest.mark.parametrize("way", ["transacted", "leased"])
def test_a_change_that_kills_its_worker_ends_as_a_dead_letter(store, way):
    """Only deaths alone with it are blamed on it; its neighbours and the version before it are applied."""
    neighbours = {f"k{number}": 1 for number in range(30)}
    bodies = [{"key": key, "version": version} for key, version in neighbours.items()]
    store.send(
        {"key": "poison", "version": 1},
        *bodies[:15],
        POISON,
        *bodies[15:],
        {"key": "bane", "version": 1} | {"do": "exit"},
    )
    worker = Worker(store, way, "worker", **MORTAL)
    try:
        deaths = deaths_until_empty(store, worker)
    finally:
        worker.close()
    cause = f"{DEATHS_MAX} workers died alone with this change"
    assert store.letters() == {"poison": cause, "bane": cause}
    assert store.content() == neighbours | {"poison": 1}
    assert 2 * DEATHS_MAX < deaths <= 2 * (Level.ALONE + DEATHS_MAX), "a death beside others is nobody's fault"
    assert store.held() == []
    if way == "transacted":
        assert store.rows("select key, count(*) from log where op = 'write' group by key having count(*) > 1") == []
