"""The sink for OpenSearch, before an engine that answers as engines do on their worst days."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from adapters.opensearch.stub_engine import INDEX, WELL, Said, documents, items, lines_of, stub_engine, trouble
from keywise.adapters.opensearch import sink as opensearch
from keywise.adapters.opensearch.sink import OpenSearchSink, connect
from keywise.core.change import Change, Outcome, order_of
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AddressError, DatabaseError, UnavailableError
from keywise.core.sink import APPLIED, SUPERSEDED
from keywise.core.url import Address
from running import awaited
from servers.machine import free_port


def own(status: int) -> Said:
    """An error in the engine's own words."""
    return Said(status, {"error": {"type": "x_exception", "reason": "no"}, "status": status})


BLOCKED = trouble(429, "rejected_execution_exception", "the queue is full")


def at(url: str) -> OpenSearchSink:
    return connect(Address(url, "pipeline", {}))


@asynccontextmanager
async def opened(*answers: Said, options: str = ""):
    """A sink whose index is known, and its engine, which says these things next."""
    async with stub_engine(INDEX, *answers) as engine, at(engine.url + options) as sink:
        yield sink, engine


async def applied(sink: OpenSearchSink, *keys: str, version: int = 5, deleted: bool = False) -> list:
    changes = [Change(key, order_of(version), deleted, body=b'{"a":1}') for key in keys]
    return list(await sink.apply(changes, [Claim(one.key, one.order, one.deleted, 1) for one in changes]))


async def insisted(sink: OpenSearchSink, *keys: str) -> list:
    """Once the engine may be asked again."""
    while sink._adaptive_limit.wait_s > 0:
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)
    return await applied(sink, *keys)


# The index.


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Said(404), "has no index pages; make one"),
        (Said(401), "check user and password"),
        (Said(405), "is this the address of OpenSearch"),
        (Said(200, {"one": {"aliases": {"pages": {}}}, "two": {"aliases": {"pages": {}}}}), "stands for one, two"),
        (Said(200, {".ds-pages-1": {"aliases": {}}}), "neither an index nor an alias"),
        (Said(200, {}), "stands for none"),
    ],
)
@awaited
async def test_an_index_that_cannot_be_used_is_told_at_once(answer, told):
    async with stub_engine(answer) as engine:
        with pytest.raises(DatabaseError, match=told):
            async with at(engine.url):
                pass


@pytest.mark.parametrize("answer", [Said(503), Said(429), Said(None), Said(200, b"<html>")])
@awaited
async def test_an_engine_that_is_away_is_looked_for_before_the_first_write(answer):
    async with stub_engine(answer, INDEX, items(WELL)) as engine, at(engine.url) as sink:
        assert await applied(sink, "a") == [APPLIED]
        assert engine.paths() == ["/pages/_alias", "/pages/_alias", "/pages/_bulk"]


@awaited
async def test_an_index_that_is_missing_when_the_engine_is_back_holds_changes():
    async with stub_engine(Said(503), Said(404), INDEX, items(WELL)) as engine, at(engine.url) as sink:
        [result] = await applied(sink, "a")
        assert result.outcome is Outcome.BUSY and "has no index pages" in result.cause
        assert await insisted(sink, "a") == [APPLIED]


@awaited
async def test_who_may_not_ask_for_the_index_may_write():
    async with stub_engine(Said(403), items(WELL)) as engine, at(engine.url) as sink:
        assert await applied(sink, "a") == [APPLIED]


@awaited
async def test_an_alias_must_go_on_to_exist():
    async with stub_engine(Said(200, {"pages-1": {"aliases": {"pages": {}}}}), items(WELL)) as engine:
        async with at(engine.url) as sink:
            await applied(sink, "a")
        assert "&require_alias=true" in engine.heard[-1].path


@awaited
async def test_nobody_listens():
    async with at(f"opensearch://127.0.0.1:{free_port()}/pages") as sink:
        [result] = await applied(sink, "a")
        assert result.outcome is Outcome.BUSY
        with pytest.raises(UnavailableError):
            await sink.read(["a"])


# Whole requests.


@pytest.mark.parametrize(
    ("answer", "outcome", "certainty"),
    [
        (Said(403, {"error": {"type": "security_exception"}}), Outcome.BUSY, Certainty.CLEAN),
        (own(503), Outcome.BUSY, Certainty.CLEAN),
        (own(500), Outcome.FAILED, Certainty.ENDED),
        (Said(502), Outcome.BUSY, Certainty.UNKNOWN),
        (Said(None), Outcome.FAILED, Certainty.UNKNOWN),
        (Said(200, b"<html>"), Outcome.FAILED, Certainty.UNKNOWN),
        (items(BLOCKED), Outcome.FAILED, Certainty.UNKNOWN),
    ],
    ids=["forbidden", "away", "broken", "gateway", "cut off", "no JSON", "fewer answers than changes"],
)
@awaited
async def test_a_request_that_fails_fails_for_all_its_changes(answer, outcome, certainty):
    async with opened(answer) as (sink, _):
        results = await applied(sink, "a", "b")
        assert [(one.outcome, one.certainty, one.permanent) for one in results] == [(outcome, certainty, False)] * 2
        assert results[0].cause


@pytest.mark.parametrize("text", [b'{"error": "%b"}', b"<p>%b</p>"], ids=["JSON", "a page"])
@awaited
async def test_what_a_gateway_says_is_told_on_a_short_line_without_secrets(text):
    """Some repeat what they were shown."""
    answer = Said(403, text % b"not for user:hunter2-hunter2, Basic dXNlcjpodW50ZXIyLWh1bnRlcjI= \x1b[31m" + b"x" * 500)
    shown = "://user:hunter2-hunter2@"
    async with (
        stub_engine(INDEX, answer, answer) as engine,
        at(engine.url.replace("://", shown)) as sink,
    ):
        [result] = await applied(sink, "a")
        with pytest.raises(DatabaseError) as refused:
            await sink.read(["a"])
    for cause in (result.cause, str(refused.value)):
        assert "not for user:***, Basic ***" in cause and len(cause) < 350
        assert "hunter2" not in cause and "dXNl" not in cause and cause.isprintable()


@pytest.mark.parametrize("status", [400, 413])
@awaited
async def test_a_bad_change_does_not_take_its_request_with_it(status):
    async with opened(Said(status), items(WELL), Said(status), Said(status), items(WELL)) as (sink, engine):
        a, b, bad, d = await applied(sink, "a", "b", "bad", "d")
        assert [a, b, d] == [APPLIED] * 3
        assert bad.permanent and bad.certainty is Certainty.CLEAN and f"status {status}" in bad.cause
        sent = [[line["index"]["_id"] for line in lines_of(one.body)[::2]] for one in engine.heard[1:]]
        assert sent == [["a", "b", "bad", "d"], ["a", "b"], ["bad", "d"], ["bad"], ["d"]]


@awaited
async def test_what_was_too_large_once_is_not_tried_again():
    async with opened(Said(413), items(WELL), items(WELL), items(WELL), items(WELL)) as (sink, engine):
        await applied(sink, "a", "b")
        assert await applied(sink, "a", "b") == [APPLIED] * 2
        assert len(engine.heard) == 1 + 3 + 2


@awaited
async def test_requests_are_as_large_as_the_url_says():
    async with opened(items(WELL, WELL), items(WELL), options="?batch_max=2") as (sink, _):
        assert await applied(sink, "a", "b", "c") == [APPLIED] * 3
        assert sink.batch_max == 2
    async with opened(items(WELL), items(WELL), options="?request_max_bytes=10") as (sink, _):
        assert await applied(sink, "a", "b") == [APPLIED] * 2


# Pressure.


@awaited
async def test_after_too_many_requests_it_is_left_alone_for_as_long_as_it_says():
    async with opened(Said(429, headers={"Retry-After": "300"}), options="?batch_max=2") as (sink, engine):
        results = await applied(sink, "a", "b", "c")
        assert {one.outcome for one in results} == {Outcome.BUSY}
        assert {one.outcome for one in await applied(sink, "d")} == {Outcome.BUSY}
        assert len(engine.heard) == 2, "neither the rest nor another call asks again"
        assert sink._adaptive_limit.wait_s > 200 and sink._adaptive_limit.limit == 1


@awaited
async def test_after_a_while_it_is_asked_again():
    async with opened(Said(429), items(WELL)) as (sink, _):
        assert [one.outcome for one in await applied(sink, "a")] == [Outcome.BUSY]
        assert await insisted(sink, "a") == [APPLIED]


@awaited
async def test_some_of_a_request_may_be_too_much():
    async with opened(items(WELL, BLOCKED), items(trouble(503, "unavailable_shards_exception"))) as (sink, _):
        well, busy = await applied(sink, "a", "b")
        assert well is APPLIED and busy.outcome is Outcome.BUSY
        assert sink._adaptive_limit.limit == 250
        [away] = await insisted(sink, "b")
        assert away.outcome is Outcome.BUSY and sink._adaptive_limit.limit == 250, "fewer at once would not help"


# Conflicts.


@awaited
async def test_a_conflict_is_superseded_or_was_applied_before():
    newer = trouble(409, "x", "[a]: version conflict, current version [9] is higher or equal to the one provided [5]")
    equal = trouble(409, "x", "[b]: version conflict, current version [5] is higher or equal to the one provided [5]")
    held = documents({"_id": "b", "found": True, "_version": 5})
    async with opened(items(newer, equal, WELL), held) as (sink, engine):
        assert await applied(sink, "a", "b", "c") == [SUPERSEDED, APPLIED, APPLIED]
        assert engine.heard[-1].body == b'{"ids":["b"]}' and engine.heard[-1].path == "/pages/_mget?_source=false"


@pytest.mark.parametrize(
    "answer",
    [
        Said(503),
        Said(404),
        Said(None),
        Said(200, b"<html>"),
        documents({"_id": "b", "error": {"type": "no_shard_available_action_exception"}}),
    ],
)
@awaited
async def test_a_conflict_that_cannot_be_looked_into_waits(answer):
    async with opened(items(WELL, trouble(409, "x", "in other words")), answer) as (sink, _):
        well, waits = await applied(sink, "a", "b")
        assert well is APPLIED and waits.outcome is Outcome.BUSY and waits.cause


LOWER = trouble(409, "x", "[a]: version conflict, current version [3] is higher or equal to the one provided [5]")
UNCLEAR = trouble(409, "x", "in other words")


@pytest.mark.parametrize(
    ("conflict", "held", "deleted"),
    [
        (UNCLEAR, {"found": True, "_version": 4}, False),
        (UNCLEAR, {"found": True, "_version": 4}, True),
        (UNCLEAR, {"found": False}, False),
        (LOWER, {"found": True, "_version": 3}, False),
        (LOWER, {"found": True, "_version": 3}, True),
        (LOWER, {"found": False}, False),
        (LOWER, {"found": False}, True),
    ],
)
@awaited
async def test_a_conflict_that_what_is_read_contradicts_waits_and_is_looked_into_again(conflict, held, deleted):
    """Nothing at or above this version is known to be there, so it must not count as done."""
    async with opened(items(conflict), documents({"_id": "a", **held}), items(WELL)) as (sink, _):
        [waits] = await applied(sink, "a", deleted=deleted)
        assert waits.outcome is Outcome.BUSY and waits.cause
        assert await insisted(sink, "a") == [APPLIED]


@awaited
async def test_a_deletion_is_done_if_the_engine_refuses_it_and_nothing_is_there():
    """It remembers a removal at this version or a higher one, in words that nobody knows."""
    async with opened(items(UNCLEAR), documents({"_id": "a", "found": False})) as (sink, _):
        assert await applied(sink, "a", deleted=True) == [APPLIED]


# Reading.


@awaited
async def test_what_does_not_fit_into_an_answer_is_asked_for_by_halves(monkeypatch):
    monkeypatch.setattr(opensearch, "ANSWER_MAX_BYTES", 100)
    one, two = ({"_id": key, "found": True, "_version": 1, "_source": {"a": key * 20}} for key in "ab")
    async with opened(documents(one, two), documents(one), documents(two)) as (sink, _):
        assert list(await sink.read(["a", "b"])) == ["a", "b"]


@awaited
async def test_an_index_that_keeps_no_bodies_can_tell_versions():
    async with opened(documents({"_id": "a", "found": True, "_version": 3}, {"_id": "b", "found": False})) as (sink, _):
        found = await sink.read(["a", "b"])
        assert list(found) == ["a"] and found["a"].version == 3 and found["a"].body == {}


# The URL.


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("opensearch://localhost/pages?batch_max=0", "batch_max=0 must be a whole number above zero"),
        ("opensearch://localhost/pages?request_max_bytes=1e6", "must be a whole number"),
        ("opensearch://localhost/pages?timeout=0s", "timeout=0s must be above zero"),
        ("opensearch://localhost/pages?bacth_max=5", "did you mean batch_max"),
        ("elasticsearch://localhost", "names no index; write for example elasticsearch://localhost:9200/pages"),
    ],
)
def test_a_url_that_says_something_wrong_is_refused(url, told):
    with pytest.raises(AddressError, match=told):
        at(url)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("opensearch://localhost/pages", "http://localhost:9200"),
        ("opensearchs://user:secret@localhost/pages", "https://localhost:9200"),
        ("elasticsearch://localhost:9201/pages", "http://localhost:9201"),
        ("elasticsearchs://localhost:443/pages", "https://localhost:443"),
    ],
)
def test_four_schemes_name_two_engines_with_and_without_encryption(url, origin):
    assert at(url)._engine.server.origin == origin
