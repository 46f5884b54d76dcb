"""Objects whose content is compressed, cut off, too large or partly bad: what is written, what the dead letters say.

Each test also has a good object, which nothing may hold up.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from ingest.object_rig import ObjectRig, ndjson, postgres_rig, sqlite_rig
from keywise.core import events
from running import awaited

PARTS = [ndjson(50, first=50 * number) for number in range(4)]


async def ingest(rig: ObjectRig, **objects: bytes) -> None:
    for name, content in objects.items():
        await rig.put(name, content)
    await rig.put("good", ndjson(3) if rig.logs.objects.plan.format.name == "ndjson" else b"n\n0\n1\n2\n")
    await rig.work_until_empty()


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
@awaited
async def test_every_member_of_a_compressed_object_is_read(tmp_path: Path, pack: Callable[[bytes], bytes]):
    rig = sqlite_rig(tmp_path, part_records=30)
    await ingest(rig, packed=b"".join(map(pack, PARTS)))
    assert await rig.records() == {"packed": list(range(200)), "good": [0, 1, 2]}
    assert await rig.letters() == []


@awaited
async def test_a_truncated_object_is_a_dead_letter_that_names_the_offset(tmp_path: Path):
    rig = sqlite_rig(tmp_path, part_records=30)
    whole = b"".join(map(gzip.compress, PARTS))
    cut = len(whole) - 20
    await ingest(rig, packed=whole[:cut])
    [letter] = await rig.letters()
    assert letter.key == rig.place.uri("packed")
    assert str(cut) in letter.cause and "packed" in letter.cause
    assert (await rig.records())["good"] == [0, 1, 2]
    # A replay of the repaired object at a newer version writes it whole.
    await rig.put("packed", whole, version=2)
    await rig.work_until_empty()
    assert (await rig.records())["packed"] == list(range(200))


@awaited
async def test_a_bad_record_is_a_dead_letter_and_the_object_goes_on(tmp_path: Path):
    rig = sqlite_rig(tmp_path, part_records=5)
    lines = ndjson(20).splitlines(keepends=True)
    lines[3], lines[11] = b"{no json\n", b"\xff\xfe\n"
    await ingest(rig, mixed=b"".join(lines))
    assert (await rig.records())["mixed"] == [n for n in range(20) if n not in (3, 11)]
    by_key = {letter.key.rpartition("#")[2]: letter for letter in await rig.letters()}
    assert set(by_key) == {"3", "11"}
    offset = sum(map(len, lines[:3]))
    headers = by_key["3"].headers or {}
    assert headers["keywise-object"] == rig.place.uri("mixed") and headers["ordinal"] == "3"
    assert (headers["offset"], headers["length"]) == (str(offset), str(len(lines[3]) - 1))
    assert by_key["3"].body == b"{no json"
    entry = await rig.entry("mixed")
    assert entry is not None and entry.mark is not None
    assert json.loads(entry.note)["bad"] == 2


@awaited
async def test_an_object_with_too_many_bad_records_stops_as_one_dead_letter(tmp_path: Path):
    rig = sqlite_rig(tmp_path, part_records=5)
    lines = [b'{"n": 0}\n' if n % 2 else b"{no json\n" for n in range(1000)]
    await ingest(rig, junk=b"".join(lines))
    [of_object] = [letter for letter in await rig.letters() if "#" not in letter.key]
    assert of_object.key == rig.place.uri("junk")
    assert "bad_share_max" in of_object.cause
    assert len(await rig.letters()) < 30
    assert (await rig.records())["good"] == [0, 1, 2]


@awaited
async def test_a_record_above_the_limit_is_a_dead_letter_with_its_beginning(tmp_path: Path):
    """The limit is lower than usual, so that the record need not have 100 MB."""
    rig = sqlite_rig(tmp_path, record_max=100_000)
    await ingest(rig, large=ndjson(2) + b'{"n": "' + b"x" * 5_000_000 + b'"}\n' + ndjson(1, first=9))
    assert (await rig.records())["large"] == [0, 1, 9]
    [letter] = await rig.letters()
    assert letter.key == f"{rig.place.uri('large')}#2"
    assert "record_max" in letter.cause and len(letter.body) == 64 * 1024
    assert (letter.headers or {})["length"] == str(5_000_000 + len('{"n": ""}'))


@awaited
async def test_text_in_another_encoding_is_a_dead_letter_that_says_so(tmp_path: Path):
    rig = sqlite_rig(tmp_path)
    await ingest(rig, wide=ndjson(5).decode().encode("utf-16"))
    causes = {letter.key: letter.cause for letter in await rig.letters()}
    assert causes and all(key.startswith(rig.place.uri("wide")) for key in causes)
    assert any("UTF-16" in cause or "UTF-8" in cause for cause in causes.values()), causes
    assert (await rig.records())["good"] == [0, 1, 2]


@pytest.mark.parametrize("make", [sqlite_rig, pytest.param(postgres_rig, marks=pytest.mark.server("postgres"))])
@awaited
async def test_csv_without_a_column_that_the_table_stores_is_a_dead_letter_and_no_row_of_nulls(
    make: Callable[..., ObjectRig], tmp_path: Path
):
    rig = make(tmp_path, format="csv", columns="level,text")
    for name, content in {
        "all": b"text,level,host\na,info,web-1\n",
        "none": b"name,price\nchair,5\n",
        "one": b"level\ninfo\n",
        "semicolons": b"level;text\ninfo;a\n",
        "long": b"a" + b"b" * 1000 + b"\n1\n",
    }.items():
        await rig.put(name, content)
    await rig.work_until_empty()
    causes = {letter.key.rpartition("/")[2]: letter.cause for letter in await rig.letters()}
    assert set(causes) == {"none", "one", "semicolons", "long"}
    assert "the CSV header 'name,price' lacks level, text, which the table stores; upload" in causes["none"]
    assert "the CSV header 'level' lacks text, which" in causes["one"]
    assert "the CSV header 'level;text' lacks level, text, which" in causes["semicolons"]
    assert f"the CSV header 'a{'b' * 98}…' lacks" in causes["long"]


@awaited
async def test_a_row_with_other_columns_is_a_dead_letter_that_names_both_counts(tmp_path: Path):
    rig = sqlite_rig(tmp_path, format="csv")
    await ingest(rig, table=b"n,m\n1,2\n3\n4,5,6\n7,8\n")
    rows = [json.loads(body) for uri, body in await rig.rows("object, body") if uri.endswith("table")]
    assert rows == [{"n": "1", "m": "2"}, {"n": "7", "m": "8"}]
    causes = [letter.cause for letter in await rig.letters()]
    assert len(causes) == 2 and all("2" in cause and ("1" in cause or "3" in cause) for cause in causes), causes
    assert rig.emitted(events.Failed) == []
