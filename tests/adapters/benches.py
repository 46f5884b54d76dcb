"""A factory for each plug in the folders of keywise: what the conformance suite makes its benches with."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from keywise.adapters.function.origin import FunctionOrigin
from keywise.adapters.function.sink import FunctionSink, TransactedFunctionSink
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.origin import MemoryOrigin
from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.adapters.memory.source import MemorySource
from keywise.adapters.memory.targets import MemoryStore
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.adapters.sqlite.origin import SqliteOrigin
from keywise.adapters.sqlite.sink import SqliteSink
from keywise.adapters.sqlite.source import SqliteSource
from keywise.core.change import Change
from keywise.core.clock import boot_time
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import PermanentError
from keywise.core.origin import Page, Shard
from keywise.core.sink import Grade
from keywise.core.statements import OriginTable, UserTable
from keywise.core.transaction import Transaction
from keywise.testing.conformance import KeyKind, LedgerBench, OriginBench, SinkBench, SourceBench, UncheckedError
from keywise.testing.conformance.benches.memory import MappedRows
from keywise.testing.conformance.benches.sqlite import KEY_COLUMNS, SqliteBenchDatabase, SqliteRows
from keywise.testing.conformance.sinks import put
from servers.machine import IN_MEMORY

VISIBILITY_S = 60.0
BAD = put("bad", 1)


class MovingClock:
    """Boot time that can be moved ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return boot_time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


@asynccontextmanager
async def two_databases() -> AsyncIterator[tuple[SqliteBenchDatabase, SqliteBenchDatabase]]:
    """One new file, opened twice as two processes would."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        path = f"{folder}/bench.db"
        async with SqliteBenchDatabase(path) as one, SqliteBenchDatabase(path) as other:
            yield one, other


def advance_all(*databases: SqliteBenchDatabase):
    def advance(seconds: float) -> None:
        for database in databases:
            database.move_clock(seconds)

    return advance


# Sources.


@asynccontextmanager
async def memory_source() -> AsyncIterator[SourceBench]:
    clock = MovingClock()
    database = MemoryDatabase(clock=clock)

    @asynccontextmanager
    async def transaction() -> AsyncIterator[MemoryDatabase]:
        async with database.transaction():
            yield database

    queue, again = (MemorySource(database, "queue", VISIBILITY_S) for _ in range(2))
    yield SourceBench(source=queue, another=again, advance=clock.advance, transaction=transaction)


@asynccontextmanager
async def sqlite_source() -> AsyncIterator[SourceBench]:
    async with two_databases() as (one, other), AsyncExitStack() as stack:
        # A queue on each side of the one under test, whose messages must stay out of it.
        for name in ("before", "queue", "after"):
            source = await stack.enter_async_context(SqliteSource(one, name, VISIBILITY_S))
            if name != "queue":
                await source.send([b"of another queue"] * 3)
                await source.receive(1, 0.0)
        queue = await stack.enter_async_context(SqliteSource(one, "queue", VISIBILITY_S))
        again = await stack.enter_async_context(SqliteSource(other, "queue", VISIBILITY_S))
        yield SourceBench(source=queue, another=again, advance=advance_all(one, other), transaction=one.transaction)


# Ledgers.


@asynccontextmanager
async def memory_ledger(policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
    clock = MovingClock()
    database = MemoryDatabase(clock=clock)
    ledger, again = (MemoryLedger(database, "scope", policy) for _ in range(2))
    yield LedgerBench(ledger=ledger, another=again, advance=clock.advance)


@asynccontextmanager
async def sqlite_ledger(policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
    async with (
        two_databases() as (one, other),
        SqliteLedger(one, "scope", policy) as ledger,
        SqliteLedger(other, "scope", policy) as again,
    ):
        yield LedgerBench(ledger=ledger, another=again, advance=advance_all(one, other))


# Sinks.


def memory_sink(grade: Grade, forget_deletions_s: float | None = None):
    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        store = MemoryStore("stock")
        one, other = (
            _memory_bench(MemorySink(grade, forget_deletions_s=forget_deletions_s, store=store)) for _ in "12"
        )
        one.another = other
        yield one

    return make


@asynccontextmanager
async def memory_table() -> AsyncIterator[SinkBench]:
    database = MemoryDatabase()
    transaction = MemoryLedger(database, "scope", LedgerPolicy()).transaction
    bench = _memory_bench(MemoryTable(database, "stock"), transaction)
    bench.another = _memory_bench(MemoryTable(database, "stock"), transaction)
    yield bench


def _memory_bench(sink: MemorySink | MemoryTable, transaction: Any = None) -> SinkBench:
    async def content() -> dict[str, bytes]:
        return {key: stored.body for key, stored in sink.stored.items() if not stored.deleted}

    return SinkBench(sink=sink, content=content, transaction=transaction)


def sqlite_sink(columns: tuple[str, ...] = ()):
    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        async with AsyncExitStack() as stack:
            database, other = await stack.enter_async_context(two_databases())
            await database.write(lambda connection: connection.execute(_TABLE))
            shown = "json_object('key', key, 'version', version, 'text', text)" if columns else "body"

            async def content() -> dict[str, bytes]:
                return {key: text.encode() for key, text in other.read(f"select key, {shown} from stock")}

            async def opened(database: SqliteBenchDatabase) -> SinkBench:
                ledger = await stack.enter_async_context(SqliteLedger(database, "scope", LedgerPolicy()))
                sink = await stack.enter_async_context(SqliteSink(database, UserTable("stock", columns=columns)))
                return SinkBench(sink=sink, content=content, transaction=ledger.transaction, bad=BAD)

            bench = await opened(database)
            bench.another = await opened(other)
            yield bench

    return make


_TABLE = "create table stock (key text primary key check (key != 'bad'), version integer, body, text)"


def function_sink(kind: str):
    """A handler that writes into a dictionary: async or plain, one change or a batch."""

    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        stored: dict[str, bytes] = {}

        def keep(change: Change) -> None:
            if change.key == BAD.key:
                raise PermanentError("this store takes no bad key")
            if change.deleted:
                stored.pop(change.key, None)
            else:
                stored[change.key] = change.body

        async def keep_async(change: Change) -> None:
            keep(change)

        def keep_all(changes: list[Change]) -> None:
            for change in changes:
                keep(change)

        async def keep_all_async(changes: list[Change]) -> None:
            keep_all(changes)

        handlers = {"plain": keep, "async": keep_async, "plain batch": keep_all, "async batch": keep_all_async}

        async def content() -> dict[str, bytes]:
            return stored

        async with FunctionSink(handlers[kind], threads=2) as sink:
            yield SinkBench(sink=sink, content=content, bad=BAD)

    return make


def transacted_sink(kind: str):
    """A handler that writes into a table with the connection of the transaction."""

    @asynccontextmanager
    async def make() -> AsyncIterator[SinkBench]:
        def keep(change: Change, transaction: Transaction) -> None:
            if change.key == BAD.key:
                transaction.connection.execute("delete from stock")
                raise PermanentError("this store takes no bad key")
            if change.deleted:
                transaction.connection.execute("delete from stock where key = ?", (change.key,))
                return
            row = (change.key, change.version, change.body)
            transaction.connection.execute("insert or replace into stock (key, version, body) values (?, ?, ?)", row)

        async def keep_async(change: Change, transaction: Transaction) -> None:
            keep(change, transaction)

        async def keep_all_async(changes: list[Change], transaction: Transaction) -> None:
            for change in changes:
                keep(change, transaction)

        handlers = {"plain": keep, "async": keep_async, "async batch": keep_all_async}
        async with two_databases() as (database, other), SqliteLedger(database, "scope", LedgerPolicy()) as ledger:
            await database.write(lambda connection: connection.execute(_TABLE))

            async def content() -> dict[str, bytes]:
                return dict(other.read("select key, body from stock"))

            async with TransactedFunctionSink(handlers[kind], database) as sink:
                yield SinkBench(sink=sink, content=content, transaction=ledger.transaction, bad=BAD)

    return make


# Origins.


@asynccontextmanager
async def memory_origin(keys: KeyKind) -> AsyncIterator[OriginBench]:
    rows = mapped_rows(keys)
    yield OriginBench(origin=MemoryOrigin(rows.rows), another=MemoryOrigin(rows.rows), rows=rows)


def mapped_rows(keys: KeyKind) -> MappedRows:
    if keys is not KeyKind.TEXT:
        raise UncheckedError("a mapping has texts as keys, and each of them once")
    return MappedRows({})


def sqlite_origin(declared: str = "", body: str = ""):
    """A table whose key column is declared like that, or as usual."""

    @asynccontextmanager
    async def make(keys: KeyKind) -> AsyncIterator[OriginBench]:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            path = f"{folder}/truth.db"
            rows = SqliteRows(path, "pages")
            rows.execute(f"create table pages (key {declared or KEY_COLUMNS[keys]}, text text, {_BODY})")
            if declared and keys is not KeyKind.TEXT:
                raise UncheckedError("the column is declared for texts")
            one, other = (SqliteOrigin(path, OriginTable("pages", body=body)) for _ in range(2))
            yield OriginBench(origin=one, another=other, rows=rows)

    return make


_BODY = "body text as (json_object('key', cast(key as text), 'text', text))"


class UserPages:
    """What a user may write: rows as values, and empty pages in between."""

    def __init__(self, rows: dict[str, bytes], *, is_consistent: bool = True) -> None:
        self.rows = rows
        self.is_consistent = is_consistent

    def shards(self, size: int) -> list[Shard]:
        return [Shard("even", "0"), Shard("odd", "1")]

    def scan(self, shard: Shard, after: str, limit: int) -> Page:
        seen, skipped = after.partition(" ")[2], after.startswith("skipped")
        if not skipped:
            return Page([], f"skipped {seen}", is_last=False)
        keys = [key for key in sorted(self.rows) if f" {key}" > f" {seen}" or (not seen and key <= "")]
        own = [key for key in keys if len(key) % 2 == int(shard.bounds)][:limit]
        rows = [{"key": key, "text": text_in(self.rows[key])} for key in own]
        return Page(rows, f"read {own[-1]}" if own else after, is_last=len(own) < limit)

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        return {key: self.rows.get(key) for key in keys}


def text_in(body: bytes) -> str:
    return msgspec.json.decode(body)["text"]


class AsyncUserPages(UserPages):
    """The same with coroutines; it leaves out keys that are gone."""

    async def shards(self, size: int) -> list[Shard]:
        return super().shards(size)

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        return super().scan(shard, after, limit)

    async def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        return {key: self.rows[key] for key in keys if key in self.rows}


def function_origin(kind: type[UserPages], *, is_consistent: bool = True):
    @asynccontextmanager
    async def make(keys: KeyKind) -> AsyncIterator[OriginBench]:
        rows = mapped_rows(keys)
        one, other = (FunctionOrigin(kind(rows.rows, is_consistent=is_consistent)) for _ in range(2))
        yield OriginBench(origin=one, another=other, rows=rows)

    return make


SOURCES = {"memory.source": {"memory": memory_source}, "sqlite.source": {"sqlite": sqlite_source}}
ORIGINS = {
    "memory.origin": {"memory": memory_origin},
    "sqlite.origin": {
        "sqlite": sqlite_origin(),
        "sqlite with a unique column": sqlite_origin("varchar(9000) not null unique"),
        "sqlite with bodies": sqlite_origin(body="body"),
    },
    "function.origin": {
        "plain object": function_origin(UserPages),
        "async object": function_origin(AsyncUserPages),
        "lagging object": function_origin(UserPages, is_consistent=False),
    },
}
LEDGERS = {"memory.ledger": {"memory": memory_ledger}, "sqlite.ledger.ledger": {"sqlite": sqlite_ledger}}
SINKS = {
    "memory.sink": {
        "memory plain": memory_sink(Grade.PLAIN),
        "memory conditional": memory_sink(Grade.CONDITIONAL),
        "memory conditional that forgets deletions": memory_sink(Grade.CONDITIONAL, 60.0),
        "memory table": memory_table,
    },
    "sqlite.sink": {"sqlite": sqlite_sink(), "sqlite with columns": sqlite_sink(("text",))},
    "function.sink": {
        **{f"{kind} function": function_sink(kind) for kind in ("plain", "async", "plain batch", "async batch")},
        **{f"{kind} transacted function": transacted_sink(kind) for kind in ("plain", "async", "async batch")},
    },
}
