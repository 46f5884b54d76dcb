"""A change that only the commit would refuse is a failure of its own, and no outage: the others are written."""

import asyncio

import asyncpg
import pytest

import keywise
from adapters.postgres.benches import fresh
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.core import events
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import TransactionFailedError
from running import run
from servers import shared

pytestmark = [pytest.mark.server("postgres"), pytest.mark.timeout(240)]

QUICK = {"poll": "20ms", "backoff": "10ms", "backoff_max": "50ms", "attempts_max": 2}
TABLES = """
    create table shelf (name text primary key);
    insert into shelf values ('here');
    create table stock (key text primary key, version bigint, belongs_to text);
"""
FOREIGN_KEY = "alter table stock add foreign key (belongs_to) references shelf deferrable initially deferred"
TRIGGER = """
    create function check_shelf() returns trigger language plpgsql as $$ begin
        if not exists (select from shelf where name = new.belongs_to) then raise exception 'no such shelf'; end if;
        return null;
    end $$;
    create constraint trigger late after insert on stock deferrable initially deferred
        for each row execute function check_shelf();
"""
TREE = """
    create table stock (
        key text primary key, version bigint, belongs_to text references stock deferrable initially deferred
    )
"""
LOOK_S = 0.01


async def worked_off(tables: str, *messages: dict, source: str = "") -> tuple[list[str], list[events.Event]]:
    """Run a pipeline until every change is stored or a dead letter; return the stored keys, and the events."""
    url = shared.postgres().create_database(fresh("database"))
    beside = await asyncpg.connect(url)
    await beside.execute(tables)
    seen: list[events.Event] = []
    app = keywise.App(url, observers=[seen.append])
    pipeline = app.pipeline("shop", key="key", version="v", **QUICK)
    pipeline.source(source or url).sink(f"{url}?table=stock&columns=belongs_to")
    async with app:
        await app.send("shop", *messages)
        running = asyncio.create_task(app.run(handle_signals=False))
        letters = 0
        while await beside.fetchval("select count(*) from stock") + letters < len(messages) and not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            letters = sum(isinstance(event, events.DeadLettered) for event in seen)
        app.stop()
        await running
    stored = [key for (key,) in await beside.fetch("select key from stock order by key")]
    await beside.close()
    return stored, seen


@pytest.mark.parametrize(("constraint", "cause"), [(FOREIGN_KEY, "ForeignKeyViolation"), (TRIGGER, "no such shelf")])
@pytest.mark.parametrize("source", ["", "memory://"], ids=["queue transaction", "ledger transaction"])
def test_a_change_that_breaks_a_deferred_constraint_becomes_a_dead_letter_alone(constraint, cause, source):
    shelves = {"a": "here", "b": "here", "bad": "nowhere", "c": "here", "d": "here"}
    messages = [{"key": key, "v": 1, "belongs_to": shelf} for key, shelf in shelves.items()]
    stored, seen = run(worked_off(TABLES + constraint, *messages, source=source), limit_s=60)
    assert stored == ["a", "b", "c", "d"]
    [letter] = [event for event in seen if isinstance(event, events.DeadLettered)]
    assert (letter.key, cause in letter.cause) == ("bad", True)
    assert {event.key for event in seen if isinstance(event, events.Failed)} == {"bad"}
    assert [event for event in seen if isinstance(event, events.Unavailable)] == []


def test_changes_that_need_each_other_are_written_although_another_one_is_bad():
    """A part may come before the whole in one batch; if the batch has to be cut between them, the part comes again."""
    wholes = {"a1": "a2", "a2": None, "bad": "nothing", "z1": None, "z2": "z1"}
    messages = [{"key": key, "v": 1, "belongs_to": whole} for key, whole in wholes.items()]
    stored, _ = run(worked_off(TREE, *messages), limit_s=60)
    assert stored == ["a1", "a2", "z1", "z2"]


@pytest.mark.parametrize("kind", ["transaction", "marking_transaction"])
def test_a_commit_that_is_refused_all_the_same_is_repeated(kind):
    """Another program may remove the row between the check and the commit."""

    async def main() -> None:
        url = shared.postgres().create_database(fresh("database"))
        async with PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy()) as ledger:
            with pytest.raises(TransactionFailedError):
                async with getattr(ledger, kind)() as transaction:
                    await transaction.connection.execute(TABLES + FOREIGN_KEY)
                    await transaction.connection.execute("insert into stock values ('bad', 1, 'nowhere')")

    run(main())


def test_the_check_of_a_savepoint_leaves_a_constraint_deferred():
    """What comes after the check may still break it, so the commit checks again."""

    async def main() -> None:
        url = shared.postgres().create_database(fresh("database"))
        async with PostgresLedger(PostgresDatabase(url), "shop", LedgerPolicy()) as ledger:
            with pytest.raises(TransactionFailedError, match="no such shelf"):
                async with ledger.transaction() as transaction:
                    await transaction.decide([ChangeHeader("good", order_of(1))])
                    await transaction.connection.execute(TABLES + TRIGGER)
                    async with transaction.savepoint():
                        await transaction.connection.execute("insert into stock values ('good', 1, 'here')")
                    async with transaction.savepoint():
                        await transaction.connection.execute("insert into stock values ('first', 1, 'later')")
                        await transaction.connection.execute("insert into shelf values ('later')")
                    await transaction.connection.execute("delete from shelf")

    run(main())
