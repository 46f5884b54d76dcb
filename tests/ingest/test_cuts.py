"""Parts depend on the content and the settings only, and reading resumes behind any part."""

import gzip
import itertools
import tracemalloc

import pytest
from backports import zstd
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.chunked_store import chunked
from ingest.reading import NEVER_STOPS, plan_of, read, records_of
from keywise.core.errors import ObjectError
from keywise.ingest.cutting import CutPlace, RowCutter
from keywise.ingest.formats import CsvFormat, format_of
from keywise.ingest.parts import NOTE_MAX_BYTES, Part, PartSettings
from keywise.ingest.reader import ReadPlan

PIECES = [
    *(b'{"a":1}', b"[1,2]", b"7", b"x", b" ", b"", b"\r", b"\n", b"\n", b"\n\n", b"\r\n", b'"', b'"x\ny"', b'""', b","),
    *(b"a,b", "é".encode(), b"\xff", b"\x00", b"\xef\xbb\xbf", b"z" * 40, b'"' + b"\n" * 45 + b'"'),
]
CONTENT = st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join)
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)
SETTINGS = st.builds(
    PartSettings,
    part_bytes=st.integers(1, 50),
    part_records=st.integers(1, 6),
    record_max=st.integers(1, 60),
    bad_records_min=st.just(NEVER_STOPS),
)
FORMATS = ("lines", "ndjson", "csv", bytes.split)
PACKERS = {"none": None, "gzip": gzip.compress, "zstd": zstd.compress}


def packed(content: bytes, packer: str, sizes: list[int]) -> bytes:
    """Content in members of these sizes."""
    pack = PACKERS[packer]
    return b"".join(map(pack, chunked(content, sizes))) if pack else content


def outcome(content: bytes, plan: ReadPlan, sizes: list[int], after: Part | None = None) -> tuple[list[Part], str]:
    """The parts, or the error of an object that cannot be read."""
    try:
        return read(content, plan, sizes, after), ""
    except ObjectError as error:
        return [], str(error)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packer", PACKERS)
@settings(max_examples=60)
@given(content=CONTENT, members=SIZES, sizes=SIZES, others=SIZES, limits=SETTINGS)
@example(content=b"", members=[1], sizes=[1], others=[2], limits=PartSettings())
def test_the_chunks_make_no_difference(
    name: object, packer: str, content: bytes, members: list[int], sizes: list[int], others: list[int], limits: object
):
    plan = ReadPlan(format_of(name), limits, compression=packer)  # type: ignore[arg-type]
    data = packed(content, packer, members)
    assert outcome(data, plan, sizes) == outcome(data, plan, others)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packer", PACKERS)
@settings(max_examples=60)
@given(content=CONTENT, members=SIZES, sizes=SIZES, others=SIZES, limits=SETTINGS)
def test_reading_resumes_behind_any_part_with_the_same_parts(
    name: object, packer: str, content: bytes, members: list[int], sizes: list[int], others: list[int], limits: object
):
    plan = ReadPlan(format_of(name), limits, compression=packer)  # type: ignore[arg-type]
    data = packed(content, packer, members)
    parts, _ = outcome(data, plan, sizes)
    for number, part in enumerate(parts):
        rest, _ = outcome(data, plan, others, after=part)
        if part.is_last:
            assert [(one.count, one.place, one.is_last) for one in rest] == [(0, part.place, True)]
        else:
            assert rest == parts[number + 1 :]


@given(content=CONTENT, sizes=SIZES, limits=SETTINGS)
def test_every_line_is_one_record_or_one_bad_record(content: bytes, sizes: list[int], limits: PartSettings):
    # The first line would lose its byte order mark.
    content = b"first\n" + content
    parts = read(content, ReadPlan(format_of("lines"), limits, compression="none"), sizes)
    raw = content.split(b"\n")
    if not raw[-1]:
        raw.pop()
    is_bad = [len(line) > limits.record_max or not _is_text(line) for line in raw]
    bad = [one for part in parts for one in part.bad]
    assert records_of(parts) == [line.removesuffix(b"\r") for line, wrong in zip(raw, is_bad, strict=True) if not wrong]
    assert [one.ordinal for one in bad] == [number for number, wrong in enumerate(is_bad) if wrong]
    assert [content[one.offset : one.offset + one.length] for one in bad] == list(itertools.compress(raw, is_bad))
    assert [number for part in parts for number in part.ordinals()] == [
        n for n, wrong in enumerate(is_bad) if not wrong
    ]


@given(content=CONTENT, sizes=SIZES, limits=SETTINGS)
def test_parts_follow_each_other_and_only_the_last_one_is_last(content: bytes, sizes: list[int], limits: PartSettings):
    parts = read(content, ReadPlan(format_of("ndjson"), limits), sizes)
    assert [part.first for part in parts] == [0, *(part.place for part in parts[:-1])]
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(len(part.records) + len(part.bad) == part.count <= limits.part_records for part in parts)
    assert all(len(part.note) <= NOTE_MAX_BYTES for part in parts)


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_part_ends_with_the_record_that_reaches_its_bytes():
    parts = read(b"aaaa\nbbbb\ncc\ndddd\n", plan_of("lines", part_bytes=6))
    assert [part.records for part in parts] == [[b"aaaa", b"bbbb"], [b"cc", b"dddd"]]
    parts = read(b"aaaa\nbbbb\ncc\ndddd\n", plan_of("lines", part_bytes=5))
    assert [part.records for part in parts] == [[b"aaaa"], [b"bbbb"], [b"cc", b"dddd"]]


def test_a_part_has_no_more_rows_than_allowed():
    parts = read(b"a\nb\nc\nd\ne", plan_of("lines", part_records=2))
    assert [part.records for part in parts] == [[b"a", b"b"], [b"c", b"d"], [b"e"]]
    assert [part.is_last for part in parts] == [False, False, True]


def test_reading_resumes_inside_a_block():
    content, plan = b"aaaa\n" * 8, plan_of("lines", part_bytes=15, part_records=2)
    parts = read(content, plan)
    assert [part.count for part in parts] == [2, 1, 2, 1, 2]
    assert read(content, plan, after=parts[0]) == parts[1:]


def test_what_was_begun_is_cut_by_the_settings_of_its_beginning():
    content = b"a\nb\nc\nd\ne\nf\n"
    begun = read(content, plan_of("lines", part_records=2))
    assert read(content, plan_of("lines", part_records=3, part_bytes=1), after=begun[0]) == begun[1:]


def test_an_object_that_was_begun_in_another_format_is_refused():
    begun = read(b"1\n2\n", plan_of("ndjson", part_records=1))
    with pytest.raises(ObjectError, match="was begun as ndjson, and is now to be read as csv; read it from its start"):
        read(b"1\n2\n", plan_of(CsvFormat()), after=begun[0])


def test_a_note_of_something_else_is_refused():
    part = Part(0, [], [], 0, b'{"etag": 1}', False)
    with pytest.raises(ObjectError, match=r"a note that cannot be read .*; read the object from its start"):
        read(b"1\n", plan_of("lines"), after=part)


@pytest.mark.parametrize(
    ("name", "opening", "closing", "length", "last"),
    [("ndjson", b"{}\n", b"\n[1]\n", 0, b"[1]"), ("csv", b'a,b\n1,2\n3,"', b'"\n5,6\n', 4, b"5,6")],
)
def test_a_record_of_any_length_is_not_held_in_memory(
    name: str, opening: bytes, closing: bytes, length: int, last: bytes
):
    chunk = b"x" * 1024 * 1024
    cutter = RowCutter(format_of(name), PartSettings(), CutPlace())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        assert list(cutter.feed(opening)) == []
        for _ in range(200):
            assert list(cutter.feed(chunk)) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(chunk)
    cuts = [*cutter.feed(closing), *cutter.finish()]
    assert [bad.length for cut in cuts for bad in cut.bad] == [200 * len(chunk) + length]
    assert [record for cut in cuts for record in cut.records][-1] == last
