"""Compressed objects: every member is read, damage is an error that says where, and reading resumes at a member."""

import gzip
import itertools
import tracemalloc

import msgspec
import pytest
from backports import zstd

from ingest.chunked_store import ChunkedStore
from ingest.reading import finish, parts_of, plan_of, read, records_of
from keywise.core.errors import ObjectError
from keywise.ingest.compression import OUTPUT_BYTES, MemberDecompressor, compression_of
from keywise.ingest.parts import UPLOAD_AGAIN

PACKS = {"gzip": gzip.compress, "zstd": zstd.compress}
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"


@pytest.mark.parametrize("name", PACKS)
def test_the_first_bytes_say_how_an_object_is_compressed(name: str):
    data = PACKS[name](b"a\nb\n")
    assert compression_of(data) == name
    assert compression_of(SKIPPABLE) == "zstd"
    assert compression_of(b"P*M") == compression_of(b"") == compression_of(b'{"a":1}') == ""
    assert records_of(read(data, plan_of("lines"), sizes=[1])) == [b"a", b"b"]


def test_what_is_said_of_the_compression_comes_before_the_first_bytes():
    data = gzip.compress(b"a\n")
    (part,) = read(data, plan_of("lines", "none"))
    assert [bad.reason for bad in part.bad] == ["not UTF-8"]
    with pytest.raises(ObjectError, match="the gzip data that begins at byte 0 of the object is corrupt"):
        read(b"a\n", plan_of("lines", "gzip"))


@pytest.mark.parametrize("name", PACKS)
def test_every_member_is_read_whatever_lies_between(name: str):
    pack = PACKS[name]
    between = {"gzip": b"\0" * 600, "zstd": SKIPPABLE}[name]
    data = pack(b"a\nb") + pack(b"") + between + pack(b"c\n") + pack(b"d") + between
    for sizes in ([1], [7], [100_000]):
        assert records_of(read(data, plan_of("lines"), sizes)) == [b"a", b"bc", b"d"]


@pytest.mark.parametrize("name", PACKS)
def test_a_truncated_object_is_an_error_that_says_where_at_every_length(name: str):
    assert "keywise dead replay or keywise objects backfill" in UPLOAD_AGAIN, "an upload alone may announce nothing"
    first, second = PACKS[name](b"a\n" * 10), PACKS[name](b"b\n" * 10)
    for length in range(len(first) + 1, len(first) + len(second)):
        where = f"at byte {length}, inside the {name} data that begins at byte {len(first)}"
        with pytest.raises(ObjectError, match=f"^'o': the object ends {where}; it is truncated: {UPLOAD_AGAIN}$"):
            read((first + second)[:length], plan_of("lines"))


@pytest.mark.parametrize("name", PACKS)
def test_what_follows_the_last_member_must_be_a_member(name: str):
    data = PACKS[name](b"a\n")
    with pytest.raises(ObjectError, match=f"begins at byte {len(data)} of the object is corrupt, .*; upload it again"):
        read(data + b"rest of something", plan_of("lines"))


def test_a_wrong_checksum_is_an_error():
    data = bytearray(gzip.compress(b"a\n" * 1000))
    data[-8] ^= 1
    with pytest.raises(ObjectError, match=r"is corrupt, between byte 0 and .* incorrect data check; upload it again"):
        read(bytes(data), plan_of("lines"))


@pytest.mark.parametrize("name", PACKS)
def test_reading_resumes_at_the_last_member_before_the_next_record(name: str):
    lines = [b"%d %s\n" % (number, b"x" * 40_000) for number in range(20)]
    members = [PACKS[name](one) for one in lines]
    data, starts = b"".join(members), [0, *itertools.accumulate(map(len, members))]
    plan = plan_of("lines", part_bytes=100_000)
    parts = read(data, plan)
    assert len(parts) == 7
    for number, part in enumerate(parts[:-1]):
        store = ChunkedStore({"o": data})
        assert finish(parts_of(store, "o", plan, part)) == parts[number + 1 :]
        [(_, start, etag)] = store.gets
        # One boundary is remembered per 64 KiB of content.
        assert start in starts[part.place - 2 : part.place + 1]
        assert etag == '"o-0"'


def test_a_single_gzip_member_is_read_again_from_its_start():
    data, plan = gzip.compress(b"".join(b"%d\n" % number for number in range(1000))), plan_of("lines", part_records=400)
    parts = read(data, plan)
    note = msgspec.json.decode(parts[0].note)
    assert (note.get("start", 0), note["skip"], note["compression"]) == (0, note["offset"], "gzip")
    assert read(data, plan, after=parts[0]) == parts[1:]


@pytest.mark.parametrize("name", PACKS)
def test_a_few_bytes_that_hold_gigabytes_are_decompressed_piece_by_piece(name: str):
    bomb = PACKS[name](b"\0" * (64 * OUTPUT_BYTES))
    assert len(bomb) < 100_000
    sizes = [len(content) for content in MemberDecompressor(name, 0, 0).feed(bomb)]
    assert sum(sizes) == 64 * OUTPUT_BYTES
    assert max(sizes) == OUTPUT_BYTES


def test_many_short_members_are_read_without_copying_what_is_behind_each():
    """Otherwise the cost of a member would grow with the chunk that it is in."""
    data = gzip.compress(b"a\n") * 40_000
    decompressor = MemberDecompressor("gzip", 0, 0)
    tracemalloc.start()
    try:
        assert sum(len(content) for content in decompressor.feed(data)) == 80_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data) // 4


def test_few_boundaries_are_remembered_of_many_members():
    decompressor = MemberDecompressor("gzip", 0, 0)
    content = b"".join(decompressor.feed(gzip.compress(b"abc\n" * 1000) * 200))
    kept = {decompressor.boundary(offset) for offset in range(0, len(content), 4)}
    assert len(content) == 800_000
    assert len(kept) == 13
