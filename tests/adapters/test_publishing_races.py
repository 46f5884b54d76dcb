"""The races of two publishers, played on real stores: three of events that overtake each other, two of many workers.

The first three are from a record about an index with versions, which left the third of them open; the last two are
from a record about a store that allows one update a second of a document, and has neither versions nor transactions.
"""

import asyncio
import random
from pathlib import Path

import keywise
from adapters.publishing_stores import Store, on_every_store
from app.shop import QUICK, Shop
from keywise import Rate
from keywise.app import PipelineDefinition
from keywise.core.clock import boot_time
from running import run

Event = dict[str, object]


def published(version: int, key: str = "page") -> Event:
    return {"id": key, "v": version, "state": "published", "title": f"title {version}"}


def unpublished(version: int, key: str = "page") -> Event:
    return {"id": key, "v": version, "state": "gone"}


class House(Shop):
    """A publisher: a queue, a ledger, and one worker that writes to the store."""

    def __init__(self, folder: Path, store: Store, **options: object) -> None:
        super().__init__(folder)
        self.definition: PipelineDefinition = self.app.pipeline(
            "shop", key="id", version="v", deleted={"state": ["gone"]}, **QUICK, **options
        )
        self.definition.source(self.url).sink(store.url)

    async def handles(self, *events: Event) -> None:
        """Send these and bring them to an end."""
        await self.app.send("shop", *events)
        await self.work_until_empty()


def played(make_store, folder: Path, *batches: list[Event], forget: bool = False) -> dict[str, Event]:
    """What the store shows after these events, batch by batch; it may forget deletions in between."""
    with make_store() as store:

        async def story() -> None:
            house = House(folder, store)
            for batch in batches:
                await house.handles(*batch)
                if forget:
                    await asyncio.to_thread(store.forget_deletions)
            assert await house.letters() == []
            await house.app.close()

        run(story(), limit_s=60)
        return store.content()


# Events of one document that overtake each other.


@on_every_store
def test_a_page_published_twice_shows_the_second_though_its_event_came_first(make_store, tmp_path):
    assert played(make_store, tmp_path, [published(2)], [published(1)]) == {"page": published(2)}


@on_every_store
def test_a_page_unpublished_and_published_again_is_shown_though_the_publishing_came_first(make_store, tmp_path):
    batches = [published(1)], [published(3)], [unpublished(2)]
    assert played(make_store, tmp_path, *batches, forget=True) == {"page": published(3)}


@on_every_store
def test_a_page_published_and_unpublished_stays_away_though_the_unpublishing_came_first(make_store, tmp_path):
    assert played(make_store, tmp_path, [unpublished(2)], [published(1)], forget=True) == {}


@on_every_store
def test_events_that_overtake_each_other_in_one_batch_end_the_same(make_store, tmp_path):
    events = [
        *(published(2, "twice"), published(1, "twice")),
        *(published(3, "again"), unpublished(2, "again")),
        *(unpublished(2, "away"), published(1, "away")),
    ]
    wanted = {"twice": published(2, "twice"), "again": published(3, "again")}
    assert played(make_store, tmp_path, events) == wanted


# Many workers.


def worked_on_by(houses: list[House], events: list[Event], *, one_by_one: bool = False) -> float:
    """Workers that share a queue and a ledger bring these events to an end; returns how long it took."""

    async def work(house: House, sending: asyncio.Task[None]) -> None:
        async with house.opened() as pipeline:
            [(_, source)] = pipeline.sources

            async def is_over() -> bool:
                return sending.done() and await source.depth() == 0

            await house.work_until(is_over)

    async def send() -> None:
        for some in [[event] for event in events] if one_by_one else [events]:
            await houses[0].app.send("shop", *some)

    async def story() -> float:
        began_at = boot_time()
        sending = asyncio.create_task(send())
        await asyncio.gather(sending, *(work(house, sending) for house in houses))
        took_s = boot_time() - began_at
        assert await houses[0].letters() == []
        for house in houses:
            await house.app.close()
        return took_s

    return run(story(), limit_s=60)


@on_every_store
def test_a_burst_of_events_is_written_no_more_often_than_the_store_allows(make_store, tmp_path):
    """The events of a burst come to two workers one by one; one write is allowed at once, then one in each second."""
    with make_store() as store:
        houses = [House(tmp_path, store, rate=Rate(1, per="1s")) for _ in range(2)]
        took_s = worked_on_by(houses, [published(version) for version in range(1, 301)], one_by_one=True)
        assert store.content() == {"page": published(300)}
        assert store.writes() <= 1 + took_s
        assert all(house.emitted(keywise.core.events.Failed) == [] for house in houses)


@on_every_store
def test_many_workers_leave_the_newest_of_each_page(make_store, tmp_path):
    events = [published(version, f"p{page}") for page in range(20) for version in range(1, 21)]
    events += [unpublished(21, f"p{page}") for page in range(5)]
    random.Random(7).shuffle(events)
    with make_store() as store:
        worked_on_by([House(tmp_path, store) for _ in range(4)], events)
        assert store.content() == {f"p{page}": published(20, f"p{page}") for page in range(5, 20)}
