"""What the sink on DynamoDB writes, and what it makes of refusals, throttling and lost answers."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from adapters.dynamodb.benches import created, fresh, rows, sink_of
from keywise.adapters.dynamodb.sink import DynamoSink
from keywise.core.change import VERSION_MIN, Change, Outcome, order_of
from keywise.core.entry import Certainty, Claim
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult
from keywise.testing.conformance.sinks import gone, put
from running import awaited
from servers import machine, shared
from servers.dynamodb_faults import dynamodb_faults

pytestmark = pytest.mark.server("dynamodb")


async def applied(sink: DynamoSink, *changes: Change, is_repair: bool = False) -> Sequence[SinkResult]:
    order = None if is_repair else 0
    claims = [Claim(one.key, one.order if order == 0 else None, one.deleted, 1) for one in changes]
    return await sink.apply(changes, claims)


async def until_settled(sink: DynamoSink, changes: Sequence[Change]) -> dict[str, Outcome]:
    """Apply changes until none of them is busy, as the flow does."""
    outcomes: dict[str, Outcome] = {}
    while left := [one for one in changes if one.key not in outcomes]:
        for change, result in zip(left, await applied(sink, *left), strict=True):
            if result.outcome is not Outcome.BUSY:
                outcomes[change.key] = result.outcome
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)
    return outcomes


def at(key: str, order: tuple[int, int, int], /, **fields: Any) -> Change:
    return Change(key, order, body=msgspec.json.encode({"text": "", **fields}))


def versions(table: str) -> dict[str, int]:
    return {key: row["version"] for key, row in rows(table).items() if "keywise_deleted" not in row}


@awaited
async def test_every_order_of_arrival_ends_with_the_newest_state():
    table = created()
    async with sink_of(table) as sink:
        for number, changes in enumerate(itertools.permutations([(1, put), (2, put), (3, gone), (4, put)])):
            for version, make in changes:
                await applied(sink, make(f"put {number}", version))
                if version < 4:
                    await applied(sink, make(f"gone {number}", version))
    held = rows(table)
    assert len(held) == 48
    assert all(row["version"] == 4 for key, row in held.items() if key.startswith("put"))
    assert all(row["keywise_deleted"] and row["version"] == 3 for key, row in held.items() if key.startswith("gone"))


@awaited
async def test_attributes_may_have_any_name():
    server, table = shared.dynamodb(), fresh("table")
    server.create_table(table, key="key")
    names = {"key": "key", "version": "size", "generation": "shard", "tombstone": "delete"}
    async with sink_of(table, **names) as sink:
        body = {"order": 1, "a.b": 2, "#version": 3, ":version": 4, "date": None}
        assert await applied(sink, at("k", (0, 5, 0), **body)) == [APPLIED]
        assert await applied(sink, at("k", (0, 5, 0), **body)) == [APPLIED]
        assert await applied(sink, at("k", (0, 4, 9), **body)) == [SUPERSEDED]
        found = (await sink.read(["k", "none"]))["k"]
        assert (found.version, found.body) == (5, {"text": "", **body})
        assert await applied(sink, gone("k", 6)) == [APPLIED]
        assert await sink.read(["k"]) == {}


@awaited
async def test_one_bad_change_does_not_affect_the_others():
    table = created()
    async with sink_of(table) as sink:
        large, deep, empty, good = await applied(
            sink,
            at("large", (0, 1, 0), text="x" * 410_000),
            Change("deep", order_of(1), body=b'{"a":%b%b}' % (b"[" * 40, b"]" * 40)),
            Change("array", order_of(1), body=b"[]"),
            put("good", 1),
        )
        assert good == APPLIED
        for result in (large, deep, empty):
            assert result.outcome is Outcome.FAILED and result.permanent, result
        assert "size has exceeded" in large.cause and "no JSON object" in empty.cause
    assert versions(table) == {"good": 1}


@awaited
async def test_a_generation_comes_after_the_version():
    table = created()
    async with sink_of(table, generation="reindexVersion") as sink:
        assert await applied(sink, at("k", (0, 5, 0), text="live")) == [APPLIED]
        assert await applied(sink, at("k", (0, 5, 2), text="again")) == [APPLIED]
        assert await applied(sink, at("k", (0, 5, 2), text="repeated")) == [APPLIED]
        assert await applied(sink, at("k", (0, 5, 1), text="older run")) == [SUPERSEDED]
        assert rows(table)["k"]["text"] == "again"
        assert await applied(sink, at("k", (0, 5, 2), text="repaired"), is_repair=True) == [APPLIED]
        assert rows(table)["k"]["text"] == "repaired"
        assert await applied(sink, at("k", (0, 5, 1), text="at the mark"), is_repair=True) == [APPLIED]
        assert (rows(table)["k"]["text"], rows(table)["k"]["reindexVersion"]) == ("at the mark", 1)
        assert await applied(sink, at("k", (0, 6, 0), text="live")) == [APPLIED]
        assert await applied(sink, at("k", (0, 5, 9), text="late row")) == [SUPERSEDED]
        assert (rows(table)["k"]["text"], rows(table)["k"]["reindexVersion"]) == ("live", 0)


@awaited
async def test_an_item_of_another_program_is_replaced_if_it_has_no_version_and_kept_if_it_has_text():
    server, table = shared.dynamodb(), created()
    server.ask("PutItem", TableName=table, Item={"id": {"S": "bare"}, "old": {"S": "x"}})
    server.ask("PutItem", TableName=table, Item={"id": {"S": "text"}, "version": {"S": "7"}})
    async with sink_of(table) as sink:
        bare, text = await applied(sink, put("bare", 1), put("text", 8))
        assert bare == APPLIED and "old" not in rows(table)["bare"]
        assert text.permanent and "no whole number in version" in text.cause


@awaited
async def test_an_operator_removes_a_key_that_the_ledger_does_not_know():
    table = created()
    async with sink_of(table) as sink:
        await applied(sink, put("a", 7))
        removal = Change("a", (0, VERSION_MIN, 0), deleted=True)
        assert await applied(sink, removal) == [APPLIED]
        assert rows(table) == {}
        assert await applied(sink, removal) == [APPLIED]
        assert await applied(sink, put("a", 7)) == [APPLIED], "upstream sends it again"


@awaited
async def test_a_removal_does_not_take_a_version_that_has_just_arrived():
    server, table = shared.dynamodb(), created()
    async with dynamodb_faults(server.url) as proxy, sink_of(table, proxy.url) as sink:
        await applied(sink, put("a", 7))

        def overtake(action: str, asked: dict[str, Any]) -> None:
            if action == "DeleteItem":
                server.ask("PutItem", TableName=table, Item={"id": {"S": "a"}, "version": {"N": "8"}})

        proxy.before = overtake
        [result] = await applied(sink, Change("a", (0, VERSION_MIN, 0), deleted=True))
        assert result.outcome is Outcome.BUSY
    assert versions(table) == {"a": 8}


# Throttling and lost answers.


@awaited
async def test_throttled_changes_are_busy_and_all_end_applied():
    table, changes = created(), [put(f"k{number}", 1) for number in range(300)]
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url) as sink:
        proxy.throttle_every = 20
        outcomes = await until_settled(sink, changes)
        assert proxy.throttled >= 15
    assert set(outcomes.values()) == {Outcome.APPLIED}
    assert len(versions(table)) == 300


@awaited
async def test_the_sink_halves_its_requests_when_it_is_throttled_and_adds_one_at_a_time():
    table = created()
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url, requests="16") as sink:
        limit = sink._slots.adaptive_limit
        await applied(sink, *(put(f"a{number}", 1) for number in range(32)))
        assert proxy.side_by_side <= 16 and limit.limit == 16
        refused = iter(range(3))
        proxy.judge = lambda action, asked: (400, "ThrottlingException") if next(refused, None) is not None else None
        [result] = await applied(sink, put("b", 1))
        assert (result.outcome, result.certainty, limit.limit) == (Outcome.BUSY, Certainty.CLEAN, 8)
        assert "words of the service (Throttling)" in result.cause
        await until_settled(sink, [put("b", 1)])
        assert limit.limit in (2, 3), "halved twice more, and perhaps one more again"
        proxy.side_by_side, before = 0, limit.limit
        await applied(sink, *(put(f"c{number}", 1) for number in range(20)))
        assert before < limit.limit < 16 and proxy.side_by_side <= limit.limit


@awaited
async def test_a_write_whose_answer_was_lost_counts_as_applied_when_it_is_repeated():
    table = created()
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url) as sink:
        proxy.lose_every = 1
        [result] = await applied(sink, put("a", 5, "first"))
        assert (result.outcome, result.certainty) == (Outcome.BUSY, Certainty.UNKNOWN)
        assert proxy.lost == 2, "it was repeated once"
        proxy.lose_every = 0
        assert await applied(sink, put("a", 5, "first")) == [APPLIED]
        assert await applied(sink, put("a", 4, "old")) == [SUPERSEDED]
    assert rows(table)["a"]["text"] == "first"


@awaited
async def test_lost_answers_and_throttling_end_right():
    table = created()
    changes = [put(f"k{number}", 2) if number % 3 else gone(f"k{number}", 2) for number in range(200)]
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url) as sink:
        proxy.throttle_every, proxy.lose_every = 20, 10
        outcomes = await until_settled(sink, changes)
        assert proxy.lost >= 10 and proxy.throttled >= 10
        assert set(outcomes.values()) == {Outcome.APPLIED}
        late = await until_settled(sink, [put(f"k{number}", 1) for number in range(200)])
        assert set(late.values()) == {Outcome.SUPERSEDED}
    assert versions(table) == {f"k{number}": 2 for number in range(200) if number % 3}


@awaited
async def test_a_table_that_vanishes_is_waited_for():
    server, table = shared.dynamodb(), created()
    async with sink_of(table) as sink:
        assert await applied(sink, put("a", 1)) == [APPLIED]
        server.ask("DeleteTable", TableName=table)
        [result] = await applied(sink, put("b", 1))
        assert (result.outcome, result.certainty) == (Outcome.BUSY, Certainty.CLEAN)
        assert "create the table" in result.cause
        server.create_table(table)
        assert await until_settled(sink, [put("b", 1)]) == {"b": Outcome.APPLIED}


@awaited
async def test_a_table_that_gets_another_key_makes_no_dead_letters():
    server, table = shared.dynamodb(), created()
    async with sink_of(table) as sink:
        assert await applied(sink, put("a", 1)) == [APPLIED]
        server.ask("DeleteTable", TableName=table)
        server.create_table(table, key="other")
        for _ in range(2):
            [result] = await applied(sink, put("b", 1))
            assert result.outcome is Outcome.BUSY and "or write key=other in the URL" in result.cause, result


@awaited
async def test_a_service_that_is_away_stops_no_start_and_costs_no_attempt():
    async with sink_of("pages", f"http://127.0.0.1:{machine.free_port()}") as sink:
        for _ in range(2):
            [result] = await applied(sink, put("a", 1))
            assert (result.outcome, result.certainty, result.wait_s) == (Outcome.BUSY, Certainty.CLEAN, None)


@awaited
async def test_a_cancelled_call_leaves_its_slots():
    table = created()
    async with dynamodb_faults(shared.dynamodb().url) as proxy, sink_of(table, proxy.url, requests="2") as sink:
        proxy.hangs = True
        call = asyncio.create_task(applied(sink, *(put(f"a{number}", 1) for number in range(10))))
        while proxy.hanging < 2:
            await asyncio.wait([call], timeout=0.01)
        call.cancel()
        await asyncio.wait([call])
        proxy.hangs = False
        assert await applied(sink, put("b", 1), put("c", 1), put("d", 1)) == [APPLIED] * 3
    assert versions(table) == {"b": 1, "c": 1, "d": 1}
