"""Indexes that an alias can stand for, on a real OpenSearch: built beside, swapped, left, and dropped."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from keywise.adapters.opensearch.sink import OpenSearchSink, connect
from keywise.core.change import Change, Outcome, order_of
from keywise.core.entry import Claim
from keywise.core.errors import AdminError, DatabaseError, UnavailableError
from keywise.core.sink import APPLIED
from keywise.core.target import AliasSink, TargetNote
from keywise.core.url import Address
from running import awaited
from servers import shared
from servers.fault_proxy import fault_proxy

pytestmark = pytest.mark.server("opensearch")

NOTE = TargetNote("shop", 7)
_numbers = itertools.count(1)


@dataclass
class Shelf:
    """An alias that no other test uses, and a sink that writes to it."""

    name: str
    sink: OpenSearchSink

    @property
    def old(self) -> str:
        return f"{self.name}-0"

    @property
    def new(self) -> str:
        return f"{self.name}-7"

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        return await asyncio.to_thread(shared.opensearch().ask, method, path, body)

    async def built(self, definition: object = None) -> dict[str, Any]:
        """Create the new index; what the engine says of it."""
        encoded = None if definition is None else json.dumps(definition).encode()
        await self.sink.create_target(self.new, NOTE, 0, encoded)
        return await self.described(self.new)

    async def described(self, index: str) -> dict[str, Any]:
        return (await self.ask("GET", f"/{index}?flat_settings=true"))[index]

    async def aliases(self) -> dict[str, list[str]]:
        """The aliases of each index."""
        found = await self.ask("GET", f"/{self.name}-*/_alias")
        return {index: sorted(one["aliases"]) for index, one in found.items()}

    async def refused(self, call, *words: str) -> str:
        """What the operator reads."""
        with pytest.raises(AdminError) as error:
            await call
        for one in words:
            assert one in str(error.value)
        return str(error.value)


@asynccontextmanager
async def shelf(options: str = "", port: int = 0, **index: object) -> AsyncIterator[Shelf]:
    server, name = shared.opensearch(), f"shelf_{next(_numbers)}"
    defaults = {"settings": {"number_of_replicas": 0}, "aliases": {name: {}}}
    await asyncio.to_thread(server.ask, "PUT", f"/{name}-0", defaults | index)
    url = f"opensearch://127.0.0.1:{port or server.port}/{name}{options}"
    try:
        async with sink_at(url) as sink:
            yield Shelf(name, sink)
    finally:
        await asyncio.to_thread(server.ask, "DELETE", f"/{name}*")


def sink_at(url: str) -> OpenSearchSink:
    return connect(Address(url, "shop", {}))


async def applied(sink: OpenSearchSink, *keys: str, version: int = 1) -> list:
    changes = [Change(key, order_of(version), body=b'{"a":1}') for key in keys]
    return list(await sink.apply(changes, [Claim(one.key, one.order, False, 1) for one in changes]))


# The name.


@awaited
async def test_an_index_says_how_to_put_an_alias_in_its_place_and_that_works_while_changes_come():
    server, name = shared.opensearch(), f"shelf_{next(_numbers)}"
    async with sink_at(server.index(name, {"a": "integer"})) as sink:
        assert isinstance(sink, AliasSink)
        await applied(sink, "before", version=5)
        with pytest.raises(AdminError, match="only an alias can move") as error:
            await sink.current_target()
        *commands, last = str(error.value).partition("wait: ")[2].split(", then ")
        for number, command in enumerate([*commands, last]):
            method, path, *body = command.split(" ", 2)
            assert number < 3
            await asyncio.to_thread(server.ask, method, path, json.loads(body[0]) if body else None)
            if number == 0:
                [waits] = await applied(sink, "meanwhile")
                assert waits.outcome is Outcome.BUSY
        assert await sink.current_target() == f"{name}-0"
        # The sink was not opened again.
        while await applied(sink, "meanwhile") != [APPLIED]:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)
        assert {key: held.version for key, held in (await sink.read(["before", "meanwhile"])).items()} == {
            "before": 5,
            "meanwhile": 1,
        }
        await sink.create_target(f"{name}-7", NOTE, 0, None)
        await sink.move_name(f"{name}-0", f"{name}-7", 0)
        assert await sink.current_target() == f"{name}-7"
    server.ask("DELETE", f"/{name}-*")


@awaited
async def test_a_name_of_several_indexes_or_of_none_cannot_move():
    async with shelf() as one:
        await one.ask("PUT", f"/{one.name}-1", {"aliases": {one.name: {}}})
        await one.refused(one.sink.current_target(), f"stands for {one.old} and {one.name}-1; let it stand for one")
        await one.refused(one.sink.move_name(one.old, one.new, 0), f"stands for {one.old} and {one.name}-1")
        await one.ask("DELETE", f"/{one.name}-*/_alias/{one.name}")
        await one.refused(one.sink.current_target(), "stands for no index; let it stand for one")


# Building.


@awaited
async def test_the_definition_is_used_and_made_fast_and_restored_in_the_end():
    definition = {
        "settings": {"index": {"number_of_replicas": 1, "max_result_window": 5}, "refresh_interval": "7s"},
        "mappings": {"dynamic": "strict", "_meta": {"ours": 1}, "properties": {"a": {"type": "integer"}}},
    }
    async with shelf() as one:
        building = await one.built(definition)
        assert building["mappings"]["properties"] == {"a": {"type": "integer"}}
        assert building["mappings"]["_meta"]["ours"] == 1
        assert building["aliases"] == {f"{one.name}-epoch-0": {}}
        assert building["settings"]["index.max_result_window"] == "5"
        assert building["settings"]["index.number_of_replicas"] == "0"
        assert building["settings"]["index.refresh_interval"] == "-1"
        async with one.sink.at_target(one.new) as sink:
            assert await applied(sink, "a") == [APPLIED]
        assert (await one.ask("GET", f"/{one.new}/_count"))["count"] == 0, "it is refreshed by nobody"
        # A second replica could not be placed on the only node, and neither could the first.
        assert await one.sink.finish_target(one.new) == []
        assert (await one.ask("GET", f"/{one.new}/_count"))["count"] == 1
        done = await one.described(one.new)
        assert done["settings"]["index.number_of_replicas"] == "1"
        assert done["settings"]["index.refresh_interval"] == "7s"
        assert done["mappings"]["_meta"]["ours"] == 1
        assert done["mappings"]["dynamic"] == "strict" and done["mappings"]["properties"] == {"a": {"type": "integer"}}


@awaited
async def test_what_an_operator_changes_after_the_build_stays():
    async with shelf() as one:
        await one.built({"settings": {"refresh_interval": "7s"}})
        await one.sink.finish_target(one.new)
        await one.ask("PUT", f"/{one.new}/_settings", {"refresh_interval": "9s"})
        again = await one.built({"settings": {"refresh_interval": "7s"}})
        await one.sink.finish_target(one.new)
        for described in (again, await one.described(one.new)):
            assert described["settings"]["index.refresh_interval"] == "9s"


@awaited
async def test_without_a_definition_it_is_like_the_live_one():
    analysis = {"analyzer": {"plain": {"type": "keyword"}}}
    settings = {"number_of_replicas": 0, "number_of_shards": 2, "auto_expand_replicas": "0-1", "analysis": analysis}
    mappings = {"_meta": {"ours": 1}, "properties": {"t": {"type": "text", "analyzer": "plain"}}}
    async with shelf(settings=settings, mappings=mappings) as one:
        # The live one was built by a run too.
        await one.sink.create_target(f"{one.name}-6", TargetNote("shop", 6), 0, None)
        await one.sink.move_name(one.old, f"{one.name}-6", 0)
        assert await one.sink.finish_target(f"{one.name}-6") == []
        await one.sink.create_target(one.new, NOTE, 1, None)
        building = await one.described(one.new)
        assert building["settings"]["index.auto_expand_replicas"] == "false"
        async with one.sink.at_target(one.new) as sink:
            assert await applied(sink, "a") == [APPLIED]
        assert await one.sink.finish_target(one.new) == []
        live, new = await one.described(f"{one.name}-6"), await one.described(one.new)
        own = {"index.uuid", "index.creation_date", "index.provided_name"}
        assert {name: value for name, value in live["settings"].items() if name not in own} == {
            name: value for name, value in new["settings"].items() if name not in own
        }
        assert new["mappings"].pop("_meta") == {
            "ours": 1,
            "keywise": {"pipeline": "shop", "generation": 7, "restore": {}},
        }
        assert live["mappings"].pop("_meta")["keywise"]["generation"] == 6
        assert new["mappings"]["properties"]["t"] == {"type": "text", "analyzer": "plain"}


@awaited
async def test_what_a_template_chooses_is_restored():
    async with shelf() as one:
        template = {"index_patterns": [f"{one.name}-7"], "template": {"settings": {"refresh_interval": "11s"}}}
        await one.ask("PUT", f"/_index_template/{one.name}", template)
        assert (await one.built({}))["settings"]["index.refresh_interval"] == "-1"
        await one.sink.finish_target(one.new)
        assert (await one.described(one.new))["settings"]["index.refresh_interval"] == "11s"
        await one.ask("DELETE", f"/_index_template/{one.name}")


@awaited
async def test_a_template_that_would_let_it_go_live_at_once_is_refused():
    async with shelf() as one:
        template = {"index_patterns": [f"{one.name}-7"], "template": {"aliases": {one.name: {}}}}
        await one.ask("PUT", f"/_index_template/{one.name}", template)
        for _ in range(2):
            await one.refused(one.built(), "remove the alias from the template")
            assert await one.aliases() == {one.old: [one.name]}
        await one.ask("DELETE", f"/_index_template/{one.name}")


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (b"\xff", "must be a JSON object"),
        (b"{", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b'{"mappings": 5}', "must be a JSON object"),
        (b'{"mappings": {"properties": {"a": {"type": "odd"}}}}', "No handler for type [odd]"),
        (b'{"settings": {"index.odd": 1}}', "unknown setting [index.odd]"),
        (b'{"settings": {"index.number_of_shards": -1}}', "must be >= 1"),
        (b'{"aliases": {"pages": {}}, "more": 1}', "has aliases, more besides mappings and settings"),
    ],
)
@awaited
async def test_a_definition_that_cannot_be_used_is_refused_with_the_reason(definition, words):
    async with shelf() as one:
        await one.refused(one.sink.create_target(one.new, NOTE, 0, definition), words)
        assert await one.aliases() == {one.old: [one.name]}


@pytest.mark.parametrize("name", ["", "*", "_all", "a,b", "UPPER", "a/b", "..", "x" * 256, "<now>"])
@awaited
async def test_what_is_no_name_of_an_index_is_refused_everywhere(name):
    async with shelf() as one:
        sink = one.sink
        calls = [
            sink.create_target(name, NOTE, 0, None),
            sink.finish_target(name),
            sink.count(name),
            sink.drop_target(name),
            sink.move_name(one.old, name, 0),
            sink.move_name(name, one.old, 0),
        ]
        for call in calls:
            await one.refused(call, "cannot be the name of an index")
        with pytest.raises(AdminError, match="cannot be the name of an index"):
            sink.at_target(name)
        assert await one.aliases() == {one.old: [one.name]}


@awaited
async def test_a_name_that_means_something_else_is_refused():
    async with shelf() as one:
        await one.ask("PUT", f"/{one.new}")
        await one.refused(one.built(), "which no run has built", f"delete it with DELETE /{one.new}")
        await one.refused(one.sink.create_target(one.name, NOTE, 0, None), f"is an alias of {one.old}; name an index")
        await one.refused(one.sink.create_target(one.old, NOTE, 0, None), "which is live; choose another name")


@awaited
async def test_the_index_of_another_run_is_named_with_that_run():
    async with shelf() as one:
        await one.built()
        for other in (TargetNote("shop", 8), TargetNote("other", 7)):
            creation = one.sink.create_target(one.new, other, 0, None)
            await one.refused(creation, "which reindex 7 of shop has built", "choose another name")


@awaited
async def test_a_repeated_start_with_another_definition_is_refused():
    definition = {"settings": {"refresh_interval": "7s"}, "mappings": {"properties": {"a": {"type": "keyword"}}}}
    async with shelf() as one:
        await one.built(definition)
        for other in (None, {**definition, "mappings": {}}):
            encoded = None if other is None else json.dumps(other).encode()
            creation = one.sink.create_target(one.new, NOTE, 0, encoded)
            await one.refused(creation, "with another definition", "cancel the run and drop its target")
        await one.built(dict(reversed(definition.items())))


@awaited
async def test_two_workers_of_a_run_create_it_once():
    async with shelf() as one:
        await asyncio.gather(*(one.built({"settings": {"refresh_interval": "7s"}}) for _ in range(5)))
        await one.sink.finish_target(one.new)
        assert (await one.described(one.new))["settings"]["index.refresh_interval"] == "7s"


@awaited
async def test_an_index_that_has_lost_its_guard_cannot_go_live_and_says_so_before_the_swap():
    async with shelf() as one:
        await one.built()
        await one.ask("DELETE", f"/{one.new}/_alias/{one.name}-epoch-0")
        [reason] = await one.sink.finish_target(one.new)
        assert "has lost its alias" in reason
        await one.refused(one.built(), f"has lost its alias {one.name}-epoch-0")
        await one.refused(one.sink.move_name(one.old, one.new, 0), f"needs the alias {one.name}-epoch-0")
        assert await one.sink.current_target() == one.old


@awaited
async def test_the_index_must_exist():
    async with shelf() as one:
        for call in (one.sink.finish_target(one.new), one.sink.count(one.new)):
            await one.refused(call, f"has no index {one.new}")
        with pytest.raises(DatabaseError, match=f"has no index {one.new}"):
            async with one.sink.at_target(one.new):
                pass


# Moving.


@awaited
async def test_a_move_keeps_the_properties_of_the_alias_and_leaves_guards():
    properties = {"filter": {"term": {"a": 1}}, "index_routing": "1", "search_routing": "1,2", "is_write_index": True}
    async with shelf() as one:
        await one.ask("POST", "/_aliases", {"actions": [{"add": {"index": one.old, "alias": one.name} | properties}]})
        await one.built()
        await one.sink.move_name(one.old, one.new, 0)
        assert (await one.described(one.new))["aliases"] == {one.name: properties}
        assert (await one.described(one.old))["aliases"] == {f"{one.name}-epoch-1": {}}
        await one.sink.move_name(one.new, one.old, 1)
        assert (await one.described(one.old))["aliases"] == {one.name: properties}
        assert (await one.described(one.new))["aliases"] == {f"{one.name}-epoch-2": {}}


@awaited
async def test_a_call_that_arrives_late_has_no_effect_after_a_swap_a_rollback_and_a_second_swap():
    """The first call hangs until the client gives it up, is repeated, and arrives again after each later move."""
    async with fault_proxy(shared.opensearch().port) as proxy, shelf() as one:
        await one.built()
        async with sink_at(f"opensearch://127.0.0.1:{proxy.port}/{one.name}?timeout=1s") as slow:
            proxy.hold(b"POST /_aliases")
            with pytest.raises(UnavailableError):
                await slow.move_name(one.old, one.new, 0)
        assert await one.sink.current_target() == one.old
        for epoch, (before, after) in enumerate([(one.old, one.new), (one.new, one.old), (one.old, one.new)]):
            await one.sink.move_name(before, after, epoch)
            moved = await one.aliases()
            assert moved == {after: [one.name], before: [f"{one.name}-epoch-{epoch + 1}"]}
            assert (await proxy.deliver()).startswith(b"HTTP/1.1 404 "), "the engine refuses the whole call"
            assert await one.aliases() == moved


@awaited
async def test_the_held_call_would_move_the_name():
    """Else the test before this one would prove nothing."""
    async with fault_proxy(shared.opensearch().port) as proxy, shelf() as one:
        await one.built()
        async with sink_at(f"opensearch://127.0.0.1:{proxy.port}/{one.name}?timeout=1s") as slow:
            proxy.hold(b"POST /_aliases")
            with pytest.raises(UnavailableError):
                await slow.move_name(one.old, one.new, 0)
        assert (await proxy.deliver()).startswith(b"HTTP/1.1 200 ")
        assert await one.sink.current_target() == one.new
        await one.sink.move_name(one.old, one.new, 0)
        assert await one.aliases() == {one.new: [one.name], one.old: [f"{one.name}-epoch-1"]}


@awaited
async def test_copies_of_all_earlier_calls_beside_each_move_have_no_effect():
    """The engine looks for the guard in the same step in which it moves the alias."""
    async with shelf() as one:
        await one.built()

        async def copy(before: str, after: str, epoch: int) -> None:
            actions = [
                {"remove": {"index": after, "alias": f"{one.name}-epoch-{epoch}", "must_exist": True}},
                {"remove": {"index": before, "alias": one.name, "must_exist": True}},
                {"add": {"index": after, "alias": one.name}},
                {"add": {"index": before, "alias": f"{one.name}-epoch-{epoch + 1}"}},
            ]
            try:
                await one.ask("POST", "/_aliases", {"actions": actions})
            except AssertionError as error:
                assert "missing" in str(error) or "does not exist" in str(error)

        moves = [(one.old, one.new, 0)]
        for _ in range(12):
            before, after, epoch = moves[-1]
            copies = [copy(*move) for move in moves[-4:] * 3]
            await asyncio.gather(one.sink.move_name(*moves[-1]), *copies, one.sink.move_name(*moves[-1]))
            assert await one.aliases() == {after: [one.name], before: [f"{one.name}-epoch-{epoch + 1}"]}
            moves.append((after, before, epoch + 1))


@awaited
async def test_a_lost_answer_is_repeated():
    async with fault_proxy(shared.opensearch().port) as proxy, shelf(port=proxy.port) as one:
        proxy.lose_answer(f"PUT /{one.new}?".encode())
        with pytest.raises(UnavailableError):
            await one.built()
        assert (await one.built())["settings"]["index.refresh_interval"] == "-1"
        proxy.lose_answer(b"POST /_aliases")
        with pytest.raises(UnavailableError):
            await one.sink.move_name(one.old, one.new, 0)
        await one.sink.move_name(one.old, one.new, 0)
        assert await one.sink.current_target() == one.new
        proxy.lose_answer(b"DELETE /")
        with pytest.raises(UnavailableError):
            await one.sink.drop_target(one.old)
        await one.sink.drop_target(one.old)
        assert proxy.pending == 0


# Leaving.


@awaited
async def test_an_index_that_is_no_concern_of_the_name_is_not_dropped():
    async with shelf() as one:
        await one.ask("PUT", f"/{one.new}")
        await one.refused(one.sink.drop_target(one.new), "was not built by a run", "nothing was deleted")
        await one.refused(one.sink.drop_target(one.name), f"is an alias of {one.old}")
        assert set(await one.aliases()) == {one.old, one.new}


@awaited
async def test_an_index_whose_deletion_was_called_off_cannot_go_live():
    """A copy of the deletion may still be under way, and would delete what is live."""
    async with fault_proxy(shared.opensearch().port) as proxy, shelf() as one:
        await one.built()
        await one.sink.move_name(one.old, one.new, 0)
        async with sink_at(f"opensearch://127.0.0.1:{proxy.port}/{one.name}?timeout=1s") as slow:
            proxy.hold(b"DELETE /")
            with pytest.raises(UnavailableError):
                await slow.drop_target(one.old)
        await one.refused(one.sink.move_name(one.new, one.old, 1), f"needs the alias {one.name}-epoch-1")
        assert await one.aliases() == {one.new: [one.name], one.old: [f"{one.name}-epoch-dropped"]}
        await one.sink.drop_target(one.old)
        assert await one.aliases() == {one.new: [one.name]}


@awaited
async def test_targets_are_those_of_this_name():
    async with shelf() as one, shelf() as other:
        await one.built()
        await other.built()
        assert await one.sink.targets("shop") == [one.new]
        await one.sink.move_name(one.old, one.new, 0)
        assert await one.sink.targets("shop") == [one.new], "also the live one, but not the one that an operator made"
        await one.sink.create_target(f"{one.name}-10", TargetNote("shop", 10), 1, None)
        assert await one.sink.targets("shop") == [one.new, f"{one.name}-10"]
        assert await one.sink.targets("else") == []


@awaited
async def test_an_engine_that_was_restarted_still_knows_everything():
    async with shelf() as one:
        await one.built({"settings": {"refresh_interval": "7s"}})
        async with one.sink.at_target(one.new) as sink:
            await applied(sink, "a", "b")
        await asyncio.to_thread(shared.opensearch().restart)
        assert await one.sink.finish_target(one.new) == []
        assert await one.sink.count(one.new) == 2
        await one.sink.move_name(one.old, one.new, 0)
        assert await one.sink.targets("shop") == [one.new]
        assert (await one.described(one.new))["settings"]["index.refresh_interval"] == "7s"
