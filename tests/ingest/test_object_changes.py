"""What happens to an object or its store while it is read: nothing is mixed, and nothing is deleted that exists."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ingest.object_rig import Bucket, Folder, ObjectRig, ndjson, sqlite_rig
from keywise.core import events
from running import awaited, run
from servers import seaweedfs

ROWS = 30


class Interrupting:
    """Lets something happen once, after so many parts of the object `o` were written."""

    def __init__(self, rig: ObjectRig, after: int, act: Any) -> None:
        self._left, self._act = after, act
        rig.app.observers.append(self)

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Advanced) and event.key.endswith("/o"):
            self._left -= 1
            if self._left == 0:
                self._act()


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.server("seaweedfs"))])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectRig:
    place = Folder(tmp_path / "objects") if request.param == "folder" else Bucket()
    return sqlite_rig(tmp_path, place, part_records=2, gone="300ms")


def padded(count: int, first: int = 0) -> bytes:
    """Records so large that an object has several chunks: a whole chunk is read before its parts are written."""
    return ndjson(count, first, x="x" * 200_000)


async def read_in_part(rig: ObjectRig) -> None:
    """Put an object and announce it, and stop the worker after some parts of it."""

    async def is_begun() -> bool:
        return len(rig.emitted(events.Advanced)) >= 3

    await rig.put("o", padded(ROWS))
    await rig.work_until(is_begun)
    entry = await rig.entry("o")
    assert entry is not None and entry.position is not None and 0 < entry.position.place < ROWS


@awaited
async def test_an_object_that_is_replaced_between_two_parts_ends_as_the_new_one(rig: ObjectRig):
    """The new one is shorter, and its own notification is lost: what was announced is read as it is now."""
    await read_in_part(rig)
    rig.place.put("o", padded(8, first=100))
    await rig.work_until_empty()
    assert await rig.records() == {"o": list(range(100, 108))}
    assert len(set(await rig.rows("version"))) == 1
    # Its own notification, if it comes, reads it again.
    await rig.send(rig.place.put_message("o", 2))
    await rig.work_until_empty()
    assert await rig.records() == {"o": list(range(100, 108))}
    assert await rig.letters() == []


@awaited
async def test_an_object_that_is_deleted_between_two_parts_leaves_no_records(rig: ObjectRig):
    await read_in_part(rig)
    rig.place.delete("o")
    await rig.put("other", ndjson(2))
    await rig.work_until_empty()
    assert await rig.records() == {"other": [0, 1]}
    assert await rig.letters() == []


@awaited
async def test_a_file_that_is_replaced_while_it_is_read_ends_as_the_new_one(tmp_path: Path):
    """A bucket sends the old content to its end, and a folder is read in chunks, so only the folder may mix."""
    rig = sqlite_rig(tmp_path, part_records=2)
    Interrupting(rig, 3, lambda: rig.place.put("o", padded(8, first=100)))
    await rig.put("o", padded(ROWS))
    await rig.work_until_empty()
    assert await rig.records() == {"o": list(range(100, 108))}
    assert len(set(await rig.rows("version"))) == 1
    assert await rig.letters() == []


@awaited
async def test_an_announced_object_that_is_missing_is_gone_only_after_a_while(rig: ObjectRig):
    rig.place.put("o", ndjson(3))
    rig.place.put("late", ndjson(3))
    await rig.send(rig.place.put_message("o", 1))
    await rig.work_until_empty()
    rig.place.delete("o")
    rig.place.delete("late")
    await rig.send(rig.place.put_message("o", 2), rig.place.put_message("late", 2))
    appears = asyncio.Event()

    def observe(event: events.Event) -> None:
        if isinstance(event, events.Snoozed) and event.key.endswith("late") and not appears.is_set():
            rig.place.put("late", ndjson(4))
            appears.set()

    rig.app.observers.append(observe)
    await rig.work_until_empty()
    assert appears.is_set()
    assert await rig.records() == {"late": [0, 1, 2, 3]}
    assert rig.emitted(events.Failed) == [] and await rig.letters() == []


@awaited
async def test_nothing_is_deleted_while_a_folder_is_not_mounted(tmp_path: Path):
    place = Folder(tmp_path / "objects")
    rig = sqlite_rig(tmp_path, place, gone="50ms", attempts_max=2)
    await rig.put("o", ndjson(3))
    await rig.work_until_empty()
    away = place.folder.rename(tmp_path / "away")
    place.folder.mkdir()
    await rig.send(place.put_message("o", 2), place.delete_message("o", 3))

    async def has_waited() -> bool:
        return len(rig.emitted(events.Unavailable)) >= 3

    await rig.work_until(has_waited)
    assert await rig.records() == {"o": [0, 1, 2]}
    place.folder.rmdir()
    away.rename(place.folder)
    await rig.work_until_empty()
    assert await rig.records() == {"o": [0, 1, 2]}
    assert rig.emitted(events.Failed) == [] and await rig.letters() == []


@pytest.mark.server("seaweedfs")
def test_a_store_that_is_away_costs_no_attempt_and_reading_goes_on_where_it_was(tmp_path: Path):
    async def story(server: seaweedfs.SeaweedServer) -> None:
        bucket = Bucket(server)
        rig = sqlite_rig(tmp_path, bucket, part_records=2, attempts_max=2)
        await read_in_part(rig)
        server.stop()
        is_back = asyncio.Event()

        async def goes_on() -> bool:
            if len(rig.emitted(events.Unavailable)) >= 2 and not is_back.is_set():
                await asyncio.to_thread(server.start)
                is_back.set()
            return is_back.is_set() and (entry := await rig.entry("o")) is not None and entry.mark is not None

        await rig.work_until(goes_on)
        assert await rig.records() == {"o": list(range(ROWS))}
        assert rig.emitted(events.Failed) == [] and await rig.letters() == []

    with seaweedfs.seaweedfs_server() as server:
        run(story(server), limit_s=90)


@pytest.mark.server("seaweedfs")
@awaited
async def test_nothing_is_deleted_while_a_bucket_is_missing(tmp_path: Path):
    """The bucket of the URL was never created: each object looks missing."""
    bucket = Bucket()
    rig = sqlite_rig(tmp_path, bucket, gone="50ms", attempts_max=2)
    await rig.send(bucket.put_message("o", 1), bucket.delete_message("p", 1))

    async def has_waited() -> bool:
        return len(rig.emitted(events.Unavailable)) >= 3

    await rig.work_until(has_waited)
    entry = await rig.entry("p")
    assert entry is None or entry.mark is None
    assert any("check the name of the bucket" in event.cause for event in rig.emitted(events.Unavailable))
    bucket.put("o", ndjson(1))
    await rig.work_until_empty()
    assert await rig.records() == {"o": [0]}
    assert await rig.letters() == []


@pytest.mark.server("seaweedfs")
@awaited
async def test_an_object_that_may_not_be_read_is_not_gone_and_says_what_to_grant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bucket = Bucket()
    rig = sqlite_rig(tmp_path, bucket, gone="50ms", attempts_max=2)
    await rig.put("o", ndjson(2))
    await rig.work_until_empty()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.READER_SECRET_KEY)
    bucket.put("readable", ndjson(1))
    bucket.delete("o")
    # The reader may not list the bucket, so nothing proves that this object is gone.
    await rig.send(bucket.delete_message("o", 2), *(bucket.put_message("readable", n) for n in (1,)))

    async def is_other_written() -> bool:
        causes = [event.cause for event in (*rig.emitted(events.Unavailable), *rig.emitted(events.Failed))]
        return "readable" in await rig.records() and any("s3:ListBucket" in cause for cause in causes)

    await rig.work_until(is_other_written)
    assert await rig.records() == {"o": [0, 1], "readable": [0]}
