"""A touch raises the generation of a row, and nothing else of it: the row as it is starts its event again."""

from typing import Any

import pytest

from adapters.dynamodb.benches import created, rows, sink_of
from adapters.dynamodb.test_sink import applied, at, until_settled
from keywise.core.change import Change, Outcome
from keywise.core.sink import APPLIED, SUPERSEDED
from running import awaited
from servers import shared
from servers.dynamodb_faults import dynamodb_faults

pytestmark = pytest.mark.server("dynamodb")

TOUCH = {"touch": "reindexVersion"}


def keep(table: str, key: str, version: int, **more: Any) -> None:
    """Write a row as its owner does."""
    item = {"id": {"S": key}, "version": {"N": str(version)}, "text": {"S": "of the owner"}}
    shared.dynamodb().ask("PutItem", TableName=table, Item=item | more)


@awaited
async def test_a_touch_raises_the_generation_and_keeps_the_row():
    table = created()
    keep(table, "a", 5)
    async with sink_of(table, **TOUCH) as sink:
        assert await applied(sink, at("a", (0, 5, 456), text="of the run")) == [APPLIED]
        row = {"id": "a", "version": 5, "text": "of the owner", "reindexVersion": 456}
        assert rows(table) == {"a": row}
        assert await applied(sink, at("a", (0, 5, 456))) == [APPLIED], "a duplicate"
        assert await applied(sink, at("a", (0, 5, 455))) == [APPLIED], "an older run"
        assert await applied(sink, at("a", (0, 4, 455))) == [SUPERSEDED], "an older run at an older version"
        assert rows(table) == {"a": row}


@awaited
async def test_a_row_that_is_gone_stays_gone():
    table = created()
    keep(table, "deleted by keywise", 6, keywise_deleted={"BOOL": True})
    async with sink_of(table, **TOUCH) as sink:
        outcomes = await applied(sink, at("gone", (0, 5, 1)), at("deleted by keywise", (0, 6, 1)))
        assert outcomes == [SUPERSEDED, SUPERSEDED]
        assert await applied(sink, Change("never", (0, 5, 1), deleted=True)) == [APPLIED]
    assert rows(table).keys() == {"deleted by keywise"}


@awaited
async def test_a_newer_version_with_a_lower_generation_is_touched_too():
    table = created()
    keep(table, "a", 7, reindexVersion={"N": "1"})
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url, **TOUCH) as sink:
        assert await applied(sink, at("a", (0, 5, 2))) == [APPLIED]
        assert (rows(table)["a"]["version"], rows(table)["a"]["reindexVersion"]) == (7, 2)

        newer = iter(range(8, 100))
        proxy.before = lambda action, asked: keep(table, "a", next(newer)) if action == "UpdateItem" else None
        [result] = await applied(sink, at("a", (0, 7, 3)))
        assert result.outcome is Outcome.BUSY and "all the time" in result.cause
        proxy.before = lambda action, asked: None
        assert await applied(sink, at("a", (0, 7, 3))) == [APPLIED]
        assert rows(table)["a"]["reindexVersion"] == 3


@awaited
async def test_a_row_that_is_older_than_the_change_is_not_touched():
    table = created()
    keep(table, "a", 4)
    shared.dynamodb().ask("PutItem", TableName=table, Item={"id": {"S": "b"}})
    async with sink_of(table, **TOUCH) as sink:
        older, bare = await applied(sink, at("a", (0, 5, 1)), at("b", (0, 5, 1)))
    assert older.outcome is bare.outcome is Outcome.FAILED
    assert "4, which is older than 5" in older.cause and "no whole number" in bare.cause
    assert "reindexVersion" not in rows(table)["a"]


@awaited
async def test_a_live_change_is_put_as_ever():
    table = created()
    keep(table, "a", 5)
    async with sink_of(table, **TOUCH) as sink:
        assert await applied(sink, at("a", (0, 6, 0), text="live")) == [APPLIED]
        assert rows(table)["a"]["text"] == "live"


@awaited
async def test_throttled_touches_and_lost_answers_end_right():
    table = created()
    for number in range(100):
        keep(table, f"k{number}", 5)
    changes = [at(f"k{number}", (0, 5, 1)) for number in range(100)]
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url, **TOUCH) as sink:
        proxy.throttle_every, proxy.lose_every = 10, 11
        outcomes = await until_settled(sink, changes)
        assert proxy.throttled >= 10 and proxy.lost >= 9
    assert set(outcomes.values()) == {Outcome.APPLIED}
    assert {row["reindexVersion"] for row in rows(table).values()} == {1}
