"""Kills and stops workers and restarts their server at random moments while changes flow, then lets all finish."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chaos.final_checks import Verdict, judge_atomic, judge_plain
from chaos.fleet import Worker, drained, pause, until
from chaos.store import Shelf, Store
from keywise.core.clock import boot_time

WAYS = ("queue_transaction", "transacted", "leased")
OPTIONS = {
    "lease": "1s",
    "margin": "200ms",
    "visibility": "2s",
    "poll": "50ms",
    "backoff": "10ms",
    "backoff_max": "100ms",
    "batch_max": 200,
    "concurrency": 4,
    # Longer than the longest sleep and the bound of a write together: until then a late write may land.
    "horizon": "4s",
    "repair": "100ms",
    # A healthy change may be hit alone again and again, since here it is never the change that kills.
    "crashes_max": 50,
    # Writes of all processes queue up for one file; a try that comes too late says nothing about its change.
    "attempts_max": 50,
}

STOPS_S = (1.2, 1.5, 2.5)
"""Past the lease, each of them."""
INSIDE_S = 0.15
"""How long after a batch was opened it may happen, at the most; some batches are over by then."""
BACKLOG_MAX = 500
"""A slow machine is not given more than it can do."""


class Plan(msgspec.Struct, frozen=True):
    """How hard a run is."""

    kills_inside: int = 0
    """`kill -9` while a batch is open; those that fall between batches come on top."""
    stops: int = 0
    """SIGSTOP until long after the lease, then SIGCONT."""
    restarts: int = 0
    """Of the server, at once and without a word."""
    cuts: int = 0
    """Of all connections to it."""
    seed: int = 0
    pace_s: float = 0.02
    changes: int = 40
    """Sent at each step of the pace."""
    every_s: float = 0.4
    limit_s: float = 60.0
    """After so long nothing more is done to the workers, even if it was not enough."""


class Tally(msgspec.Struct):
    """What was done to the workers, and what came of it."""

    way: str
    on: str = ""
    kills: int = 0
    kills_inside: int = 0
    stops: int = 0
    restarts: int = 0
    cuts: int = 0
    sent: int = 0
    repairs: int = 0
    suspects_left: int = 0
    dead_letters: int = 0
    seconds: float = 0.0
    unfinished: str = ""
    """What could not be waited for; empty if everything came to an end."""
    verdict: Verdict = msgspec.field(default_factory=Verdict)

    @property
    def faults(self) -> list[str]:
        left = [f"{self.suspects_left} suspect keys were not repaired"] if self.suspects_left else []
        dead = [f"{self.dead_letters} healthy changes became dead letters"] if self.dead_letters else []
        unfinished = [self.unfinished] if self.unfinished else []
        return [*self.verdict.faults, *left, *dead, *unfinished]

    def lacking(self, plan: Plan) -> list[str]:
        """What has to be done more often."""
        done = {"kills_inside": self.kills_inside, "stops": self.stops, "restarts": self.restarts, "cuts": self.cuts}
        return [what for what, times in done.items() if times < getattr(plan, what)]


Tell = Callable[[Tally], None]


def hunt(
    folder: Path,
    way: str,
    plan: Plan,
    shelf: Shelf | None = None,
    tell: Tell = lambda tally: None,
    environments: Sequence[dict[str, str]] = ({}, {}),
) -> Tally:
    """Run one way through a plan, with a worker in each environment, and judge what is left."""
    began = boot_time()
    store = Store(folder, shelf, seed=plan.seed, is_heavy=True)
    tally = Tally(way, store.shelf.on)
    workers = [
        Worker(store, way, f"worker{number}", environment=one, **OPTIONS) for number, one in enumerate(environments)
    ]
    try:
        for worker in workers:
            worker.start()
        _torment(store, workers, plan, tally, tell)
        try:
            _finish(store, workers)
        except (TimeoutError, AssertionError) as error:
            tally.unfinished = str(error)
        tally.sent, tally.seconds = store.sent, boot_time() - began
        tally.repairs = sum(worker.said("repaired") for worker in workers)
        counts = store.counts()
        tally.suspects_left, tally.dead_letters = counts.suspects, counts.dead
        tally.verdict = (judge_plain if way == "leased" else judge_atomic)(store.evidence())
    finally:
        for worker in workers:
            worker.close()
        store.close()
    return tally


def _torment(store: Store, workers: list[Worker], plan: Plan, tally: Tally, tell: Tell) -> None:
    rng, began = random.Random(plan.seed), boot_time()
    due = began + rng.uniform(0, plan.every_s)
    while (lacking := tally.lacking(plan)) and boot_time() < began + plan.limit_s:
        if store.backlog() < BACKLOG_MAX:
            store.produce(plan.changes)
        pause(rng.uniform(0, 2 * plan.pace_s))
        for worker in workers:
            worker.start_again_if_it_could_not()
        inside = [worker for worker in workers if worker.is_awake and worker.is_inside]
        if boot_time() < due or not inside:
            continue
        pause(rng.uniform(0, INSIDE_S))
        _act(rng.choice(lacking), rng.choice(inside), store, rng, tally)
        tally.sent = store.sent
        tell(tally)
        due = boot_time() + rng.uniform(0, 2 * plan.every_s)


def _act(what: str, victim: Worker, store: Store, rng: random.Random, tally: Tally) -> None:
    match what:
        case "kills_inside":
            tally.kills_inside += victim.kill()
            tally.kills += 1
            victim.start(wait=False)
        case "stops":
            victim.sleep(rng.choice(STOPS_S))
            tally.stops += 1
        case "restarts":
            store.shelf.restart()
            tally.restarts += 1
        case "cuts":
            store.shelf.cut()
            tally.cuts += 1


def _finish(store: Store, workers: list[Worker]) -> None:
    """Wait until nothing is queued, held or suspect, and end the workers."""

    def check() -> None:
        for worker in workers:
            worker.start_again_if_it_could_not()
            worker.check()

    until(lambda: store.depth() == 0, "the queue to be empty", check, limit_s=120)
    until(lambda: store.counts().suspects == 0, "all suspects to be repaired", check, limit_s=120)
    for worker in workers:
        until(lambda worker=worker: worker.is_started, "the last workers to start", check)
    drained(*workers)
    assert store.held() == [], "a claim is left"
