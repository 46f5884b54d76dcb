"""A naive consumer: several workers that each write whatever they get, as soon as they are done with it."""

import heapq
import random
from collections.abc import Iterable, Iterator

from examples.publishing_house.press import SEED, Event, Page, Shelf

WORKERS = 8
SLOW_CALLS = 0.02
SLOWER = 5


def shelf_of(events: Iterable[Event]) -> Shelf:
    """The documents after all events: the last write wins, and a deletion deletes."""
    return {key: Page.of(event) for key, event in last_writes(events).items() if not event.is_gone}


def last_writes(events: Iterable[Event], workers: int = WORKERS) -> dict[str, Event]:
    """The event that was written last for each document."""
    return {event.content_id: event for event in _as_finished(events, workers)}


def _as_finished(events: Iterable[Event], workers: int) -> Iterator[Event]:
    """Workers take the events in the order of delivery, but some calls take longer than others."""
    rng = random.Random(SEED)
    free_at = [0.0] * workers
    running: list[tuple[float, int, Event]] = []
    for number, event in enumerate(events):
        now = heapq.heappop(free_at)
        while running and running[0][0] <= now:
            yield heapq.heappop(running)[2]
        done_at = now + rng.uniform(0.95, 1.05) * (SLOWER if rng.random() < SLOW_CALLS else 1)
        heapq.heappush(free_at, done_at)
        heapq.heappush(running, (done_at, number, event))
    yield from (event for _, _, event in sorted(running))
