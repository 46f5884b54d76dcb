"""Names of objects, through every store and the notifications of S3: each is decoded once, and read as it is."""

from pathlib import Path

import pytest

from ingest.object_rig import Bucket, Folder, Place, ndjson, sqlite_rig
from keywise.core.change import KEY_MAX_BYTES
from running import awaited

NAMES = ("a b+c=1/é%2F.ndjson", "a%20b.ndjson", "a+b.ndjson", "#1?x=y&z.ndjson", "日本/語.ndjson", "e\u0301/é.ndjson")


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.server("seaweedfs"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Folder(tmp_path / "objects") if request.param == "folder" else Bucket()


@awaited
async def test_an_object_of_any_name_is_read_and_found_again_by_its_uri(place: Place, tmp_path: Path):
    rig = sqlite_rig(tmp_path, place)
    for number, name in enumerate(NAMES):
        await rig.put(name, ndjson(2, first=10 * number))
    await rig.work_until_empty()
    assert await rig.records() == {name: [10 * n, 10 * n + 1] for n, name in enumerate(NAMES)}
    assert await rig.letters() == []
    for name in NAMES:
        assert (entry := await rig.entry(name)) is not None and entry.mark is not None


@awaited
async def test_a_name_of_1024_bytes_is_read_and_a_newer_version_replaces_it(place: Place, tmp_path: Path):
    """S3 takes 1,024 bytes. The key in the ledger has 512 at the most, and two long names stay apart."""
    begin = "/".join(["é" * 100] * 5)
    names = [f"{begin}/{'x' * 18}{last}" for last in "ab"]
    assert {len(name.encode()) for name in names} == {1024}
    rig = sqlite_rig(tmp_path, place)
    for name in names:
        await rig.put(name, ndjson(3), version=1)
    await rig.work_until_empty()
    await rig.put(names[0], ndjson(1, first=7), version=2)
    await rig.work_until_empty()
    assert await rig.records() == {names[0]: [7], names[1]: [0, 1, 2]}
    async with rig.opened() as pipeline:
        keys = await pipeline.control_store.keys("", 10)
    assert len(keys) == 2 and all(len(key.encode()) <= KEY_MAX_BYTES for key in keys)
    assert await rig.letters() == []
