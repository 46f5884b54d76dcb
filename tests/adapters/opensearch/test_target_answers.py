"""Indexes that an alias can stand for, before an engine that answers as engines do on their worst days."""

from contextlib import asynccontextmanager
from typing import Any

import pytest

from adapters.opensearch.stub_engine import Said, stub_engine
from keywise.adapters.opensearch.sink import connect
from keywise.core.errors import AdminError, DatabaseError, UnavailableError
from keywise.core.target import TargetNote
from keywise.core.url import Address
from running import awaited

NOTE = TargetNote("shop", 7)
ALIAS = Said(200, {"pages-0": {"aliases": {"pages": {}}}})
DONE = Said(200, {"acknowledged": True})


def own(status: int, kind: str, reason: str = "no") -> Said:
    """A refusal in the engine's own words."""
    return Said(status, {"error": {"type": kind, "reason": reason}, "status": status})


MISSING = own(404, "index_not_found_exception", "no such index")
NO_ALIAS = own(404, "aliases_not_found_exception", "aliases [pages-epoch-0] missing")


def index(*aliases: str, note: bool = True, restore: dict[str, Any] | None = None, **settings: str) -> Said:
    """An index that a run has built."""
    kept = {"pipeline": "shop", "generation": 7, "restore": restore or {}}
    meta = {"_meta": {"keywise": kept}} if note else {}
    flat = {"index.number_of_shards": "1", "index.number_of_replicas": "0"}
    flat |= {f"index.{name}": value for name, value in settings.items()}
    return Said(200, {"pages-7": {"aliases": {one: {} for one in aliases}, "mappings": meta, "settings": flat}})


def health(status: str, active: int, nodes: int, code: int = 200) -> Said:
    return Said(code, {"status": status, "active_shards": active, "number_of_data_nodes": nodes})


REFRESHED = Said(200, {"_shards": {"total": 2, "successful": 2, "failed": 0}})


@asynccontextmanager
async def opened(*answers: Said):
    """A sink that knows its alias, and the engine, which says these things next."""
    async with (
        stub_engine(ALIAS, *answers) as engine,
        connect(Address(engine.url, "shop", {})) as sink,
    ):
        yield sink, engine


CALLS = {
    "current": lambda sink: sink.current_target(),
    "create": lambda sink: sink.create_target("pages-7", NOTE, 0, None),
    "finish": lambda sink: sink.finish_target("pages-7"),
    "count": lambda sink: sink.count("pages-7"),
    "targets": lambda sink: sink.targets("shop"),
    "drop": lambda sink: sink.drop_target("pages-7"),
    "move": lambda sink: sink.move_name("pages-0", "pages-7", 0),
}
REFUSALS = [
    (own(403, "security_exception"), DatabaseError),
    (Said(401), DatabaseError),
    (Said(404), DatabaseError),
    (Said(405), DatabaseError),
    (Said(429), UnavailableError),
    (own(503, "process_cluster_event_timeout_exception"), UnavailableError),
    (Said(502, b"<html>"), UnavailableError),
    (Said(None), UnavailableError),
    (Said(200, b"<html>"), UnavailableError),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("answer", "error"), REFUSALS)
@awaited
async def test_a_refusal_of_the_first_request_is_an_error_of_the_adapter(call, answer, error):
    async with opened(answer) as (sink, engine):
        with pytest.raises(error):
            await CALLS[call](sink)
        assert len(engine.heard) == 2


LATER = {
    "create: the guards": ("create", [ALIAS, MISSING]),
    "create: the live one": ("create", [ALIAS, MISSING, NO_ALIAS]),
    "create: the index": ("create", [ALIAS, MISSING, NO_ALIAS, Said(200, {"pages-0": {}})]),
    "finish: the settings": ("finish", [index(restore={"index.refresh_interval": "1s"})]),
    "finish: the mapping": ("finish", [index(restore={"index.refresh_interval": "1s"}), DONE]),
    "finish: the refresh": ("finish", [index()]),
    "finish: the health": ("finish", [index(), REFRESHED]),
    "count: the refresh": ("count", [index()]),
    "count: the count": ("count", [index(), REFRESHED]),
    "drop: the guards": ("drop", [index("pages-epoch-1")]),
    "drop: the index": ("drop", [index("pages-epoch-1"), DONE]),
    "move: the aliases": ("move", [ALIAS]),
}


@pytest.mark.parametrize("stage", LATER)
@pytest.mark.parametrize(("answer", "error"), REFUSALS)
@awaited
async def test_so_is_a_refusal_of_each_later_one(stage, answer, error):
    call, answers = LATER[stage]
    async with opened(*answers, answer) as (sink, _):
        with pytest.raises(error):
            await CALLS[call](sink)


@pytest.mark.parametrize("stage", ["create: the index", "finish: the settings", "drop: the index", "move: the aliases"])
@awaited
async def test_a_change_that_not_all_nodes_have_acknowledged_is_not_certain(stage):
    call, answers = LATER[stage]
    async with opened(*answers, Said(200, {"acknowledged": False})) as (sink, _):
        with pytest.raises(UnavailableError, match="not all nodes have acknowledged"):
            await CALLS[call](sink)


@pytest.mark.parametrize(
    "answer",
    [
        own(400, "x_content_parse_exception", "[remove] unknown field [must_exist]"),
        Said(200, {"acknowledged": True}),
    ],
    ids=["unknown", "ignored"],
)
@awaited
async def test_an_engine_that_cannot_refuse_a_late_call_is_refused_before_the_build(answer):
    async with opened(ALIAS, MISSING, answer) as (sink, engine):
        with pytest.raises(AdminError, match=r"does not know must_exist.*use OpenSearch 2.12"):
            await sink.create_target("pages-7", NOTE, 0, None)
        assert engine.paths()[-1] == "/_aliases"


@awaited
async def test_a_request_that_the_engine_fails_at_is_quoted():
    """What it says of a mapping that it cannot even read has the status 500."""
    creation = own(500, "class_cast_exception", "Integer cannot be cast to Map")
    async with opened(ALIAS, MISSING, NO_ALIAS, creation) as (sink, _):
        with pytest.raises(AdminError, match=r"pages-7 was not created: .*cannot be cast to Map"):
            await sink.create_target("pages-7", NOTE, 0, b"{}")


# Whether it can serve.


@pytest.mark.parametrize(
    ("replicas", "answers"),
    [
        ("0", [health("green", 1, 3)]),
        ("1", [health("green", 2, 3)]),
        ("1", [health("yellow", 1, 1)]),
        ("2", [health("yellow", 2, 2)]),
        ("2", [health("yellow", 1, 3), health("green", 3, 3)]),
    ],
    ids=["no replicas", "green", "one node", "as many as fit", "after a while"],
)
@awaited
async def test_an_index_can_serve_with_all_copies_for_which_there_are_nodes(replicas, answers):
    async with opened(index("pages-epoch-0", number_of_replicas=replicas), REFRESHED, *answers) as (sink, _):
        assert await sink.finish_target("pages-7") == []


@pytest.mark.parametrize(
    ("replicas", "said", "reason"),
    [
        ("0", health("red", 0, 1, 408), "pages-7 is red: 0 of 1 copies of its shards are active, on 1 data nodes"),
        (
            "1",
            health("yellow", 1, 2, 408),
            "pages-7 is yellow: 1 of 2 copies of its shards are active, on 2 data nodes",
        ),
        (
            "5",
            health("yellow", 2, 3, 408),
            "pages-7 is yellow: 2 of 3 copies of its shards are active, on 3 data nodes",
        ),
    ],
)
@awaited
async def test_an_index_that_waits_for_copies_says_so(replicas, said, reason):
    async with opened(index("pages-epoch-0", number_of_replicas=replicas), REFRESHED, said, said) as (sink, engine):
        [told] = await sink.finish_target("pages-7")
        assert told == f"{reason}; GET /_cluster/allocation/explain says why"
        wanted = min(int(replicas) + 1, int(reason.split(", on ")[1][0]))
        assert f"wait_for_active_shards={wanted}&timeout=" in engine.heard[-1].path


@awaited
async def test_shards_that_are_not_refreshed_are_told_and_not_counted():
    failed = Said(200, {"_shards": {"total": 2, "successful": 1, "failed": 1}})
    async with opened(index("pages"), failed, health("green", 1, 1)) as (sink, _):
        assert await sink.finish_target("pages-7") == ["1 shards of pages-7 could not be refreshed"]
    async with opened(index("pages"), failed) as (sink, _):
        with pytest.raises(UnavailableError, match="could not be refreshed"):
            await sink.count("pages-7")
    counted = Said(200, {"count": 5, "_shards": {"failed": 1}})
    async with opened(index("pages"), REFRESHED, counted) as (sink, _):
        with pytest.raises(UnavailableError, match="1 shards of pages-7 could not be counted"):
            await sink.count("pages-7")


# Others act at the same time.


@pytest.mark.parametrize("refusal", [NO_ALIAS, own(400, "illegal_argument_exception", "required alias [x] is missing")])
@awaited
async def test_a_move_that_another_process_has_made_has_succeeded(refusal):
    moved = Said(200, {"pages-7": {"aliases": {"pages": {}}}})
    async with opened(ALIAS, refusal, moved) as (sink, _):
        await sink.move_name("pages-0", "pages-7", 0)
    async with opened(ALIAS, refusal, ALIAS) as (sink, _):
        with pytest.raises(AdminError, match=r"was not moved from pages-0 to pages-7: .*needs the alias pages-epoch-0"):
            await sink.move_name("pages-0", "pages-7", 0)


@awaited
async def test_an_index_that_is_moved_to_while_it_is_dropped_stays():
    async with opened(index("pages-epoch-1"), NO_ALIAS) as (sink, engine):
        with pytest.raises(AdminError, match="was not deleted, because its aliases have changed"):
            await sink.drop_target("pages-7")
        assert [one.method for one in engine.heard] == ["GET", "GET", "POST"]


@awaited
async def test_an_index_that_another_process_drops_is_dropped():
    async with opened(index("pages-epoch-1"), DONE, MISSING) as (sink, _):
        await sink.drop_target("pages-7")
