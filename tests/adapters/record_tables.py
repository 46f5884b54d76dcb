"""Record tables on SQLite and Postgres, each behind one bench: records go in, and the test reads the rows back."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from adapters.benches import BAD, two_databases
from adapters.postgres.benches import fresh, two_openings
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.record_table import PostgresRecordTable
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.adapters.sqlite.record_table import SqliteRecordTable
from keywise.core.change import Change, order_of
from keywise.core.entry import LedgerPolicy
from keywise.core.record import Record
from keywise.core.sink import Grade
from keywise.core.statements import UserRecordTable
from keywise.core.transaction import Transaction
from keywise.testing.conformance import SinkBench

URI = "s3://bucket/2026/a.ndjson"
CHECKED = "object text check (object <> 'bad'), ordinal bigint, version bigint, body text"


def record(ordinal: int, body: bytes = b"{}", *, version: int = 1, uri: str = URI) -> Record[Any]:
    return Record(f"{uri}#{ordinal}", order_of(version), body=body, object=uri, ordinal=ordinal)


def gone(ordinal: int, *, version: int = 2, uri: str = URI) -> Record[Any]:
    return Record(f"{uri}#{ordinal}", order_of(version), deleted=True, object=uri, ordinal=ordinal)


@dataclass(slots=True, kw_only=True)
class RecordBench:
    """A record table, the ledger that shares its database, and what another connection sees of the table."""

    table: Any
    ledger: Any
    select: Callable[[str], Awaitable[Sequence[Any]]]
    """Reads these columns, in the order of the primary key."""

    async def write(self, *records: Record[Any]) -> None:
        async with self.ledger.transaction() as transaction:
            await self.table.write(transaction, records)

    async def delete(self, first: int, limit: int, uri: str = URI) -> int:
        async with self.ledger.transaction() as transaction:
            count: int = await self.table.delete_tails(transaction, [(uri, first)], limit)
            return count

    async def rows(self) -> list[tuple[str, int, int, str]]:
        return [tuple(row) for row in await self.select("object, ordinal, version, body")]

    async def places(self) -> list[tuple[str, int]]:
        return [tuple(row) for row in await self.select("object, ordinal")]


@asynccontextmanager
async def sqlite_records(columns: Sequence[str] = (), declared: str = "") -> AsyncIterator[RecordBench]:
    """A table that the sink creates, or one with declared columns."""
    async with two_databases() as (database, other), SqliteLedger(database, "scope", LedgerPolicy()) as ledger:
        if declared:
            await database.execute(f"create table logs ({declared}, primary key (object, ordinal))")
        async with SqliteRecordTable(database, UserRecordTable("logs", columns=columns)) as table:

            async def select(what: str) -> Sequence[Any]:
                return other.read(f"select {what} from logs order by object, ordinal")

            yield RecordBench(table=table, ledger=ledger, select=select)


@asynccontextmanager
async def postgres_records(columns: Sequence[str] = (), declared: str = "") -> AsyncIterator[RecordBench]:
    """A table that the sink creates, or one with declared columns."""
    name = fresh("logs")
    async with two_openings() as (database, other), PostgresLedger(database, name, LedgerPolicy()) as ledger:
        if declared:
            await database.write(f"create table {name} ({declared}, primary key (object, ordinal))")
        async with PostgresRecordTable(database, UserRecordTable(name, columns=columns)) as table:

            async def select(what: str) -> Sequence[Any]:
                return await other.read(f'select {what} from {name} order by object collate "C", ordinal')

            yield RecordBench(table=table, ledger=ledger, select=select)


class KeyedRecords:
    """A record table as a sink of changes by key: each is the only record of an object with this name."""

    grade = Grade.ATOMIC
    runs_user_code = False

    def __init__(self, table: Any) -> None:
        self._table = table
        self.batch_max = table.batch_max

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        records = [
            Record(one.key, one.order, deleted=one.deleted, body=one.body, object=one.key, ordinal=0) for one in changes
        ]
        await self._table.write(transaction, records)


def keyed(make: Callable[..., Any]) -> Callable[[], Any]:
    """What the conformance suite for sinks makes its benches with."""

    @asynccontextmanager
    async def made() -> AsyncIterator[SinkBench]:
        async with make(declared=CHECKED) as bench:

            async def content() -> dict[str, bytes]:
                return {uri: body.encode() for uri, body in await bench.select("object, body")}

            sink = KeyedRecords(bench.table)
            yield SinkBench(sink=sink, content=content, transaction=bench.ledger.transaction, bad=BAD)

    return made


RECORD_SINKS = {
    "sqlite.record_table": {"sqlite records": keyed(sqlite_records)},
    "postgres.record_table": {"postgres records": keyed(postgres_records)},
}
