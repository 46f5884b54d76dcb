"""Kills workers at random moments while changes flow, starts new ones, and lets the last ones finish."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from chaos.fleet import Worker, drained, pause, until
from chaos.judge import Verdict, judge_atomic, judge_plain
from chaos.store import WEIGHT, Store
from keywise.clock import boot_time

WAYS = ("one transaction", "transacted", "leased")
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

PAUSES_S = (0.3, 1.2, 1.5, 2.5)
BACKLOG_MAX = 500
"""A slow machine is not given more than it can do."""


class Plan(msgspec.Struct, frozen=True):
    """How hard a run is."""

    kills_inside: int
    seed: int
    pace_s: float = 0.02
    changes: int = 40
    """Sent at each step of the pace."""
    kill_every_s: float = 0.4
    pauses: float = 0.0
    """The share of moments at which a worker is not killed but sent to sleep, for longer than its lease or not."""
    limit_s: float = 60.0
    """After so long no more is killed, even if too few kills fell inside a batch."""


class Tally(msgspec.Struct):
    """What was done to the workers, and what came of it."""

    way: str
    kills: int = 0
    kills_inside: int = 0
    pauses: int = 0
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


def hunt(folder: Path, way: str, plan: Plan, tell: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """Run one way through a plan, and judge what is left."""
    rng, tally, began = random.Random(plan.seed), Tally(way), boot_time()
    store = Store(folder, seed=plan.seed, weight=WEIGHT)
    workers = [Worker(store, way, name, **OPTIONS) for name in ("a", "b")]
    try:
        for worker in workers:
            worker.start()
        _kill_until_enough(store, workers, plan, rng, tally, tell)
        try:
            _finish(store, workers)
        except (TimeoutError, AssertionError) as error:
            tally.unfinished = str(error)
        tally.sent, tally.seconds = store.sent, boot_time() - began
        tally.repairs = sum(worker.said("repaired") for worker in workers)
        census = store.census()
        tally.suspects_left, tally.dead_letters = census.suspects, census.dead
        tally.verdict = judge_plain(store) if way == "leased" else judge_atomic(store)
    finally:
        for worker in workers:
            worker.close()
        store.close()
    return tally


def _kill_until_enough(
    store: Store, workers: list[Worker], plan: Plan, rng: random.Random, tally: Tally, tell: Callable[[Tally], None]
) -> None:
    began = boot_time()
    due = began + rng.uniform(0, plan.kill_every_s)
    while tally.kills_inside < plan.kills_inside and boot_time() < began + plan.limit_s:
        if store.backlog() < BACKLOG_MAX:
            store.produce(plan.changes)
        pause(rng.uniform(0, 2 * plan.pace_s))
        if boot_time() < due:
            continue
        victim = rng.choice([worker for worker in workers if worker.is_started] or workers)
        if rng.random() < plan.pauses:
            victim.sleep(rng.choice(PAUSES_S))
            tally.pauses += 1
        else:
            tally.kills_inside += victim.kill()
            tally.kills += 1
            victim.start(wait=False)
        tally.sent = store.sent
        tell(tally)
        due = boot_time() + rng.uniform(0, 2 * plan.kill_every_s)


def _finish(store: Store, workers: list[Worker]) -> None:
    """Wait until nothing is queued, held or suspect, and end the workers."""

    def check() -> None:
        for worker in workers:
            worker.check()

    until(lambda: store.depth() == 0, "the queue to be empty", check, limit_s=120)
    until(lambda: store.census().suspects == 0, "all suspects to be repaired", check, limit_s=120)
    for worker in workers:
        until(lambda worker=worker: worker.is_started, "the last workers to start", check)
    drained(*workers)
    assert store.held() == [], "a claim is left"
