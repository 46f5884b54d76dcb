"""No hot statement on Postgres reads a whole table, however large the batch and however full the tables."""

import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from adapters.postgres.benches import fresh
from adapters.record_tables import gone as gone_record
from adapters.record_tables import record
from keywise.adapters.postgres import database as postgres
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger import dump as archive_statements
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.record_table import PostgresRecordTable
from keywise.adapters.postgres.sink import PostgresSink
from keywise.adapters.postgres.source import PostgresSource
from keywise.core.change import ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Certainty, Commit, Entry, LeaseTerms, LedgerPolicy
from keywise.core.ledger import Failure
from keywise.core.statements import UserRecordTable, UserTable
from keywise.core.transaction import Transaction
from keywise.core.transfer import TransferPage
from keywise.testing.conformance.sinks import gone, put
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

BATCHES = (1, 100, 500, 1000, 2000)
CROWD = 100_000
SCAN = re.compile(r"Seq Scan on (keywise_\w+|stock_\w+|logs_\w+)")
FILTERED = re.compile(r"Rows Removed by (?:Filter|Index Recheck): (\d+)")
FILLED = [f"keywise_{table}" for table in ("marks", "active", "held", "ready", "letters")]
SMALL = {"keywise_scopes", "keywise_queues"}
"""One row for each pipeline or queue: an index would be slower."""
EXPLAINED = {"session_preload_libraries": "auto_explain", "auto_explain.log_min_duration": "0"}
"""Have the plan of every statement written into the log of the server."""


class Parts:
    """A queue, a ledger, a table and a record table in one database, and what a consumer does with them."""

    def __init__(self, database: PostgresDatabase, source, ledger, sink, records) -> None:
        self.database, self.source, self.ledger, self.sink, self.records = database, source, ledger, sink, records

    async def one_transaction(self, batch: int, version: int) -> None:
        """Receive, decide, write, mark, fail, dead-letter, release and ack in one transaction; then after a peek."""
        changes = [put(f"k{number}", version) for number in range(batch)]
        async with self.ledger.transaction() as transaction:
            queue = self.source.queue_in(transaction.connection)
            deliveries = await queue.receive(batch)
            await transaction.decide(changes)
            async with transaction.savepoint():
                await self.sink.write(transaction, [*changes, gone("gone", version)])
                await self.write_records(transaction, batch, version)
            await transaction.mark(changes)
            await transaction.fail([ChangeHeader("failed", order_of(version))])
            await transaction.dead_letter([(ChangeHeader("failed", order_of(version)), DeadLetter("cause", b""))])
            await queue.release(deliveries[:1], 0.0)
            await queue.park(deliveries[2:3], ["k1" for _ in deliveries[2:3]], [60.0 for _ in deliveries[2:3]])
            await queue.ack(deliveries[3:])
            await queue.recall(["k1"])
        async with self.ledger.transaction() as transaction:
            queue = self.source.queue_in(transaction.connection)
            await queue.ack(await queue.receive(10))
        peeked = await self.source.peek(batch, deliveries[-1])
        async with self.ledger.transaction() as transaction:
            queue = self.source.queue_in(transaction.connection)
            await queue.ack(await queue.receive(batch, peeked))
            await transaction.decide_and_mark([put(f"k{number}", version + 1) for number in range(batch)])

    async def write_records(self, transaction: Transaction, batch: int, version: int) -> None:
        """Write a new object and a shorter version of a known one, and delete the tail of that."""
        for uri, first in ((f"new {version}", 0), ("known", 500)):
            await self.records.write(transaction, [record(first + n, uri=uri, version=version) for n in range(batch)])
        await self.records.write(transaction, [gone_record(first, uri="known") for first in range(min(batch, 100))])
        await self.records.delete_tails(transaction, [("known", 500 + batch)], 100)
        await self.records.delete_tails(transaction, [(f"unknown-{n}", 0) for n in range(batch)], 100)

    async def leased(self, batch: int, version: int) -> None:
        """Receive, claim, renew, commit, fail, release, dead-letter, extend, release and ack, each on its own."""
        deliveries = await self.source.receive(batch, 0.0)
        headers = [ChangeHeader(f"k{number}", order_of(version)) for number in range(max(4, batch))]
        results = await self.ledger.claim(headers, LeaseTerms("w1", 60.0))
        await self.ledger.renew(results.granted, 60.0)
        *rest, failed, released, buried = results.granted
        await self.ledger.commit([Commit(claim) for claim in rest])
        await self.ledger.fail([Failure(failed, Certainty.CLEAN, 0.0)])
        await self.ledger.release([released])
        await self.ledger.dead_letter([DeadLetterRequest(DeadLetter("cause", b""), buried)])
        await self.source.extend(deliveries, 60.0)
        await self.source.release(deliveries[:1], 0.0)
        await self.source.park(deliveries[1:2], ["k1" for _ in deliveries[1:2]], [60.0 for _ in deliveries[1:2]])
        await self.source.ack(deliveries[2:])
        await self.source.recall(["k1"])
        await self.source.recall(None)
        await self.ledger.suspects(10, 0.0)
        await self.ledger.dead_letters(10)
        await self.ledger.inspect("k1")
        await self.source.arrived(0.0)


@asynccontextmanager
async def opened(url: str):
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(PostgresDatabase(url))
        source = await stack.enter_async_context(PostgresSource(database, fresh("queue")))
        ledger = await stack.enter_async_context(PostgresLedger(database, fresh("scope"), LedgerPolicy(intents=True)))
        sink = await stack.enter_async_context(PostgresSink(database, UserTable(fresh("stock"))))
        records = await stack.enter_async_context(PostgresRecordTable(database, UserRecordTable(fresh("logs"))))
        yield Parts(database, source, ledger, sink, records)


async def crowd(parts: Parts, *, is_analyzed: bool = True) -> None:
    """Fill the tables with what a batch has nothing to do with, and with the messages it receives."""
    bodies = [msgspec.json.encode({"key": f"k{number}"}) for number in range(CROWD)]
    await parts.source.send(bodies)
    scope, queue = parts.ledger.scope.number, parts.source._queue
    for statement in (
        f"insert into keywise_marks (scope, key, version, updated_at) "
        f"select {scope}, convert_to('k' || n, 'UTF8'), 1, 0 from generate_series(1, {CROWD}) n",
        f"insert into keywise_active (scope, key, token, lease_until, suspicions, entry) "
        f"select {scope}, convert_to('x' || n, 'UTF8'), 1, 1, 0, '{{}}' from generate_series(1, {CROWD}) n",
        f"insert into keywise_held (id, queue, visible_at, receipt, count, sent_at, body) "
        f"select nextval('keywise_messages'), {queue}, 1e12, 1, 1, 1, '' from generate_series(1, {CROWD})",
        f"insert into {parts.sink._table} select 'k' || n, 0, '' from generate_series(1, {CROWD}) n",
        f"insert into {parts.records._table} select 'known', n, 0, '' from generate_series(1, {CROWD}) n",
        f"insert into {parts.records._table} select 'x' || n, 0, 0, '' from generate_series(1, {CROWD}) n",
        f"insert into keywise_letters (scope, buried_at, key, cause, body, sent_at, source, traceback, routing_key) "
        f"select {scope}, n, '', '', '', 0, '', '', '' from generate_series(1, {CROWD}) n",
    ):
        await parts.database.write(f"{statement} on conflict do nothing")
    if is_analyzed:
        for table in (*FILLED, parts.sink._table, parts.records._table):
            await parts.database.write(f"analyze {table}")


async def empty(parts: Parts) -> None:
    """Leave one row in many pages, and statistics that say so, as after the vacuum of a queue that was drained."""
    for table in (*FILLED, parts.sink._table, parts.records._table):
        last = f"select max(ctid) from {table}"
        await parts.database.write(f"delete from {table} where ctid <> ({last})")
        await parts.database.write(f"vacuum analyze {table}")


def plans_of(name: str, steps: Callable[[Parts], Awaitable[None]], **settings: str) -> list[str]:
    """The plans of all statements of some steps."""
    url = shared.postgres().create_database(name, **EXPLAINED, **settings)

    async def main() -> list[str]:
        async with opened(url) as parts:
            before = len(shared.postgres().log)
            await steps(parts)
        return shared.postgres().log[before:].split("LOG:  duration:")[1:]

    plans = run(main(), limit_s=110)
    assert len(plans) > 100, "too few plans were seen to prove anything"
    return plans


def scans(plans: list[str]) -> set[str]:
    return {plan[:300] for plan in plans for table in SCAN.findall(plan) if table not in SMALL}


def test_no_hot_statement_scans_a_table(monkeypatch: pytest.MonkeyPatch):
    """With plans that the server is free to choose: else a statement that suits no index would not be noticed."""
    allowed = postgres._SESSION.replace("enable_seqscan = off", "enable_seqscan = on")
    assert allowed != postgres._SESSION
    monkeypatch.setattr(postgres, "_SESSION", allowed)

    async def steps(parts: Parts) -> None:
        await crowd(parts)
        for number, batch in enumerate(BATCHES * 2):
            await parts.one_transaction(batch, 10 + 4 * number)
            await parts.leased(batch, 12 + 4 * number)

    assert scans(plans_of("plans", steps)) == set()


def test_no_plan_for_a_table_that_is_still_empty_scans_it():
    """It would be kept while the table grows, until somebody analyzes it."""

    async def steps(parts: Parts) -> None:
        # As the server does by itself some time after the first messages came and went.
        await parts.database.write("vacuum analyze")
        for number in range(10):
            await parts.source.send([b"{}"] * 4)
            await parts.leased(4, 1 + number)
            async with parts.ledger.transaction() as transaction:
                await parts.write_records(transaction, 4, 1 + number)

    assert scans(plans_of("early_plans", steps)) == set()


def test_no_plan_for_a_table_that_was_emptied_filters_what_came_since():
    """The server takes such a table for almost empty until somebody analyzes it."""

    async def steps(parts: Parts) -> None:
        await crowd(parts)
        await empty(parts)
        await crowd(parts, is_analyzed=False)
        for number, batch in enumerate((1000, 100)):
            await parts.one_transaction(batch, 10 + 4 * number)
            await parts.leased(batch, 12 + 4 * number)

    plans = plans_of("emptied_plans", steps, **{"auto_explain.log_analyze": "on", "auto_explain.log_timing": "off"})
    hot = [plan for plan in plans if "ctid <> (" not in plan and "generate_series(1, " not in plan]
    slow = [plan for plan in hot for rows in FILTERED.findall(plan) if int(rows) > CROWD / 10]
    assert {plan.partition("Query Text: ")[2][:120] for plan in slow} == set()


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_a_part_of_a_scope_is_read_without_the_rest_of_it(is_analyzed):
    """Else a copy would take longer for each key the more keys there are."""

    async def main() -> list[tuple[int, int]]:
        async with PostgresLedger(PostgresDatabase(shared.postgres().url), fresh("scope"), LedgerPolicy()) as ledger:
            entries = [(f"k{number:06}", Entry(order_of(1), suspicions=number % 9)) for number in range(20_000)]
            await ledger.transfer.add(TransferPage(entries=entries))
            if is_analyzed:
                await ledger.database.write("analyze keywise_marks")
            explain = "explain (analyze) " + archive_statements._SQL["entries"]
            lines = await ledger.transfer._read(explain, ledger.scope.number, b"k010000", 100)
            scans = [re.search(r"Scan.*actual.* rows=(\d+) loops=(\d+)", line) for (line,) in lines]
            return [(int(scan[1]), int(scan[2])) for scan in scans if scan]

    seen = run(main())
    assert len(seen) >= 5 and max(rows * loops for rows, loops in seen) <= 100
