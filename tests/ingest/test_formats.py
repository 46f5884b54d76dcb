"""What each format makes of usual and unusual content."""

import msgspec
import pytest

from ingest.chunked_store import ChunkedStore
from ingest.reading import finish, parts_of, plan_of, read, records_of
from keywise.core.errors import ObjectError, SettingsError
from keywise.ingest.formats import CsvFormat, format_of
from keywise.ingest.parts import HEAD_BYTES, HEADER_MAX_BYTES, BadRecord, Part, PartSettings
from keywise.ingest.reader import ReadPlan, open_object


def good_and_bad(content: bytes, given: object, **limits: float) -> tuple[list[bytes], list[tuple[int, int, int, str]]]:
    parts = read(content, plan_of(given, **limits))
    bad = [one for part in parts for one in part.bad]
    return records_of(parts), [(one.ordinal, one.offset, one.length, one.reason) for one in bad]


async def decoded(content: bytes, plan: ReadPlan) -> list[object]:
    reader = await open_object(ChunkedStore({"o": content}), "o", plan)
    assert reader is not None
    return [reader.decode(record) async for part in reader.parts() for record in part.records]


@pytest.mark.parametrize(
    ("content", "records"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\rc\r\n", [b"a", b"b\rc"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [b"a", b"\xef\xbb\xbfb"]),
        (b"a\x00b\n", [b"a\x00b"]),
        ("é\u2028é\n".encode(), ["é\u2028é".encode()]),
    ],
)
def test_every_line_is_a_record(content: bytes, records: list[bytes]):
    assert good_and_bad(content, "lines") == (records, [])


@pytest.mark.parametrize(
    ("content", "records"),
    [
        (b"", []),
        (b"\n\n \n\t\r\n", []),
        (b'{"a":1}\n\n[2]\n  \n"x"', [b'{"a":1}', b"[2]", b'"x"']),
        (b'\xef\xbb\xbf{"a":1}\r\n{"a":2}\r\n', [b'{"a":1}', b'{"a":2}']),
        (' {"é":"é"} \n'.encode(), [' {"é":"é"} '.encode()]),
    ],
)
def test_every_line_of_ndjson_that_is_not_blank_is_a_record(content: bytes, records: list[bytes]):
    assert good_and_bad(content, "ndjson") == (records, [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a":1', "Input data was truncated"),
        (b'{"a":1} {"b":2}', "trailing characters"),
        (b'{"a":\x00}', "invalid character"),
        (b'{"a":"\xff"}', "not UTF-8"),
        (b"[" * 100_000, "recursion"),
        (b'"' + b"x" * 300_000 + b'"', "300002 bytes, above record_max=200000"),
        (b"{}\r[]", "trailing characters"),
    ],
)
def test_a_malformed_line_of_ndjson_is_a_bad_record_and_the_object_goes_on(line: bytes, reason: str):
    parts = read(b"{}\n\n" + line + b"\n[1]\n", plan_of("ndjson", record_max=200_000))
    assert records_of(parts) == [b"{}", b"[1]"]
    ((bad,),) = [part.bad for part in parts]
    assert (bad.ordinal, bad.offset, bad.length, bad.head) == (1, 4, len(line), line[:HEAD_BYTES])
    assert reason in bad.reason
    assert parts[-1].place == 3


def test_rows_of_csv_are_records_by_column():
    content = b'id,text\r\n1,a\r\n\r\n2,"x, ""y""\r\nz"\r\n3,\r\n'
    assert good_and_bad(content, "csv") == ([b"1,a", b'2,"x, ""y""\r\nz"', b"3,"], [])
    rows = [{"id": "1", "text": "a"}, {"id": "2", "text": 'x, "y"\r\nz'}, {"id": "3", "text": ""}]
    assert finish(decoded(content, plan_of("csv"))) == rows
    assert finish(decoded(b"id;text\n1;a,b\n", plan_of(CsvFormat(";")))) == [{"id": "1", "text": "a,b"}]


def test_the_header_of_csv_is_in_the_note_and_names_the_columns_of_later_parts():
    content, plan = b"\xef\xbb\xbfid,text\n1,a\n2,b\n3,c\n", plan_of("csv", part_records=2)
    begun = read(content, plan)[0]
    assert (begun.records, msgspec.json.decode(begun.note)["header"]) == ([b"1,a"], "id,text")

    async def resumed() -> list[object]:
        reader = await open_object(ChunkedStore({"o": content}), "o", plan, place=begun.place, note=begun.note)
        assert reader is not None
        return [reader.decode(record) async for part in reader.parts() for record in part.records]

    assert finish(resumed()) == [{"id": "2", "text": "b"}, {"id": "3", "text": "c"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"1", "1 columns, and the header has 2"),
        (b"1,2,3", "3 columns, and the header has 2"),
        (b'"1",2,3', "3 columns, and the header has 2"),
        (b'1,a"b"', "a quote is inside a field that is not quoted, behind byte 2 of the row"),
        (b'"1"x,2', "something follows a closing quote, at byte 3 of the row"),
        (b"1,\xff", "not UTF-8"),
        (b'1,"' + b"x\n" * 300 + b'"', "604 bytes, above record_max=500"),
    ],
)
def test_a_row_of_csv_that_does_not_fit_is_a_bad_record(row: bytes, reason: str):
    records, bad = good_and_bad(b"a,b\n" + row + b"\n3,4\n", "csv", record_max=500)
    assert (records, bad) == ([b"3,4"], [(0, 4, len(row), reason)])


def test_csv_that_ends_inside_quotes_is_an_error_that_says_where():
    for part_bytes in (1, 20, 1000):
        with pytest.raises(
            ObjectError, match=r"'o': .* inside a quoted field, in the record that begins at byte 8; .* upl"
        ):
            read(b'a,b\n1,2\n3,"4\n' + b"5,6\n" * 50, plan_of("csv", part_bytes=part_bytes, record_max=30))


def test_csv_with_other_columns_is_an_error_that_says_what_to_do():
    plan = plan_of(CsvFormat(columns=["id", "text"]))
    assert records_of(read(b"text,id\na,1\n", plan)) == [b"a,1"]
    with pytest.raises(ObjectError, match=r"\(missing: text; unknown: txt, n\); upload .* or change columns="):
        read(b"id,txt,n\n1,a,2\n", plan)
    with pytest.raises(ObjectError, match="has the columns id twice; rename them"):
        read(b"id,id\n1,2\n", plan_of("csv"))


def test_a_header_of_csv_that_cannot_be_kept_or_read_is_an_error():
    with pytest.raises(
        ObjectError, match=f"header has {HEADER_MAX_BYTES + 1} bytes, and {HEADER_MAX_BYTES} is the most"
    ):
        read(b"x" * (HEADER_MAX_BYTES + 1) + b"\n1\n", plan_of("csv"))
    assert records_of(read(b"x" * HEADER_MAX_BYTES + b"\n1\n", plan_of("csv"))) == [b"1"]
    with pytest.raises(ObjectError, match="header is not UTF-8; convert"):
        read(b"\xe9\n1\n", plan_of("csv"))
    with pytest.raises(ObjectError, match="header cannot be read: a quote is inside"):
        read(b'a"b"\n1\n', plan_of("csv"))
    with pytest.raises(ObjectError, match=r"the note .* shorten the header"):
        read(b"\x01" * 7000 + b"\n1\n", plan_of("csv"))


def test_utf_16_is_an_error_that_says_so():
    for name in ("lines", "ndjson", "csv"):
        for encoding in ("utf-16-le", "utf-16-be"):
            with pytest.raises(ObjectError, match="the object is UTF-16; convert it to UTF-8"):
                read("\ufeffa\nb\n".encode(encoding), plan_of(name))


def test_a_json_array_has_its_items_as_records():
    assert good_and_bad(b' [{"a": 1}, 2,\n"x"] ', "json") == ([b'{"a": 1}', b"2", b'"x"'], [])
    assert good_and_bad(b"\xef\xbb\xbf[1]", "json") == ([b"1"], [])
    assert good_and_bad(b"[]", "json") == good_and_bad(b" ", "json") == good_and_bad(b"", "json") == ([], [])
    for content in (b"{}", b"[1", b"[1,]", b"[1] 2", b"\xff"):
        with pytest.raises(ObjectError, match=r"is no JSON array: .*; correct it, or use another format"):
            read(content, plan_of("json"))


def test_a_function_makes_the_records():
    def words(content: bytes) -> list[object]:
        return [content[:1], content[1:2].decode(), {"n": 1}]

    assert good_and_bad(b"ab", words) == ([b"a", b"b", b'{"n":1}'], [])
    assert good_and_bad(b"ab", words, record_max=1) == ([b"a", b"b"], [(2, 0, 7, "7 bytes, above record_max=1")])


def test_an_object_that_is_too_large_for_its_format_is_an_error():
    with pytest.raises(ObjectError, match=r"more than object_max=10 bytes, .* raise object_max, or use ndjson"):
        read(b"[1,2,3,4,5]", plan_of("json", object_max=10))
    assert len(records_of(read(b"[1,2,3,4]", plan_of("json", object_max=10)))) == 4


def test_reading_stops_past_a_share_of_bad_records():
    content = b"1\n" * 96 + b"x\n" * 4 + b"1\n" * 100
    plan = plan_of("ndjson", part_records=10, bad_records_min=4, bad_share_max=0.03)
    with pytest.raises(
        ObjectError, match=r"4 of the first 100 records are bad, a share of 4.0%, above bad_share_max=3.0%"
    ):
        read(content, plan)
    for limits in ({"bad_records_min": 5, "bad_share_max": 0.03}, {"bad_records_min": 4, "bad_share_max": 0.04}):
        assert read(content, plan_of("ndjson", part_records=10, **limits))[-1].place == 200


def test_the_share_counts_the_bad_records_of_the_parts_before():
    content = b"x\n" * 2 + b"1\n" * 2 + b"x\n" * 2
    begun = read(content, plan_of("ndjson", part_records=2, bad_records_min=5))
    with pytest.raises(ObjectError, match="4 of the first 6 records are bad"):
        read(content, plan_of("ndjson", bad_records_min=3, bad_share_max=0.5), after=begun[1])


@pytest.mark.parametrize("limits", [{"part_bytes": 0}, {"record_max": -1}, {"part_records": 1.5}, {"bad_share_max": 2}])
def test_a_limit_that_cannot_work_is_refused(limits: dict[str, float]):
    with pytest.raises(SettingsError, match=f"^{next(iter(limits))}="):
        PartSettings(**limits)  # type: ignore[arg-type]


def test_a_format_or_a_compression_that_is_not_known_is_refused():
    with pytest.raises(SettingsError, match="format='xml' is not known; write one of ndjson, lines, csv, json"):
        format_of("xml")
    with pytest.raises(SettingsError, match="compression='lzma' is not known; write one of auto, none, gzip, zstd"):
        plan_of("lines", "lzma")
    with pytest.raises(SettingsError, match="delimiter='ab' must be one ASCII character"):
        CsvFormat("ab")


def test_only_the_head_of_a_bad_record_is_kept():
    (part,) = read(b"x" * 200_000 + b"\n1\n", plan_of("ndjson"))
    (bad,) = part.bad
    assert bad == BadRecord(0, 0, 200_000, b"x" * HEAD_BYTES, bad.reason)


def test_the_ordinals_of_good_records_leave_out_bad_ones():
    (part,) = read(b"1\nx\n2\n", plan_of("ndjson"))
    assert (part.count, part.records, list(part.ordinals())) == (3, [b"1", b"2"], [0, 2])


def test_an_object_with_one_short_line_is_one_last_part():
    async def parts() -> list[Part]:
        return await parts_of(ChunkedStore({"o": b"ab"}), "o", plan_of("lines"))

    (part,) = finish(parts())
    assert (part.records, part.is_last) == ([b"ab"], True)
