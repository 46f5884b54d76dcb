"""Eight connections to one Postgres never hold a key together, and one history of each key explains all answers."""

import asyncio

import pytest

from adapters.linearizability import CONNECTIONS, Told, agree, claimed, faults, transacted
from adapters.postgres.benches import fresh
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.postgres.source import PostgresSource
from keywise.core.entry import LedgerPolicy
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")


@pytest.mark.parametrize("works", [[claimed], [transacted], [claimed, transacted]], ids=["claims", "marks", "both"])
def test_connections_that_work_on_the_same_keys_agree_on_one_history(works):
    name = fresh("scope")

    async def opened(stack) -> PostgresLedger:
        database = await stack.enter_async_context(PostgresDatabase(shared.postgres().url))
        return await stack.enter_async_context(PostgresLedger(database, name, LedgerPolicy()))

    run(agree(opened, *works), limit_s=100)


def test_a_history_that_nothing_explains_is_found():
    fine = [Told("a", 1, "committed", 0, 1), Told("a", 2, "committed", 2, 5), Told("a", 1, "stale", 3, 6, 2)]
    assert faults(fine) == []
    assert len(faults([Told("a", 2, "committed", 0, 1), Told("a", 1, "committed", 2, 3)])) == 1
    assert len(faults([*fine, Told("a", 2, "committed", 7, 8)])) >= 1
    assert len(faults([*fine, Told("a", 1, "duplicate", 7, 8, 1)])) == 1
    assert len(faults([*fine, Told("a", 1, "stale", 7, 8, 9)])) == 1


def test_connections_that_receive_from_one_queue_never_get_the_same_message():
    name = fresh("queue")

    async def take(found: list[int], inside: bool) -> None:
        async with PostgresDatabase(shared.postgres().url) as database, PostgresSource(database, name) as source:
            while True:
                if not inside:
                    deliveries = await source.receive(7, 0.0)
                else:
                    async with database.transaction() as connection:
                        queue = source.queue_in(connection)
                        deliveries = await queue.receive(7)
                        await queue.ack(deliveries)
                if not deliveries:
                    return
                found += (int(one.id) for one in deliveries)

    async def main() -> list[int]:
        found: list[list[int]] = [[] for _ in range(CONNECTIONS)]
        async with PostgresDatabase(shared.postgres().url) as database, PostgresSource(database, name) as source:
            await source.send([b"%d" % number for number in range(1000)])
            await asyncio.gather(*(take(mine, bool(number % 2)) for number, mine in enumerate(found)))
        return [number for mine in found for number in mine]

    everything = run(main(), limit_s=60)
    assert 1000 == len(everything) == len(set(everything))


def test_an_extension_does_not_wait_for_a_message_that_is_being_acked():
    """Two statements that wait for each other's rows would be a deadlock."""

    async def main() -> None:
        database = PostgresDatabase(shared.postgres().url)
        async with PostgresSource(database, fresh("queue"), 30.0) as source:
            await source.send([b"1", b"2", b"3"])
            deliveries = await source.receive(3, 0.0)
            async with database.transaction() as acking:
                await acking.execute("delete from keywise_held where id = $1", deliveries[1].id)
                assert await source.extend(deliveries, 3600.0) == [], "nobody else has one of them"
            rows = await database.read(_HIDDEN_FOR_S, [one.id for one in deliveries])
            assert [round(hidden_s / 600) for (hidden_s,) in rows] == [6, 6]

    run(main())


_HIDDEN_FOR_S = (
    "select visible_at - extract(epoch from clock_timestamp())::float8 from keywise_held where id = any($1::bigint[])"
)
