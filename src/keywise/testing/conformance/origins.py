"""What every origin promises: shards cover each row once, cursors resume, and rows are read as they are now."""

import enum
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from keywise.core.errors import SettingsError
from keywise.core.origin import CURSOR_MAX_BYTES, Origin, Page, Shard, note_bytes
from keywise.testing.conformance.promise import Promises, same

PAGES_MAX = 1000
"""How many pages a shard of a check may have; more would be a scan that does not end."""


class KeyKind(enum.StrEnum):
    """The keys of the table that a check needs."""

    TEXT = "text"
    INTEGER = "integer"
    """A column of whole numbers of 64 bits. The key of a row is the number as text."""
    NOT_UNIQUE = "not unique"
    """A column of texts that may hold a key twice."""


class RowWriter(Protocol):
    """Writes the rows that an origin reads. A row has the fields `key` and `text`."""

    async def put(self, texts: Mapping[str, str]) -> None:
        """Insert or replace the rows with these keys and texts, and commit them."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the rows with these keys, and commit that."""


@dataclass(slots=True, kw_only=True)
class OriginBench:
    """An empty table behind an origin."""

    origin: Origin
    """The origin, not yet opened."""
    another: Origin
    """The same one, not yet opened, as another process would make it."""
    rows: RowWriter
    """How to write the table."""

    @asynccontextmanager
    async def opened(self, texts: Mapping[str, str]) -> AsyncIterator[Origin]:
        """Write rows, and open the origin."""
        await self.rows.put(texts)
        async with self.origin as origin:
            yield origin


MakeOrigin: TypeAlias = Callable[[KeyKind], AbstractAsyncContextManager[OriginBench]]

ORIGIN_PROMISES: Promises[OriginBench] = Promises()
"""Kept by every origin. A fixture raises `UncheckedError` for keys that its store does not have."""
CONSISTENT_PROMISES: Promises[OriginBench] = Promises()
"""Kept by origins that read the primary, or consistently."""

KEYS = (
    *("a", "A", "b", "Ab", "aB", "é", "É", "e\u0301", "ß", "ss", "日本語", "🦉", "\uffff", "1", "10", "2", "-1", "007"),
    *("'; drop table x; --", 'say "hi"', "line\nbreak", "tab\t", "%", "_", "\\", "{}", "null", "NULL", "=", "<"),
    *(" ", "  a", "a ", "k" * 512, "é" * 256),
)
INTEGERS = (0, 1, -1, 2, 10, -10, 99, 100, -100, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63))


def body_of(key: str, text: str) -> bytes:
    """Return a row as the body of a message."""
    return msgspec.json.encode({"key": key, "text": text})


def numbered(count: int) -> dict[str, str]:
    return {f"k{number:04}": f"text {number}" for number in range(count)}


def read(rows: Sequence[bytes]) -> list[tuple[str, str]]:
    """Return the key and the text of each row."""
    decoded = [msgspec.json.decode(row, type=dict[str, object]) for row in rows]
    return [(str(row["key"]), str(row["text"])) for row in decoded]


async def pages_of(origin: Origin, shard: Shard, limit: int, after: str = "") -> AsyncIterator[Page]:
    """Scan a shard from a cursor to its end."""
    for _ in range(PAGES_MAX):
        page = await origin.scan(shard, after, limit)
        check_page(page, limit)
        yield page
        if page.is_last:
            return
        after = page.after
    raise AssertionError(f"the scan of shard {shard.name!r} did not end after {PAGES_MAX} pages")


def check_page(page: Page, limit: int) -> None:
    if len(page.rows) > limit:
        raise AssertionError(f"a page had {len(page.rows)} rows, though {limit} were asked for")
    same("whether a cursor has at most 3 KiB and is not empty", 0 < note_bytes(page.after) <= CURSOR_MAX_BYTES, True)


async def scanned(origin: Origin, *, size: int, limit: int) -> list[tuple[str, str]]:
    """Return the rows of all shards."""
    found: list[tuple[str, str]] = []
    for shard in await shards_of(origin, size):
        async for page in pages_of(origin, shard, limit):
            found += read(page.rows)
    return found


async def shards_of(origin: Origin, size: int) -> list[Shard]:
    """Return the shards, as a ledger would keep them."""
    shards = list(await origin.shards(size))
    same("whether there is a shard", bool(shards), True)
    same("whether the names of shards are unique", len({shard.name for shard in shards}), len(shards))
    same("whether bounds have at most 3 KiB", all(note_bytes(one.bounds) <= CURSOR_MAX_BYTES for one in shards), True)
    return [msgspec.json.decode(msgspec.json.encode(shard), type=Shard) for shard in shards]


def same_rows(found: Sequence[tuple[str, str]], wanted: Mapping[str, str]) -> None:
    twice = [key for key, count in Counter(key for key, _ in found).items() if count > 1]
    same("the keys that were read twice", twice, [])
    same("the keys that were not read", sorted(wanted.keys() - dict(found).keys()), [])
    same("the keys that are in no row", sorted(dict(found).keys() - wanted.keys()), [])
    same("the rows", dict(found), dict(wanted))


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def shards_cover_every_row_once(bench: OriginBench) -> None:
    """The shards of an origin cover every row exactly once, with any size of shards and pages."""
    texts = numbered(100)
    async with bench.opened(texts) as origin:
        for size, limit in ((1, 1), (7, 3), (7, 7), (7, 100), (50, 10), (100, 100), (1000, 1000)):
            same_rows(await scanned(origin, size=size, limit=limit), texts)


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def an_empty_origin_has_no_rows(bench: OriginBench) -> None:
    """The scan of an empty origin ends, and a row that is inserted afterwards is in its shards."""
    async with bench.opened({}) as origin:
        same_rows(await scanned(origin, size=10, limit=10), {})
        shards = await shards_of(origin, 10)
        await bench.rows.put({"late": "row"})
        found = [read(page.rows) for shard in shards async for page in pages_of(origin, shard, 10)]
        same_rows([row for page in found for row in page], {"late": "row"})


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def one_row_is_read(bench: OriginBench) -> None:
    """An origin with one row has it in one page, whether the page could hold more or not."""
    async with bench.opened({"only": "row"}) as origin:
        for size, limit in ((1, 1), (10, 10)):
            same_rows(await scanned(origin, size=size, limit=limit), {"only": "row"})


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def a_scan_resumes_behind_its_cursor(bench: OriginBench) -> None:
    """A shard and a cursor mean the same in another process: its scan goes on behind the last row."""
    texts = numbered(30)
    async with bench.opened(texts) as origin, bench.another as another:
        for shard in await shards_of(origin, 12):
            pages = [page async for page in pages_of(origin, shard, 5)]
            for number, page in enumerate(pages[:-1], start=1):
                rest = [row for one in pages[number:] for row in read(one.rows)]
                resumed = [one async for one in pages_of(another, shard, 4, page.after)]
                same("the rows behind a cursor", [row for one in resumed for row in read(one.rows)], rest)


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def rows_that_stay_are_read_while_others_come_and_go(bench: OriginBench) -> None:
    """A row that exists during the whole scan is read once, though others are inserted, changed and deleted."""
    stay = {f"k{number:04}": "stays" for number in range(0, 120, 2)}
    go = {f"k{number:04}x": "goes" for number in range(0, 120, 2)}
    async with bench.opened(stay | go) as origin:
        found: list[tuple[str, str]] = []
        left = list(go)
        for shard in await shards_of(origin, 25):
            async for page in pages_of(origin, shard, 5):
                found += read(page.rows)
                # Behind the cursor, at it, and before it.
                await bench.rows.delete([*left[:2], *left[-2:], *(key for key, _ in read(page.rows) if key in go)])
                left = left[2:-2]
                number = len(found)
                await bench.rows.put({f"k{number % 120:04}new": "comes", f"a{number}": "comes", f"z{number}": "comes"})
        same_rows([row for row in found if row[0] in stay], stay)


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def fetch_reads_rows_and_leaves_out_missing_keys(bench: OriginBench) -> None:
    """`fetch` returns the rows of the keys that exist, and leaves out the others."""
    async with bench.opened(numbered(10)) as origin:
        found = await origin.fetch(["k0003", "missing", "k0007", "K0003", "k0003"])
        same("the keys", sorted(found), ["k0003", "k0007"])
        same_rows(read(list(found.values())), {"k0003": "text 3", "k0007": "text 7"})
        same("the rows of no key", dict(await origin.fetch([])), {})
        same("the rows of keys that do not exist", dict(await origin.fetch(["", "x", "y" * 3000, *KEYS])), {})


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def any_key_is_read(bench: OriginBench) -> None:
    """Keys are any text: quotes, spaces, upper case, letters of all languages, numbers."""
    texts = {key: f"text of {key}" for key in KEYS}
    async with bench.opened(texts) as origin:
        for size, limit in ((1, 1), (5, 2), (100, 100)):
            same_rows(await scanned(origin, size=size, limit=limit), texts)
        for key in KEYS:
            same_rows(read(list((await origin.fetch([key])).values())), {key: texts[key]})
        same_rows(read(list((await origin.fetch(KEYS)).values())), texts)


@ORIGIN_PROMISES.add(KeyKind.TEXT)
async def a_very_long_key_stops_no_scan(bench: OriginBench) -> None:
    """Rows with keys that are too long for a message are read, so that each becomes a dead letter of its own."""
    texts = {f"{letter}{number}" + letter * 1900: "long" for letter in "amz" for number in range(3)} | numbered(10)
    async with bench.opened(texts) as origin:
        for size, limit in ((1, 1), (4, 3), (100, 100)):
            same_rows(await scanned(origin, size=size, limit=limit), texts)


@ORIGIN_PROMISES.add(KeyKind.INTEGER)
async def whole_numbers_are_keys(bench: OriginBench) -> None:
    """A column of whole numbers is read completely, negative ones too, and its keys are texts."""
    texts = {str(number): f"text of {number}" for number in INTEGERS}
    async with bench.opened(texts) as origin:
        for size, limit in ((1, 1), (5, 2), (100, 100)):
            same_rows(await scanned(origin, size=size, limit=limit), texts)
        same_rows(read(list((await origin.fetch(list(texts))).values())), texts)
        for shard in await shards_of(origin, 100):
            async for page in pages_of(origin, shard, 100):
                keys = [msgspec.json.decode(row)["key"] for row in page.rows]
                same("the keys that are no text", [key for key in keys if not isinstance(key, str)], [])


@ORIGIN_PROMISES.add(KeyKind.INTEGER)
async def what_is_no_number_has_no_row(bench: OriginBench) -> None:
    """`fetch` leaves out keys that a column of whole numbers cannot hold, or would spell differently."""
    async with bench.opened({"7": "seven", "0": "zero"}) as origin:
        others = ("007", "+7", " 7", "7.0", "7e0", "-0", "", "abc", "9" * 30, "-" + "9" * 19, "\u0667", "'7'", "null")
        same_rows(read(list((await origin.fetch([*others, "7"])).values())), {"7": "seven"})


@ORIGIN_PROMISES.add(KeyKind.NOT_UNIQUE)
async def a_key_that_is_not_unique_is_refused(bench: OriginBench) -> None:
    """A table whose key column is not unique is refused when the origin is opened."""
    try:
        async with bench.origin:
            pass
    except SettingsError as error:
        same("whether the error says what to do", "unique" in str(error), True)
    else:
        raise AssertionError("the origin was opened")


@CONSISTENT_PROMISES.add(KeyKind.TEXT)
async def fetch_sees_confirmed_writes(bench: OriginBench) -> None:
    """`fetch` sees what was written or deleted before the call."""
    async with bench.opened({"a": "one", "b": "one"}) as origin:
        for number in range(5):
            await bench.rows.put({"a": f"text {number}", "c": "new"})
            await bench.rows.delete(["b"])
            same_rows(read(list((await origin.fetch(["a", "b", "c"])).values())), {"a": f"text {number}", "c": "new"})
            await bench.rows.delete(["c"])
            await bench.rows.put({"b": "again"})
