"""An object is written, overwritten, deleted and written again while its notifications arrive in any order."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.object_rig import Bucket, ObjectRig, fresh, ndjson, postgres_rig, sqlite_rig
from keywise import Record
from running import run
from servers import shared

Step = tuple[str, int]
"""`store` changes the object, and `deliver` announces that change; with the number of the change."""
CHANGES = (5, 2, None, 3)
"""How many records the object has after each change; None if it is deleted."""


def schedules(changes: int) -> Iterator[tuple[Step, ...]]:
    """Yield all ways in which changes and their notifications can follow each other."""
    stores, deliveries = [("store", n) for n in range(changes)], [("deliver", n) for n in range(changes)]
    for order in itertools.permutations(deliveries):
        for places in itertools.combinations(range(2 * changes), changes):
            left_stores, left_deliveries = iter(stores), iter(order)
            steps = tuple(next(left_stores if n in places else left_deliveries) for n in range(2 * changes))
            if all(steps.index(("store", n)) < steps.index(("deliver", n)) for n in range(changes)):
                yield steps


class Handler:
    """A plain sink: the records by key."""

    def __init__(self, rig: ObjectRig) -> None:
        self.held: dict[str, Any] = {}
        rig.logs.apply(self.write)

    def write(self, records: list[Record[dict[str, Any]]]) -> None:
        for one in records:
            if one.deleted:
                self.held.pop(one.key, None)
            else:
                self.held[one.key] = one.value["n"]


async def play(rig: ObjectRig, changes: tuple[int | None, ...], ways: list[tuple[Step, ...]]) -> None:
    """Take one step of every object, let the pipeline come to rest, and go on with the next step."""
    for number in range(2 * len(changes)):
        bodies: list[bytes] = []
        for way, steps in enumerate(ways):
            name, (act, change) = f"o{way}", steps[number]
            count = changes[change]
            if act == "store" and count is not None:
                rig.place.put(name, ndjson(count, first=100 * change))
            elif act == "store":
                rig.place.delete(name)
            else:
                message = rig.place.delete_message if count is None else rig.place.put_message
                bodies.append(message(name, change + 1))
        await rig.send(*bodies)
        await rig.work_until_empty()


ENDS = {"written again": CHANGES, "deleted": (5, 2, 3, None)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("on", ["table", "handler"])
def test_every_order_of_notifications_ends_the_same(tmp_path: Path, on: str, end: str):
    """A part has two records, so that tails are deleted in parts too."""
    changes, ways = ENDS[end], list(schedules(4))
    assert len(ways) == 7 * 5 * 3
    rig = sqlite_rig(tmp_path, gone="50ms", part_records=2, **({"sink": ""} if on == "handler" else {}))
    handler = Handler(rig) if on == "handler" else None
    run(play(rig, changes, ways), limit_s=120)
    last = range(300, 303) if end == "written again" else range(0)
    if handler is None:
        expected = {f"o{way}": list(last) for way in range(len(ways)) if last}
        assert run(rig.records()) == expected
    else:
        objects = (rig.place.uri(f"o{way}") for way in range(len(ways)))
        assert handler.held == {f"{uri}#{n}": 300 + n for uri in objects for n in range(len(last))}
    assert run(rig.letters()) == []


SHORT_ENDS = {"written again": (4, None, 2), "deleted": (4, 2, None)}


@pytest.mark.server("postgres")
@pytest.mark.server("seaweedfs")
@pytest.mark.parametrize("end", SHORT_ENDS)
def test_every_order_of_notifications_of_a_bucket_ends_the_same_in_postgres(tmp_path: Path, end: str):
    ways = list(schedules(3))
    rig = postgres_rig(tmp_path, Bucket(), gone="50ms", part_records=3)
    run(play(rig, SHORT_ENDS[end], ways), limit_s=120)
    assert run(rig.records()) == ({f"o{way}": [200, 201] for way in range(len(ways))} if end != "deleted" else {})
    assert run(rig.letters()) == []


@pytest.mark.server("opensearch")
@pytest.mark.parametrize("end", SHORT_ENDS)
def test_every_order_of_notifications_ends_the_same_in_an_index(tmp_path: Path, end: str):
    index = fresh("orders")
    ways = list(schedules(3))
    rig = sqlite_rig(tmp_path, gone="50ms", part_records=3, sink=shared.opensearch().index(index))
    run(play(rig, SHORT_ENDS[end], ways), limit_s=120)
    last = range(2) if end == "written again" else range(0)
    documents = shared.opensearch().documents(index)
    objects = [rig.place.uri(f"o{way}") for way in range(len(ways))]
    assert {key: one["n"] for key, one in documents.items()} == {f"{uri}#{n}": 200 + n for uri in objects for n in last}
    assert run(rig.letters()) == []


def test_a_deletion_whose_object_exists_again_is_read_as_it_is(tmp_path: Path):
    """The notification of the new object is lost."""

    async def story() -> None:
        rig = sqlite_rig(tmp_path)
        await rig.put("o", ndjson(3))
        await rig.work_until_empty()
        rig.place.put("o", ndjson(2, first=7))
        await rig.send(rig.place.delete_message("o", 2))
        await rig.work_until_empty()
        assert await rig.records() == {"o": [7, 8]}

    run(story())
