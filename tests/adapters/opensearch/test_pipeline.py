"""Pipelines into a real OpenSearch: what it forgets, what it refuses, when it is full, and when it is gone."""

import asyncio
import json

import pytest

from adapters.opensearch.index_shop import Press, new_index, played, shown
from adapters.publishing_stores import SearchIndex
from cli.command import Folder
from keywise.adapters.opensearch.sink import connect
from keywise.core import events
from keywise.core.change import VERSION_MAX, VERSION_MIN, Change, ChangeHeader, Order, Outcome, order_of
from keywise.core.entry import Claim, Commit, LeaseTerms
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult
from keywise.core.url import Address
from running import run
from servers import shared
from servers.fault_proxy import fault_proxy

pytestmark = pytest.mark.server("opensearch")

SENT_MAX = 1000
AT_ONCE = 60
"""Requests; more than may wait in the engine."""


# What it forgets.

SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")
app.pipeline("shop", key="id", version="v").source("sqlite:///shop.db").sink({url!r})
"""


def test_a_deletion_of_an_unknown_key_outlives_what_the_engine_forgets_and_its_restart(tmp_path):
    index = SearchIndex()

    async def story() -> None:
        press = Press(tmp_path, index.url)
        await press.handles({"id": "page", "v": 5, "gone": True})
        await asyncio.to_thread(index.forget_deletions)
        await press.handles({"id": "page", "v": 4})
        await asyncio.to_thread(shared.opensearch().restart)
        await asyncio.to_thread(index.forget_deletions)
        await press.handles({"id": "page", "v": 3})
        assert index.content() == {}
        told = await asyncio.to_thread(Folder(tmp_path, SHOP.format(url=index.url)).keywise, "why", "page")
        assert "tombstone  yes: the newest change is a deletion\n" in told.out
        assert told.out.count("something newer was committed already") == 2
        await press.handles({"id": "page", "v": 6})
        await press.app.close()

    played(story())
    assert index.content() == {"page": {"id": "page", "v": 6}}


def test_the_engine_alone_would_show_the_stale_page_again():
    """Else the test before this one would prove nothing."""
    index = SearchIndex()
    assert applied(index.url, gone("page", 5)) == [APPLIED]
    index.forget_deletions()
    assert applied(index.url, put("page", 4)) == [APPLIED]
    assert list(index.content()) == ["page"]


def test_a_write_that_lands_after_the_engine_has_forgotten_is_found_and_repaired(tmp_path):
    """A worker claims the page, is paused until somebody else has unpublished it, wakes up and publishes it."""
    index = SearchIndex()
    quick = {"horizon": "300ms", "repair": "50ms", "lease": "1s", "margin": "200ms"}

    async def story() -> None:
        press = Press(tmp_path, index.url, **quick)
        press.definition.refetch(lambda key: None)
        async with press.opened() as paused:
            results = await paused.ledger.claim([ChangeHeader("page", order_of(4))], LeaseTerms("paused", 0.05))
            await press.handles({"id": "page", "v": 5, "gone": True})
            await asyncio.to_thread(index.forget_deletions)
            assert await paused.sink.apply([put("page", 4)], results.granted) == [APPLIED]
            assert list(await asyncio.to_thread(index.content)) == ["page"]
            assert await paused.ledger.commit([Commit(claim) for claim in results.granted]) == results.granted, (
                "somebody else had the page"
            )

            async def is_repaired() -> bool:
                entry = await paused.admin.inspect("page")
                return entry.suspicions == 0 and entry.deleted

            await press.work_until(is_repaired)
        await press.app.close()

    played(story())
    assert index.content() == {}


# What it refuses.


def test_a_body_that_does_not_fit_is_a_dead_letter_and_its_neighbours_are_written(tmp_path):
    name, url = new_index({"price": "integer"})

    async def story() -> None:
        press = Press(tmp_path, url)
        good = [{"id": f"p{number}", "v": 1, "price": number} for number in range(20)]
        await press.handles(*good[:10], {"id": "bad", "v": 1, "price": "a lot"}, *good[10:])
        [letter] = await press.letters()
        assert letter.key == "bad" and "mapper_parsing_exception" in letter.cause and "a lot" in letter.cause
        assert press.emitted(events.Failed) == []
        await press.app.close()

    played(story())
    assert len(shown(name)) == 20


def test_requests_that_are_too_large_are_halved_and_a_body_that_is_too_large_alone_is_a_dead_letter(tmp_path):
    name, url = new_index({"text": "binary"})
    text = "YWJj" * 50_000

    async def story() -> None:
        press = Press(tmp_path, f"{url}?request_max_bytes=100000000")
        pages = [{"id": f"p{number}", "v": 1, "text": text} for number in range(12)]
        await press.handles(*pages, {"id": "huge", "v": 1, "text": text * 6})
        [letter] = await press.letters()
        assert letter.key == "huge" and "413" in letter.cause
        await press.app.close()

    played(story())
    assert len(shown(name)) == 12


@pytest.mark.parametrize("block", ["index.blocks.read_only_allow_delete", "index.blocks.write"])
def test_an_index_that_is_closed_for_writes_makes_changes_wait_and_costs_no_attempt(tmp_path, block):
    """The first is what the engine does itself when its disk is full; it says 429 then."""
    name, url = new_index()
    server = shared.opensearch()
    server.ask("PUT", f"/{name}/_settings", {block: True})

    async def story() -> None:
        press = Press(tmp_path, url)
        await press.app.send("shop", *({"id": f"p{number}", "v": 1} for number in range(20)))

        async def has_waited() -> bool:
            return len(press.causes()) >= 1

        await press.work_until(has_waited)
        assert "cluster_block_exception" in press.causes()[0]
        await asyncio.to_thread(server.ask, "PUT", f"/{name}/_settings", {block: None})
        await press.work_until_empty()
        assert await press.letters() == [] and press.emitted(events.Failed) == []
        await press.app.close()

    played(story())
    assert len(shown(name)) == 20


def test_too_many_requests_at_once_are_put_off_and_all_are_written_in_the_end():
    name, url = new_index()
    changes = [put(f"p{number}", 1, "word " * 50) for number in range(20 * AT_ONCE)]

    async def story() -> None:
        async with connect(Address(url, "direct", {})) as sink:

            async def sent(some: list[Change]) -> list[Change]:
                """Those that have to be sent again."""
                results = await sink.apply(some, [Claim(one.key, one.order, False, 1) for one in some])
                assert {result.outcome for result in results} <= {Outcome.APPLIED, Outcome.BUSY}
                return [one for one, result in zip(some, results, strict=True) if result.outcome is Outcome.BUSY]

            parts = await asyncio.gather(*(sent(changes[start::AT_ONCE]) for start in range(AT_ONCE)))
            rest = [one for part in parts for one in part]
            assert rest, "nothing was too much"
            assert "rejected_execution_exception" in sink._adaptive_limit.cause
            assert sink._adaptive_limit.limit < sink.batch_max
            while rest:
                rest = await sent(rest)
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)

    played(story())
    assert len(shown(name)) == len(changes)


# Versions.


def put(key: str, version: int, text: str = "", generation: int = 0) -> Change:
    return Change(key, (0, version, generation), body=b'{"text":"%b"}' % text.encode())


def gone(key: str, version: int) -> Change:
    return Change(key, order_of(version), deleted=True)


def applied(url: str, *changes: Change, repair: bool = False) -> list[SinkResult]:
    """One call after another; a repair has a claim without an order."""

    async def story() -> list[SinkResult]:
        async with connect(Address(url, "direct", {})) as sink:
            results = []
            for change in changes:
                order: Order | None = None if repair else change.order
                results += await sink.apply([change], [Claim(change.key, order, change.deleted, 1)])
            return results

    return run(story())


def test_the_whole_range_of_versions_is_kept(tmp_path):
    name, url = new_index()
    assert applied(url, put("a", 0), put("a", VERSION_MAX), put("a", VERSION_MAX - 1)) == [APPLIED, APPLIED, SUPERSEDED]
    document = shared.opensearch().ask("GET", f"/{name}/_doc/a")
    assert document["_version"] == VERSION_MAX


def test_a_generation_writes_at_the_version_that_is_there_and_never_below():
    name, url = new_index()
    results = applied(url, put("a", 5, "first"), put("a", 5, "forced", 1), put("a", 4, "late", 2), put("a", 5, "again"))
    assert results == [APPLIED, APPLIED, SUPERSEDED, APPLIED]
    assert shown(name) == {"a": {"text": "forced"}}


def test_a_repair_deletes_what_should_be_gone_at_the_version_of_its_mark():
    name, url = new_index()
    applied(url, put("a", 5), put("b", 7))
    assert applied(url, gone("a", 5), gone("b", 6), repair=True) == [APPLIED, SUPERSEDED]
    assert list(shown(name)) == ["b"]


def test_a_key_that_the_ledger_does_not_know_can_be_removed():
    name, url = new_index()
    removal = [gone(key, VERSION_MIN) for key in ("a", "never seen")]
    assert applied(url, put("a", 5), *removal) == [APPLIED] * 3
    assert shown(name) == {}
    [waits] = applied(url, put("a", 5))
    assert waits.outcome is Outcome.BUSY, "the engine would call it applied, though nothing is there"
    assert applied(url, put("a", 6)) == [APPLIED]


TRUTH = {"home": {"id": "home", "v": 3, "title": "Welcome"}, "news": {"id": "news", "v": 8}}
KEPT = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", poll="50ms")
pages.source("sqlite:///shop.db").sink({url!r})
pages.refetch({truth!r}.get)
"""


def test_reconcile_puts_an_index_right_that_somebody_has_edited(tmp_path):
    """One document was changed, one removed, and one came from elsewhere, all at versions of their own."""
    name, url = new_index()
    server, folder = shared.opensearch(), Folder(tmp_path, KEPT.format(url=url, truth=TRUTH))
    folder.keywise("send", "pages", stdin="\n".join(map(json.dumps, TRUTH.values())))
    folder.work()
    server.ask("PUT", f"/{name}/_doc/home?version=3&version_type=external_gte", {"id": "home", "title": "Wellcome"})
    server.ask("DELETE", f"/{name}/_doc/news?version=8&version_type=external_gte")
    server.ask("PUT", f"/{name}/_doc/old?version=5&version_type=external", {"id": "old"})
    folder.write("keys.txt", "old\n")
    told = folder.keywise("reconcile", "--keys-from", "keys.txt", "--repair", "--yes")
    assert told.status == 0, told.err
    assert "'home' is different in the sink" in told.out and "'news' is missing in the sink" in told.out
    assert "'old' is in the sink, and should be gone: the sink holds version 5" in told.out
    assert "looked at 3 keys: 3 differences, 3 repaired" in told.out
    assert shown(name) == TRUTH


# When it is gone.


def test_an_engine_that_goes_away_in_the_middle_loses_nothing(tmp_path):
    name, url = new_index()
    server = shared.opensearch()

    async def story() -> None:
        press = Press(tmp_path, f"{url}?batch_max=10", lease="1s", margin="200ms")
        sent: set[str] = set()
        restarting: list[asyncio.Task[None]] = []

        async def send() -> None:
            some = [f"p{len(sent) + number}" for number in range(20)]
            await press.app.send("shop", *({"id": key, "v": 1} for key in some))
            sent.update(some)

        async def is_over() -> bool:
            if len(sent) < SENT_MAX:
                await send()
            if not restarting and await asyncio.to_thread(shown, name):
                restarting.append(asyncio.create_task(asyncio.to_thread(server.restart)))
            return bool(restarting) and restarting[0].done() and bool(press.causes())

        await press.work_until(is_over, limit_s=90)
        await restarting[0]
        await press.work_until_empty(limit_s=60)
        assert await press.letters() == []
        assert set(await asyncio.to_thread(shown, name)) == sent
        await press.app.close()

    played(story())


def test_an_answer_that_is_lost_is_found_out_by_the_next_try(tmp_path):
    """The write has landed, so the engine has a conflict at the very same version: that is no news to anybody."""
    name, _ = new_index()

    async def story() -> None:
        async with fault_proxy(shared.opensearch().port) as proxy:
            proxy.lose_answer(b"_bulk")
            press = Press(tmp_path, f"opensearch://127.0.0.1:{proxy.port}/{name}", lease="1s", margin="200ms")
            await press.handles({"id": "page", "v": 5})
            assert proxy.pending == 0
            assert "the connection was lost" in press.emitted(events.Failed)[0].cause
            assert {event.outcome for event in press.emitted(events.Settled)} == {Outcome.APPLIED}
            entry = await press.entry("page")
            assert entry.mark == order_of(5) and entry.suspicions, "nobody knew for as long as the lease lasted"
            await press.app.close()

    played(story())
    assert shown(name) == {"page": {"id": "page", "v": 5}}
    assert shared.opensearch().ask("GET", f"/{name}/_doc/page")["_seq_no"] == 0, "it was written once"


def test_an_index_behind_an_alias_that_is_gone_is_not_made_anew():
    name, _ = new_index()
    server, alias = shared.opensearch(), f"alias_{name}"
    server.ask("PUT", f"/{name}/_alias/{alias}")

    async def story() -> None:
        async with connect(Address(f"{server.url}/{alias}", "direct", {})) as sink:
            claims = [Claim("a", order_of(1), False, 1)]
            assert await sink.apply([put("a", 1)], claims) == [APPLIED]
            await asyncio.to_thread(server.ask, "DELETE", f"/{name}/_alias/{alias}")
            [waits] = await sink.apply([put("a", 2)], claims)
            assert waits.outcome is Outcome.BUSY and "index_not_found_exception" in waits.cause

    played(story())
    with pytest.raises(AssertionError, match="no such index"):
        server.ask("GET", f"/{alias}")


def test_an_alias_that_comes_to_stand_for_two_indexes_makes_changes_wait_and_says_so(tmp_path):
    """Nothing is wrong with them: somebody is in the midst of replacing an index."""
    (old, _), (new, _), server = new_index(), new_index(), shared.opensearch()
    alias = f"alias_{old}"
    server.ask("PUT", f"/{old}/_alias/{alias}")

    async def story() -> None:
        press = Press(tmp_path, f"{server.url}/{alias}", attempts_max=1)
        steps = []

        async def is_over() -> bool:
            if not steps and press.emitted(events.Settled):
                steps.append(await asyncio.to_thread(server.ask, "PUT", f"/{new}/_alias/{alias}"))
                await press.app.send("shop", *({"id": f"p{number}", "v": 1} for number in range(20)))
            if len(steps) == 1 and any("let it stand for one" in cause for cause in press.causes()):
                steps.append(await asyncio.to_thread(server.ask, "DELETE", f"/{old}/_alias/{alias}"))
            return len(steps) == 2 and len(await asyncio.to_thread(shown, new)) == 20

        await press.app.send("shop", {"id": "before", "v": 1})
        await press.work_until(is_over)
        assert await press.letters() == [] and press.emitted(events.Failed) == []
        await press.app.close()

    played(story())
