"""Tables for the records of objects, on each database that has them: what they hold after writes and deletions."""

from itertools import chain

import pytest

from adapters.record_tables import RECORD_SINKS, URI, gone, postgres_records, record, sqlite_records
from keywise.core.errors import PermanentError
from keywise.core.record import RecordTable
from keywise.core.sink import Grade, ReadableSink
from keywise.testing.conformance.sinks import ATOMIC_PROMISES
from running import awaited, run

MAKERS = [
    pytest.param(sqlite_records, id="sqlite"),
    pytest.param(postgres_records, id="postgres", marks=pytest.mark.server("postgres")),
]
DATABASES = pytest.mark.parametrize("make", MAKERS)
SEPARATOR = "\x1f"
"""What goes between the texts of a batch on Postgres, unless one of them contains it."""
URIS = [
    "s3://b/it's.ndjson",
    's3://b/say "hi".ndjson',
    "s3://b/\\ %2F ?#$1 {a,b} NULL",
    "gs://b/é/日本語/🦉.csv",
    f"file:///a{SEPARATOR}b",
    "s3://b/line\nbreak\ttab",
    "'; drop table logs; --",
    "s3://b/" + "k" * 1017,
    "S3://B/CASE",
    "s3://b/case",
    "s3://b/case ",
]
BODIES = [
    "",
    "{}",
    "two\nlines\r\n",
    SEPARATOR,
    f"a{SEPARATOR}b{SEPARATOR}",
    "NULL",
    '{a,"b\\"\',}',
    "é日本語🦉",
    "x" * 100_000,
]


@DATABASES
@awaited
async def test_a_table_that_is_missing_is_created(make):
    async with make() as bench:
        assert (bench.table.grade, bench.table.batch_max, bench.table.runs_user_code) == (Grade.ATOMIC, 10_000, False)
        assert isinstance(bench.table, RecordTable) and not isinstance(bench.table, ReadableSink)
        await bench.write(record(0, b'{"n": 1}', version=2**62), record(1, b"plain text", version=2**62))
        assert await bench.rows() == [(URI, 0, 2**62, '{"n": 1}'), (URI, 1, 2**62, "plain text")]


@DATABASES
@awaited
async def test_an_empty_batch_writes_nothing(make):
    async with make() as bench:
        await bench.write()
        assert await bench.rows() == []


@DATABASES
@pytest.mark.parametrize("at_once", [1, len(URIS)], ids=["one by one", "together"])
@awaited
async def test_any_uri_and_any_body_are_held_as_they_were_sent(make, at_once):
    objects = [[record(ordinal, body.encode(), uri=uri) for ordinal, body in enumerate(BODIES)] for uri in URIS]
    async with make() as bench:
        for start in range(0, len(URIS), at_once):
            await bench.write(*chain.from_iterable(objects[start : start + at_once]))
        expected = sorted((uri, ordinal, 1, body) for uri in URIS for ordinal, body in enumerate(BODIES))
        assert await bench.rows() == expected
        for uri in URIS:
            assert await bench.delete(1, 100, uri) == len(BODIES) - 1
        await bench.write(*(gone(0, uri=uri) for uri in URIS[::2]))
        assert await bench.places() == sorted((uri, 0) for uri in URIS[1::2])


@DATABASES
@awaited
async def test_a_single_empty_body_is_held(make):
    async with make() as bench:
        await bench.write(record(0, b""))
        assert await bench.rows() == [(URI, 0, 1, "")]


@DATABASES
@awaited
async def test_each_record_has_its_own_version(make):
    async with make() as bench:
        await bench.write(record(0, b"a", version=1), record(1, b"b", version=2))
        assert await bench.rows() == [(URI, 0, 1, "a"), (URI, 1, 2, "b")]


@DATABASES
@awaited
async def test_many_objects_are_written_at_once_and_in_any_order(make):
    records = [record(n % 7, str(n).encode(), uri=f"s3://b/{n // 7:03}") for n in range(1400)]
    async with make() as bench:
        await bench.write(*reversed(records))
        assert await bench.rows() == [(one.object, one.ordinal, 1, one.body.decode()) for one in records]


@DATABASES
@awaited
async def test_a_newer_and_shorter_object_replaces_the_older_one(make):
    async with make() as bench:
        others = [record(n, uri=uri) for uri in (URI[:-1], f"{URI}.gz") for n in range(12)]
        await bench.write(*(record(n, b"old") for n in range(12)), *others)
        await bench.write(*(record(n, b"new", version=2) for n in range(3)))
        assert await bench.delete(3, 100) == 9
        assert await bench.delete(3, 100) == 0
        rows = await bench.rows()
        assert [row for row in rows if row[0] == URI] == [(URI, n, 2, "new") for n in range(3)]
        assert len(rows) == 3 + len(others)


@DATABASES
@awaited
async def test_a_newer_and_longer_object_replaces_the_older_one(make):
    """Its first part meets rows of the older version, one part meets the end of them, the last one is new."""
    async with make() as bench:
        await bench.write(*(record(n, b"old") for n in range(5)))
        for first in (0, 3, 6):
            await bench.write(*(record(n, b"new", version=2) for n in range(first, first + 3)))
        assert await bench.rows() == [(URI, n, 2, "new") for n in range(9)]


@DATABASES
@awaited
async def test_a_batch_of_new_and_known_records_is_written(make):
    """Also if a record that is known lies between new ones, or belongs to another object of the batch."""
    async with make() as bench:
        await bench.write(record(1, b"old"), record(4, b"old", uri="s3://b/other"))
        batch = [record(n, b"new", uri=uri, version=2) for uri in (URI, "s3://b/new", "s3://b/other") for n in range(3)]
        await bench.write(*batch)
        assert await bench.rows() == sorted(
            [(one.object, one.ordinal, 2, "new") for one in batch] + [("s3://b/other", 4, 1, "old")]
        )


@DATABASES
@awaited
async def test_a_tail_is_deleted_in_parts_the_lowest_ordinals_first(make):
    """By number: as text, 10 would be below 9. Ordinals of bad records are missing."""
    ordinals = [n for n in range(25) if n % 4]
    async with make() as bench:
        await bench.write(*map(record, ordinals))
        assert await bench.delete(6, 5) == 5
        assert await bench.places() == [(URI, n) for n in ordinals if n < 6 or n > 11]
        assert [await bench.delete(6, 5) for _ in range(3)] == [5, 4, 0]
        assert await bench.places() == [(URI, n) for n in (1, 2, 3, 5)]
        assert await bench.delete(0, 0) == 0
        assert await bench.delete(0, 5, "s3://b/unknown") == 0


@DATABASES
@awaited
async def test_deleted_records_are_removed_beside_records_that_are_written(make):
    async with make() as bench:
        await bench.write(*map(record, range(4)))
        await bench.write(gone(2), record(4), gone(0), gone(99), gone(1, uri="s3://b/unknown"))
        assert await bench.places() == [(URI, n) for n in (1, 3, 4)]


@DATABASES
@awaited
async def test_what_is_not_committed_is_not_held(make):
    async with make() as bench:
        await bench.write(*map(record, range(3)))
        with pytest.raises(_RolledBackError):
            async with bench.ledger.transaction() as transaction:
                await bench.table.delete_tails(transaction, [(URI, 0)], 100)
                await bench.table.write(transaction, [record(7)])
                raise _RolledBackError
        assert await bench.places() == [(URI, n) for n in range(3)]


@DATABASES
@awaited
async def test_fields_are_held_in_columns_of_their_own(make):
    """A field that a record lacks is null, and one without a column is left out."""
    async with make(
        ["name", "price"], "object text, ordinal bigint, version bigint, name text, price integer"
    ) as bench:
        body = b'{"name": "it\'s \\u00e9", "price": 3, "ordinal": 77, "more": 1}'
        await bench.write(record(0, body), record(1, b'{"name": "b"}'))
        await bench.write(record(1, b'{"price": 4}', version=2))
        rows = [tuple(row) for row in await bench.select("object, ordinal, version, name, price")]
        assert rows == [(URI, 0, 1, "it's é", 3), (URI, 1, 2, None, 4)]
        await bench.write(gone(0), record(1, b"{}", version=3))
        assert [tuple(row) for row in await bench.select("ordinal, name, price")] == [(1, None, None)]


@DATABASES
@awaited
async def test_a_table_is_created_with_columns_of_its_own(make):
    async with make(["name", "tags"]) as bench:
        await bench.write(record(0, b'{"name": "a", "tags": [1, {"b": null}]}'))
        [(name, tags)] = await bench.select("name, tags")
        assert (name.strip('"'), tags.replace(" ", "")) == ("a", '[1,{"b":null}]')


@DATABASES
@pytest.mark.parametrize("body", [b"[1]", b"7", b"broken", b"", b"\xff"])
@awaited
async def test_a_record_that_is_no_json_object_has_no_columns(make, body):
    async with make(["name"]) as bench:
        with pytest.raises(PermanentError, match=r"table logs.* refuses it"):
            await bench.write(record(0, body))


@DATABASES
@pytest.mark.parametrize("bad", [record(1, b"{}", uri="bad"), record(1, b"\xff"), record(1, b"longer than ten")])
@awaited
async def test_a_record_that_does_not_fit_is_refused(make, bad):
    declared = (
        "object text check (object <> 'bad'), ordinal bigint, version bigint, "
        "body text not null check (length(body) <= 10)"
    )
    async with make(declared=declared) as bench:
        with pytest.raises(PermanentError, match=r"table logs.* refuses it"):
            await bench.write(record(0), bad)
        assert await bench.rows() == []
        await bench.write(record(0), gone(0, uri="bad"))
        assert await bench.places() == [(URI, 0)]


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}", marks=[pytest.mark.server("postgres")] * is_postgres)
        for module, makes in RECORD_SINKS.items()
        for is_postgres in [module.startswith("postgres")]
        for name, make in makes.items()
        for promise in ATOMIC_PROMISES
    ],
)
def test_a_record_table_keeps_the_promises_of_a_sink(make, promise):
    run(promise(make))


class _RolledBackError(Exception):
    """Leaves a transaction on purpose."""
