"""Real workers under real signals: they drain, leave at once, or sleep past their lease, and the store ends right."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.final_checks import judge_atomic, judge_plain
from chaos.fleet import Worker, drained, pause, until
from chaos.store import Store
from keywise.app import SAME_WISH_S

QUICK = {"poll": "50ms", "backoff": "10ms", "backoff_max": "50ms"}
SHORT = QUICK | {"lease": "1s", "margin": "200ms", "visibility": "1s"}

StartWorker = Callable[..., Worker]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, is_heavy=True)
    yield store
    store.close()


@pytest.fixture
def start(store: Store) -> Iterator[StartWorker]:
    """Starts workers, and ends what is left of them after the test."""
    workers: list[Worker] = []

    def start_worker(way: str, *, gate: str = "", **options: object) -> Worker:
        workers.append(Worker(store, way, f"worker{len(workers)}", gate=gate, **options))
        return workers[-1].start()

    yield start_worker
    for worker in workers:
        worker.close()


def changes(count: int, version: int = 1, **more: object) -> list[dict]:
    return [{"key": f"k{number}", "version": version, **more} for number in range(count)]


def marks(store: Store) -> int:
    [[count]] = store.rows("select count(*) from keywise_marks")
    return count


SENT = 300


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("queue_transaction", signal.SIGTERM),
        ("queue_transaction", signal.SIGINT),
        ("transacted", signal.SIGTERM),
        ("leased", signal.SIGTERM),
    ],
)
def test_the_first_signal_drains_and_the_rest_is_free_for_others(store, start, way, number):
    """What had begun is applied; nothing is held, hidden or lost, and a second worker does what is left, once."""
    store.send(*changes(SENT, do="wait", seconds=0.005))
    # Leases as usual: on a busy machine a short one could end before its handler, and would be held as unknown.
    first = start(way, batch_max=20, **QUICK)
    until(lambda: marks(store) > 0, "the first changes", first.check)
    first.signal(number)
    assert first.end() == 0
    assert first.said("stopped") == 1
    done = marks(store)
    assert 0 < done < SENT, "it was in the midst of it"
    assert (store.held(), len(store.content())) == ([], done)
    second = start(way, **QUICK)
    until(lambda: store.depth() == 0, "the rest", second.check, limit_s=10)
    drained(second)
    assert (judge_plain if way == "leased" else judge_atomic)(store.evidence()).faults == []
    [(writes,)] = store.rows("select count(*) from log where op = 'write'")
    assert writes == SENT or (way == "leased" and writes > SENT), "a plain handler may be called again"


def test_everything_that_a_drained_worker_gives_back_is_visible_at_once(store, start):
    store.send(*changes(SENT, do="wait", seconds=0.02))
    worker = start("leased", **QUICK)
    until(lambda: marks(store) > 0, "the first changes", worker.check)
    drained(worker)
    assert 0 < store.depth() == store.visible() == SENT - marks(store)


def test_a_second_signal_leaves_at_once_and_the_leases_stay(store, start):
    """Whoever takes over must find that the write of this worker may still be on its way."""
    store.send(*changes(3, do="wait", seconds=300), {"key": "other", "version": 1})
    worker = start("leased", **QUICK)
    until(lambda: worker.said("handles k") == 3 and store.depth() == 3, "the handlers to begin", worker.check)
    worker.signal(signal.SIGTERM)
    until(lambda: worker.said("draining") == 1, "the drain", worker.check)
    threading.Timer(SAME_WISH_S, worker.signal, [signal.SIGTERM]).start()
    assert worker.end() == 128 + signal.SIGTERM
    assert worker.said("stopped") == 0
    assert (store.held(), store.counts().claims) == (["k0", "k1", "k2"], 3)
    assert (store.depth(), store.visible()) == (3, 0)
    assert store.content() == {"other": 1}


ASLEEP = 6
LATE = {"horizon": "3s", "repair": "100ms", "concurrency": 8}
"""Repairs wait until the sleeper has woken up and written."""


def test_a_plain_handler_that_slept_past_its_lease_is_suspected_and_put_right(store, start):
    """It wakes up and writes what is old by then; the takeover had made each of its keys suspect before."""
    store.send(*changes(ASLEEP, do="gate"))
    sleeper = start("leased", gate="handler", **SHORT, **LATE)
    until(lambda: sleeper.said("gated") == ASLEEP, "the handlers to begin", sleeper.check)
    with store.shelf.locked():
        sleeper.signal(signal.SIGSTOP)
    other = start("leased", **SHORT, **LATE)
    until(lambda: len(store.content()) == ASLEEP, "the takeovers", other.check)
    assert other.said("taken over") == ASLEEP
    assert store.counts().suspects == ASLEEP
    store.send(*changes(2, version=2), {"key": "k2", "version": 2, "gone": True})
    until(lambda: store.content() == {"k0": 2, "k1": 2, "k3": 1, "k4": 1, "k5": 1}, "newer changes", other.check)
    sleeper.open_gate(100)  # For repairs, too.
    sleeper.signal(signal.SIGCONT)
    old = "select count(*) from log where op = 'write' and version = 1"
    until(lambda: store.rows(old) == [(2 * ASLEEP,)], "the late writes", sleeper.check)
    assert set(store.content().values()) == {1}, "a plain sink cannot refuse them"
    until(lambda: store.counts().suspects == 0, "the repairs", other.check)
    assert store.content() == store.truth() == {"k0": 2, "k1": 2, "k3": 1, "k4": 1, "k5": 1}
    drained(sleeper, other)
    verdict = judge_plain(store.evidence())
    assert (verdict.faults, verdict.takeovers >= ASLEEP) == ([], True)


def test_a_plain_write_that_came_too_late_is_not_committed(store, start):
    """The handler slept, wrote, and does not know it; the other worker, who has the key now, has not written yet."""
    store.send(*changes(1, do="gate"))
    sleeper = start("blocking", gate="handler", **SHORT, **LATE)
    until(lambda: sleeper.said("gated k0") == 1, "the handler to begin", sleeper.check)
    with store.shelf.locked():
        sleeper.signal(signal.SIGSTOP)
    other = start("leased", gate="batch", **SHORT, **LATE)
    until(lambda: other.said("gated batch") == 1, "the takeover", other.check)
    sleeper.open_gate(100)
    sleeper.signal(signal.SIGCONT)
    until(lambda: store.content() == {"k0": 1} and not sleeper.is_inside, "the late write", sleeper.check)
    assert (marks(store), store.held(), store.counts().suspects) == (0, ["k0"], 1)
    other.open_gate(100)
    until(lambda: store.depth() == 0 and store.counts().suspects == 0, "the repair", other.check)
    drained(sleeper, other)
    assert (judge_plain(store.evidence()).faults, store.content()) == ([], {"k0": 1})


def test_a_transacted_handler_that_slept_past_its_lease_has_no_effect(store, start):
    """It sleeps between its claim and its transaction; whether its handlers run or not, nothing of them stays."""
    options = SHORT | {"lease": "2s", "visibility": "2s"}
    store.send(*changes(ASLEEP))
    sleeper = start("transacted", gate="batch", **options)
    until(lambda: sleeper.said("gated batch") == 1, "the claims", sleeper.check)
    with store.shelf.locked():
        # While somebody else writes, it waits for its transaction to begin.
        sleeper.open_gate()
        pause(0.2)
        sleeper.signal(signal.SIGSTOP)
    other = start("transacted", **options)
    until(lambda: len(store.content()) == ASLEEP, "the takeovers", other.check)
    store.send(*changes(2, version=2))
    until(lambda: store.content()["k0"] == store.content()["k1"] == 2, "newer changes", other.check)
    sleeper.signal(signal.SIGCONT)
    drained(sleeper)
    until(lambda: store.depth() == 0, "the rest", other.check)
    drained(other)
    assert judge_atomic(store.evidence()).faults == []
    assert store.rows("select count(*) from log where op = 'write'") == [(ASLEEP + 2,)]


def test_a_claim_that_was_taken_over_cannot_be_committed_though_nothing_newer_is(store, start):
    """The other worker has one of the keys and takes its time; the sleeper may only commit the rest."""
    options = SHORT | {"lease": "2s", "visibility": "2s"}
    store.send(*changes(ASLEEP))
    sleeper = start("transacted", gate="batch", **options)
    until(lambda: sleeper.said("gated batch") == 1, "the claims", sleeper.check)
    with store.shelf.locked():
        sleeper.open_gate()
        pause(0.2)
        sleeper.signal(signal.SIGSTOP)
    other = start("transacted", gate="batch", **options)
    until(lambda: other.said("gated batch") == 1, "the takeover", other.check)
    sleeper.signal(signal.SIGCONT)
    until(lambda: len(store.content()) == ASLEEP - 1, "the others", sleeper.check)
    assert (store.rows("select key from takeovers"), store.content().get("k0")) == ([("k0",)], None)
    other.open_gate()
    until(lambda: store.depth() == 0, "the one that was taken over", other.check)
    drained(sleeper, other)
    assert other.said("handles") == 1
    assert judge_atomic(store.evidence()).faults == []


def test_a_transacted_handler_that_slept_inside_its_transaction_has_its_effect_once(store, start):
    """Nobody can take over meanwhile: the transaction is the stronger lock."""
    store.send(*changes(ASLEEP, do="gate"))
    sleeper = start("transacted", gate="handler", **SHORT)
    until(lambda: sleeper.said("gated") == 1, "a handler to begin", sleeper.check)
    sleeper.signal(signal.SIGSTOP)
    pause(1.5)
    assert store.content() == {}
    sleeper.open_gate(ASLEEP)
    sleeper.signal(signal.SIGCONT)
    other = start("transacted", **SHORT)
    until(lambda: store.depth() == 0, "all changes", sleeper.check)
    drained(sleeper, other)
    assert judge_atomic(store.evidence()).faults == []
    assert store.rows("select count(*) from log where op = 'write'") == [(ASLEEP,)]


def test_a_handler_that_blocks_the_event_loop_for_three_leases_keeps_its_claim(store, start):
    """The heartbeat beats in a thread of its own; another worker gets the message, and is told to wait."""
    store.send({"key": "slow", "version": 1, "do": "wait", "seconds": 3.2})
    first = start("blocking", **SHORT)
    until(lambda: first.said("handles slow") == 1, "the handler to begin", first.check)
    second = start("blocking", **SHORT)
    until(lambda: store.depth() == 0, "the handler to end", first.check)
    drained(first, second)
    assert (first.said("handles"), second.said("handles")) == (1, 0)
    assert store.rows("select key, version, op from log") == [("slow", 1, "write"), ("slow", 1, "mark")]
    assert (store.counts().suspects, store.rows("select * from takeovers")) == (0, [])
