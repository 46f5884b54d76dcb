"""The suites report which promises are kept, broken or unchecked, and leave nothing behind."""

import importlib
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from adapters.benches import ORIGINS, SINKS, SOURCES, memory_ledger
from keywise import adapters
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.origin import MemoryOrigin
from keywise.adapters.memory.sink import MemorySink
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Delivery
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import SettingsError
from keywise.core.origin import Page, Shard
from keywise.core.sink import APPLIED
from keywise.testing import (
    BrokenPromiseError,
    SourceBench,
    UncheckedError,
    Verdict,
    check_ledger,
    check_origin,
    check_sink,
    check_source,
)
from keywise.testing.conformance import Playground, source_promises
from running import run


class Forgetful:
    """A queue that drops every second message."""

    visibility_s = None
    database = None

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def send(self, bodies, *, delay_s: float = 0.0) -> None:
        self.bodies += bodies[::2]

    async def receive(self, limit: int, wait_s: float):
        return [Delivery(number, 0, body, 0.0) for number, body in enumerate(self.bodies)]


@asynccontextmanager
async def forgetful():
    yield SourceBench(source=Forgetful(), another=Forgetful(), advance=lambda seconds: None)


def broken(coroutine) -> dict[str, str]:
    """What was seen instead, by the name of each promise that is broken."""
    with pytest.raises(BrokenPromiseError) as error:
        run(coroutine)
    return {one.name: one.why for one in error.value.report.of(Verdict.BROKEN)}


@pytest.fixture
def mutate() -> Iterator:
    """Replaces a method of a class until the test is over."""
    patch = pytest.MonkeyPatch()
    yield patch.setattr
    patch.undo()


def test_all_promises_are_reported_with_their_verdicts():
    reported = []
    report = run(check_sink(SINKS["memory.sink"]["memory conditional"], on_checked=reported.append))
    assert report
    assert report.checked == reported
    assert {one.verdict for one in reported} == {Verdict.KEPT}
    assert report.summary == f"{len(reported)} promises kept, 0 broken"
    lines = str(report).splitlines()
    assert lines[0] == "kept       A change that counts as applied can be read from the store, with its whole body."
    assert len(lines) == len(reported) + 1


def test_a_broken_promise_is_reported_with_what_was_observed_and_the_others_are_still_checked():
    """The error names the promise first, so that an adapter's author knows what to read in the protocol."""
    with pytest.raises(BrokenPromiseError, match=r"^A body can be any bytes.* But the set of bodies was \[") as error:
        run(check_source(forgetful))
    report = error.value.report
    assert not report
    assert len(report.checked) == len(run(source_promises(forgetful)))
    [empty] = [one for one in report.checked if one.name == "an_empty_queue_gives_nothing"]
    assert (empty.verdict, empty.why) == (Verdict.KEPT, "")
    [unsupported] = [one for one in report.checked if one.name == "a_call_about_nothing_does_nothing"]
    assert unsupported.why == "AttributeError was raised: 'Forgetful' object has no attribute 'ack'"


def test_a_promise_about_time_is_unchecked_where_time_cannot_be_moved():
    def advance(seconds: float) -> None:
        raise UncheckedError("this clock cannot be moved")

    @asynccontextmanager
    async def timeless():
        async with SOURCES["memory.source"]["memory"]() as bench:
            bench.advance = advance
            yield bench

    report = run(check_source(timeless))
    assert report
    unchecked = {one.name for one in report.of(Verdict.UNCHECKED)}
    assert "a_released_message_stays_away_for_its_delay" in unchecked
    assert "bodies_arrive_as_they_were_sent" not in unchecked
    assert report.summary.endswith(f" 0 broken, {len(unchecked)} not checked")


def test_a_source_that_acks_too_little_is_caught_by_its_url(mutate):
    async def ack(self, deliveries) -> None:
        pass

    mutate(MemorySource, "ack", ack)
    assert "what came after the ack" in broken(check_source("memory://"))["an_acked_message_never_comes_back"]


def test_a_ledger_that_releases_for_anybody_is_caught(mutate):
    async def release(self, claims) -> None:
        for claim in claims:
            self.working_set.set(claim.key, None)

    mutate(MemoryLedger, "release", release)
    found = broken(check_ledger(memory_ledger))
    assert "random_histories_answer_as_memory_does_for_a_plain_sink" not in found
    assert found


def test_the_keys_that_a_store_does_not_have_are_unchecked():
    report = run(check_origin("memory://"))
    assert report
    assert {one.name for one in report.of(Verdict.UNCHECKED)} == {
        "whole_numbers_are_keys",
        "what_is_no_number_has_no_row",
        "a_key_that_is_not_unique_is_refused",
    }


def forgets_the_last(honest):
    async def scan(self, shard, after, limit):
        page = await honest(self, shard, after, limit)
        return msgspec.structs.replace(page, rows=page.rows[:-1]) if len(page.rows) == limit else page

    return scan


def begins_again(honest):
    async def scan(self, shard, after, limit):
        page = await honest(self, shard, "", limit)
        return msgspec.structs.replace(page, is_last=page.is_last or bool(after))

    return scan


def never_ends(honest):
    async def scan(self, shard, after, limit):
        return msgspec.structs.replace(await honest(self, shard, after, limit), is_last=False)

    return scan


def counts_rows(honest):
    """A cursor that is a number of rows: what is deleted before it shifts those behind it."""

    async def scan(self, shard, after, limit):
        whole = await honest(self, shard, "", 10_000)
        start = int(after or 0)
        rows = whole.rows[start : start + limit]
        return Page(rows, str(start + len(rows)), len(rows) < limit)

    return scan


def cuts_short(honest):
    async def scan(self, shard, after, limit):
        page = await honest(self, shard, after, limit)
        return msgspec.structs.replace(page, after=page.after[:500])

    return scan


def leaves_the_end_out(honest):
    async def shards(self, size):
        found = await honest(self, size)
        return found[:-1] if len(found) > 1 else found

    return shards


def ignores_inserts(honest):
    async def shards(self, size):
        found = await honest(self, size)
        return found[:-1] or [Shard("none", '["z","a"]')]

    return shards


def invents(honest):
    async def fetch(self, keys):
        return dict.fromkeys(keys, b'{"key": "", "text": ""}') | dict(await honest(self, keys))

    return fetch


def remembers(honest):
    async def fetch(self, keys):
        self.seen = {**await honest(self, keys), **vars(self).get("seen", {})}
        return {key: self.seen[key] for key in keys if key in self.seen}

    return fetch


BROKEN_ORIGINS = {
    "a row of each full page is lost": ("scan", forgets_the_last, "shards_cover_every_row_once"),
    "a cursor is ignored": ("scan", begins_again, "a_scan_resumes_behind_its_cursor"),
    "a scan does not end": ("scan", never_ends, "an_empty_origin_has_no_rows"),
    "a cursor counts rows": ("scan", counts_rows, "rows_that_stay_are_read_while_others_come_and_go"),
    "a cursor is cut short": ("scan", cuts_short, "a_very_long_key_stops_no_scan"),
    "a shard is missing": ("shards", leaves_the_end_out, "shards_cover_every_row_once"),
    "a shard has an end": ("shards", ignores_inserts, "an_empty_origin_has_no_rows"),
    "a missing key has a row": ("fetch", invents, "fetch_reads_rows_and_leaves_out_missing_keys"),
    "an old row is kept": ("fetch", remembers, "fetch_sees_confirmed_writes"),
}


@pytest.mark.parametrize(("method", "breaks", "promise"), BROKEN_ORIGINS.values(), ids=BROKEN_ORIGINS.keys())
def test_an_origin_that_reads_wrongly_is_caught(mutate, method, breaks, promise):
    mutate(MemoryOrigin, method, breaks(vars(MemoryOrigin)[method]))
    assert promise in broken(check_origin(ORIGINS["memory.origin"]["memory"]))


def test_a_sink_that_says_applied_and_writes_nothing_is_caught_by_its_url(mutate):
    honest = MemorySink.write

    def write(self, change, token):
        return APPLIED if change.deleted else honest(self, change, token)

    mutate(MemorySink, "write", write)
    found = broken(check_sink("memory://?grade=plain"))
    assert "a_deletion_removes_the_key" in found


def test_a_check_leaves_a_file_as_it_found_it(tmp_path: Path):
    path = tmp_path / "shop.db"
    url = f"sqlite:///{path}"
    run(check_sink(url))
    assert list(tmp_path.iterdir()) == []
    with sqlite3.connect(path) as connection:
        connection.execute("create table own (a)")
        connection.execute("insert into own values (1)")
    run(check_sink(url))
    assert rows(path) == {"own": 1}


def test_a_bench_of_a_source_leaves_nothing_of_its_queue(tmp_path: Path):
    path = tmp_path / "shop.db"
    sqlite3.connect(path).execute("create table own (a)").connection.close()

    async def use() -> None:
        async with Playground("sources", f"sqlite:///{path}").source() as bench:
            await bench.handed_over(b"held")
            await bench.source.send([b"ready"])
            assert rows(path)

    run(use())
    assert rows(path) == {}


def test_a_bench_of_a_ledger_leaves_nothing_of_its_scope(tmp_path: Path):
    path = tmp_path / "shop.db"
    sqlite3.connect(path).execute("create table own (a)").connection.close()
    playground = Playground("ledgers", f"sqlite:///{path}")

    async def use() -> None:
        async with playground.ledger(LedgerPolicy(intents=True)) as bench:
            await bench.committed(1)
            await bench.take(2, key="held")
            await bench.ledger.dead_letter([DeadLetterRequest(DeadLetter("bad", b""))])
            assert rows(path)
        await playground.clean()

    run(use())
    assert rows(path) == {}


def rows(path: Path) -> dict[str, int]:
    """How many rows the tables of a file have, without those that every file of keywise has."""
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
    counts = {name: connection.execute(f"select count(*) from {name}").fetchone()[0] for name in tables}
    connection.close()
    return {name: count for name, count in counts.items() if count and name not in ("keywise_meta", "sqlite_sequence")}


@pytest.mark.parametrize(
    ("check", "url", "error"),
    [
        (check_source, "sqlite:///shop.db?queue=live", "names a queue that may hold data in use; leave queue= out"),
        (check_sink, "sqlite:///shop.db?table=pages", "names a table that may hold data in use; leave table= out"),
        (check_sink, "sqlite:///shop.db?columns=text", "keeps only some fields"),
        (check_origin, "sqlite:///shop.db?table=pages", "names a table that may hold data in use; leave table= out"),
        (check_origin, "redis://host", "no origin understands"),
        (check_source, "carrier-pigeon://loft", "no source understands"),
    ],
)
def test_what_could_be_somebody_elses_is_refused(check, url: str, error: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=error):
        run(check(url))
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_takes_no_notice_of_the_pipelines_name_is_refused(monkeypatch):
    """Its queue is whatever its URL says, so it may be somebody else's."""
    monkeypatch.setattr(adapters, "_finder", lambda role, address, name: lambda address: Forgetful())
    with pytest.raises(SettingsError, match="broker://host/orders fixes which queue is used"):
        run(check_source("broker://host/orders"))


def test_a_sink_that_cannot_be_read_is_refused_by_its_url(monkeypatch):
    class Blind:
        def __init__(self, name: str) -> None:
            self.name = name

        async def __aenter__(self) -> "Blind":
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(adapters, "_finder", lambda role, address, name: lambda address: Blind(address.name))
    with pytest.raises(SettingsError, match="cannot be read, so the check cannot see what it holds"):
        run(check_sink("search://host"))


REMOTE = """
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.source import MemorySource
from keywise.testing.conformance.benches.memory import MemoryBench

database, prepared = MemoryDatabase(), []

class RemoteSource:
    database = None

    def __init__(self, name):
        self.queue = MemorySource(database, name)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def __getattr__(self, name):
        return getattr(self.queue, name)

class RemoteBench(MemoryBench):
    async def prepare(self, address, role):
        prepared.append((role, address.name))

    def move_clock(self, adapters, seconds):
        super().move_clock([one.queue for one in adapters], seconds)

    async def remove(self, adapter, name):
        del database.queues[name]

def connect(address):
    return RemoteSource(address.name)
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch) -> Iterator:
    """Installs a package with a queue, and perhaps a bench for it."""

    def install(*points: str):
        (tmp_path / "remote_queue.py").write_text(REMOTE)
        info = tmp_path / "remote_queue-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: remote-queue\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(points))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module("remote_queue")

    yield install
    sys.modules.pop("remote_queue", None)


def test_a_package_brings_a_bench_for_its_adapter(remote):
    module = remote(
        "[keywise.sources]", "remote = remote_queue", "[keywise.benches]", "remote = remote_queue:RemoteBench"
    )
    report = run(check_source("remote://host"))
    assert report, str(report)
    assert report.of(Verdict.UNCHECKED) == []
    assert len(module.prepared) > len(report.checked)
    # The first one is only made, to find out whether it can be checked.
    assert len(module.database.queues) == 1


def test_without_a_bench_promises_about_time_are_unchecked_and_queues_are_drained(remote):
    module = remote("[keywise.sources]", "remote = remote_queue")
    report = run(check_source("remote://host"))
    assert report, str(report)
    assert report.of(Verdict.UNCHECKED)
    queues = module.database.queues.values()
    now = module.database.clock()
    assert queues
    assert not [message for queue in queues for message in queue.values() if message.visible_at <= now]
