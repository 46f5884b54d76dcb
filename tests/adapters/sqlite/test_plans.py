"""Nothing hot reads a whole table of a SQLite file, and the work for a batch does not grow with what lies around it."""

import re
import sqlite3
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from adapters.benches import two_databases
from adapters.record_tables import gone as gone_record
from adapters.record_tables import record
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.adapters.sqlite.record_table import SqliteRecordTable
from keywise.adapters.sqlite.sink import SqliteSink
from keywise.adapters.sqlite.source import SqliteSource
from keywise.core.change import ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Certainty, Commit, LeaseTerms, LedgerPolicy
from keywise.core.ledger import Failure
from keywise.core.statements import UserRecordTable, UserTable
from keywise.testing.conformance.sinks import gone, put
from running import run

HOT = ("select", "insert", "update", "delete", "replace", "with")
BATCH = 50


class Parts:
    """A queue, a ledger, a table and a record table in one file, and what a consumer does with them."""

    def __init__(self, database: SqliteDatabase, source, ledger, sink, records) -> None:
        self.database, self.source, self.ledger, self.sink, self.records = database, source, ledger, sink, records

    async def send(self, count: int, *, delay_s: float = 0.0) -> None:
        await self.source.send([msgspec.json.encode({"key": f"k{n}"}) for n in range(count)], delay_s=delay_s)

    async def one_transaction(self, version: int) -> None:
        """Receive, decide, write, mark, fail, dead-letter, release and ack in one transaction."""
        changes = [put(f"k{number}", version) for number in range(BATCH)]
        async with self.ledger.transaction() as transaction:
            queue = self.source.queue_in(transaction.connection)
            deliveries = await queue.receive(BATCH)
            await transaction.decide(changes)
            async with transaction.savepoint():
                await self.sink.write(transaction, [*changes, gone("gone", version)])
                records = [record(number, uri="known", version=version) for number in range(BATCH)]
                await self.records.write(transaction, [*records, gone_record(BATCH, uri="known")])
                await self.records.delete_tails(transaction, [("known", BATCH)], 10)
            await transaction.mark(changes)
            await transaction.fail([ChangeHeader("failed", order_of(version))])
            await transaction.dead_letter([(ChangeHeader("failed", order_of(version)), DeadLetter("cause", b""))])
            await queue.release(deliveries[:3], 0.0)
            await queue.park(deliveries[3:5], ["k3", "k4"], [0.0, 60.0])
            await queue.ack(deliveries[5:])
            await queue.recall(["k4"])
        if deliveries:
            await self.source.peek(BATCH, deliveries[-1])

    async def leased(self, version: int) -> None:
        """Receive, claim, renew, commit, fail, release, dead-letter, extend, release and ack, each on its own."""
        deliveries = await self.source.receive(BATCH, 0.0)
        headers = [ChangeHeader(f"k{number}", order_of(version)) for number in range(BATCH)]
        results = await self.ledger.claim(headers, LeaseTerms("w1", 60.0))
        await self.ledger.renew(results.granted, 60.0)
        *rest, failed, released, buried = results.granted
        await self.ledger.commit([Commit(claim) for claim in rest])
        await self.ledger.fail([Failure(failed, Certainty.CLEAN, 0.0)])
        await self.ledger.release([released])
        await self.ledger.dead_letter([DeadLetterRequest(DeadLetter("cause", b""), buried)])
        await self.source.extend(deliveries, 60.0)
        await self.source.release(deliveries[:3], 0.0)
        await self.source.park(deliveries[3:5], ["k3", "k4"], [60.0, 60.0])
        await self.source.ack(deliveries[5:])
        await self.source.recall(["k3"])
        await self.source.recall(None)
        await self.ledger.suspects(10, 0.0)
        await self.ledger.dead_letters(10)
        await self.ledger.control_store.held("", 10)
        await self.ledger.inspect("k1")
        await self.source.arrived(0.0)

    async def connections(self) -> list[sqlite3.Connection]:
        async with self.database.transaction() as writer:
            return [writer, self.database.reader]


@asynccontextmanager
async def opened():
    async with two_databases() as (database, _), AsyncExitStack() as stack:
        source = await stack.enter_async_context(SqliteSource(database, "queue"))
        ledger = await stack.enter_async_context(SqliteLedger(database, "scope", LedgerPolicy(intents=True)))
        sink = await stack.enter_async_context(SqliteSink(database, UserTable("stock")))
        records = await stack.enter_async_context(SqliteRecordTable(database, UserRecordTable("logs")))
        yield Parts(database, source, ledger, sink, records)


async def statements_of(parts: Parts) -> dict[str, str]:
    """Every statement that the hot paths run, one example of each."""
    seen: dict[str, str] = {}

    def note(statement: str) -> None:
        if statement.lstrip().lower().startswith(HOT):
            seen.setdefault(re.sub(r"x?'(?:[^']|'')*'|-?\b\d[\d.e+]*\b", "?", statement), statement)

    connections = await parts.connections()
    for connection in connections:
        connection.set_trace_callback(note)
    for version in (1, 2, 3):
        await parts.send(BATCH)
        await parts.one_transaction(version * 10)
        await parts.send(BATCH, delay_s=0.001)
        await parts.leased(version * 10 + 1)
    for connection in connections:
        connection.set_trace_callback(None)
    return seen


def scans(plan: list[str]) -> list[str]:
    """Steps that read a whole table; the list of wanted keys comes as a virtual table, and is meant to be read."""
    harmless = ("SCAN CONSTANT ROW", "SCAN json_each VIRTUAL TABLE")
    return [step for step in plan if step.startswith("SCAN") and not step.startswith(harmless)]


def test_no_hot_statement_scans_a_table():
    async def main():
        async with opened() as parts:
            seen = await statements_of(parts)
            reader = parts.database.reader
            plans = {
                statement: [row[3] for row in reader.execute(f"explain query plan {statement}")]
                for statement in seen.values()
            }
        return plans

    plans = run(main())
    assert len(plans) > 20, "too few statements were seen to prove anything"
    assert {statement[:300]: found for statement, plan in plans.items() if (found := scans(plan))} == {}


def test_a_scan_would_be_reported():
    assert scans(["SCAN keywise_held"]) == ["SCAN keywise_held"]
    assert scans(["SEARCH keywise_held USING INDEX x (visible_at<?)", "SCAN json_each VIRTUAL TABLE INDEX 1:"]) == []


class Counter:
    """Counts what SQLite does, in steps of its virtual machine."""

    def __init__(self) -> None:
        self.hundreds = 0

    def __call__(self) -> int:
        self.hundreds += 1
        return 0


async def effort(parts: Parts, way: str) -> int:
    """What one batch costs, when the batch before it has warmed everything up."""
    connections, counter = await parts.connections(), Counter()
    for version, connection_counter in ((1, Counter()), (2, counter)):
        await parts.send(BATCH)
        for connection in connections:
            connection.set_progress_handler(connection_counter, 100)
        await getattr(parts, way)(version)
        for connection in connections:
            connection.set_progress_handler(None, 0)
    return counter.hundreds


async def crowd(parts: Parts, count: int) -> None:
    """Fill the file with what a batch has nothing to do with: other keys, held and delayed messages, letters."""
    await parts.send(count, delay_s=1000.0)
    await parts.send(count)
    held = []
    while deliveries := await parts.source.receive(1000, 0.0):
        held += deliveries
    assert len(held) == count
    results = await parts.ledger.claim(
        [ChangeHeader(f"other {n}", order_of(1)) for n in range(count)], LeaseTerms("w2", 1000.0)
    )
    await parts.ledger.commit([Commit(claim) for claim in results.granted[count // 2 :]])
    await parts.ledger.dead_letter([DeadLetterRequest(DeadLetter("cause", b"body")) for _ in range(count)])
    async with parts.ledger.transaction() as transaction:
        for uri in ("known", "other"):
            await parts.records.write(transaction, [record(number, uri=uri) for number in range(count)])


@pytest.mark.parametrize("way", ["one_transaction", "leased"])
def test_the_work_for_a_batch_does_not_grow_with_the_tables(way):
    async def main(count: int) -> int:
        async with opened() as parts:
            if count:
                await crowd(parts, count)
            return await effort(parts, way)

    alone, crowded = run(main(0)), run(main(5000))
    assert alone > 10, "too little was counted to prove anything"
    assert crowded < alone * 1.7, f"{alone}00 steps alone, {crowded}00 steps in a crowd"
