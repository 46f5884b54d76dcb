"""Pipelines from SQLite to a real HTTP service: what becomes of changes when it refuses, hangs or is away."""

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from app.shop import QUICK, Shop
from cli.command import Folder
from flow.test_rates_across_processes import VERSIONS, send_for_a_second
from keywise.adapters.http.sink import PAUSE_AFTER_KEYS, connect
from keywise.core.change import Change, order_of
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Claim
from keywise.core.events import Failed, Repaired, Snoozed, Unavailable
from keywise.core.sink import APPLIED
from keywise.core.url import Address
from running import awaited, run
from servers import machine, shared

pytestmark = pytest.mark.server("http")

SHORT = {"lease": "500ms", "margin": "100ms", "attempts_max": 2}


def shop_to(url: str, folder: Path, **options: object) -> Shop:
    shop = Shop(folder)
    pipeline = shop.app.pipeline("shop", key="key", version="version", deleted={"gone": [True]}, **(QUICK | options))
    pipeline.source(f"{shop.url}?visibility={options.get('lease', '60s')}").sink(url)
    shop.definition = pipeline
    return shop


def body(version: int, key: str = "a", **more: object) -> dict:
    return {"key": key, "version": version, **more}


async def handled(shop: Shop, *sent: dict) -> list[DeadLetter]:
    """Send, work until all of it is acked, and return the dead letters."""
    await shop.app.send("shop", *sent)
    try:
        await shop.work_until_empty()
        return await shop.letters()
    finally:
        await shop.app.close()


async def worked_until(shop: Shop, done: Callable[[], Awaitable[bool]], *sent: dict) -> list[DeadLetter]:
    await shop.app.send("shop", *sent)
    try:
        await shop.work_until(done)
        return await shop.letters()
    finally:
        await shop.app.close()


@awaited
async def test_changes_and_deletions_arrive_with_their_order_and_token(tmp_path):
    space = shared.http().space()
    keys = ["a/b c", "é", "..a", "a%2Fb", "?x=1&y#z"]
    shop = shop_to(f"{space.url}?missing=no+such+document", tmp_path)
    assert await handled(shop, *(body(3, key) for key in keys), body(4, "é", gone=True)) == []
    assert set(space.documents) == {*keys} - {"é"}
    assert {line["target"].rpartition("/")[2] for line in space.log} >= {
        "a%2Fb%20c",
        "..a",
        "a%252Fb",
        "%3Fx%3D1%26y%23z",
    }
    [deletion] = [line for line in space.log if line["method"] == "DELETE"]
    told = deletion["headers"]
    assert [told[f"keywise-{name}"] for name in ("era", "version", "generation", "deleted")] == ["0", "4", "0", "true"]
    assert "content-type" not in told and deletion["body"] == ""
    puts = [line for line in space.log if line["method"] == "PUT"]
    assert {line["headers"]["content-type"] for line in puts} == {"application/json"}
    tokens = [line["headers"]["keywise-token"] for line in space.log]
    assert len(set(tokens)) == len(tokens) and all(token.isdigit() for token in tokens)


@awaited
async def test_a_key_that_may_lead_out_of_its_place_is_a_dead_letter_and_nothing_is_sent(tmp_path):
    space = shared.http().space()
    [letter] = await handled(shop_to(space.url, tmp_path), body(1, "../../-/rules/x"), body(1, "good"))
    assert "lead out of its place" in letter.cause
    assert space.versions == {"good": 1}


@awaited
async def test_a_refusal_is_a_dead_letter_at_once_with_what_the_service_said(tmp_path):
    answer = {"status": 422, "body": "no\x1b title"}
    space = shared.http().space(fault="answer", answer=answer, times=1)
    [letter] = await handled(shop_to(space.url, tmp_path), body(1))
    assert letter.cause.startswith("422: no title")
    assert len(space.log) == 1


@awaited
async def test_a_service_that_has_moved_makes_changes_wait_and_says_where_to(tmp_path):
    answer = {"status": 301, "headers": {"Location": "https://other/x?y"}}
    space = shared.http().space(fault="answer", answer=answer, times=4)
    shop = shop_to(space.url, tmp_path, attempts_max=2)
    assert await handled(shop, body(1)) == []
    assert space.versions == {"a": 1}
    told = {event.cause for event in shop.emitted(Unavailable)}
    assert told == {"301: it points to https://other/x; name that URL, nothing is followed"}


@awaited
async def test_a_failure_that_passes_is_tried_again(tmp_path):
    space = shared.http().space(fault="answer", answer={"status": 500, "body": "oh"}, times=2)
    shop = shop_to(space.url, tmp_path)
    assert await handled(shop, body(1)) == []
    assert (space.versions, [event.cause for event in shop.emitted(Failed)]) == ({"a": 1}, ["500: oh", "500: oh"])


@awaited
async def test_a_service_that_is_away_costs_no_attempt_and_is_told(tmp_path):
    """However long it takes: nothing was sent, so nothing is blamed."""
    port = machine.free_port()
    shop = shop_to(f"http://127.0.0.1:{port}/{{key}}", tmp_path, attempts_max=2)

    async def is_told_often() -> bool:
        return len(shop.emitted(Unavailable)) >= 6

    assert await worked_until(shop, is_told_often, body(1), body(1, "b")) == []
    told = shop.emitted(Unavailable)
    assert {event.what for event in told} == {"sink"}
    assert all(event.cause.startswith(f"127.0.0.1:{port}: ") for event in told)
    assert await shop.entry("a") is None
    assert shop.emitted(Failed) == []


@pytest.mark.parametrize(
    ("status", "headers"), [(502, {}), (503, {}), (503, {"Retry-After": "0"}), (504, {}), (303, {"Location": "/x"})]
)
def test_a_service_that_is_away_behind_its_gateway_buries_nothing(tmp_path, status, headers):
    """However often it is tried: the service may have written it, so the lease runs out, and no change is to blame."""
    answer = {"status": status, "body": "no service", "headers": headers}
    space = shared.http().space(fault="answer", answer=answer, times=6, writes=True)
    shop = shop_to(space.url, tmp_path, **(SHORT | {"attempts_max": 1}))
    assert run(handled(shop, body(2), body(2, "b"), body(2, "c"))) == []
    assert space.versions == {"a": 2, "b": 2, "c": 2}
    assert shop.emitted(Failed) == []
    assert all(event.cause.startswith(f"{status}: ") for event in shop.emitted(Unavailable))
    assert shop.emitted(Unavailable) and shop.emitted(Snoozed) == []
    assert run(shop.entry("a")).suspicions > 0


@pytest.mark.parametrize("missing", ["", "?missing=no+such+document"], ids=["nothing agreed", "agreed"])
def test_a_gateway_that_knows_no_service_does_not_count_as_a_deletion(tmp_path, missing):
    """A document that is not deleted would be shown for ever."""
    space = shared.http().space()
    assert run(handled(shop_to(f"{space.url}{missing}", tmp_path), body(1))) == []
    space.rule(fault="answer", answer={"status": 404, "body": "default backend"}, times=3)
    shop = shop_to(f"{space.url}{missing}", tmp_path, **(SHORT | {"attempts_max": 4}))
    assert run(handled(shop, body(2, gone=True))) == []
    assert space.documents == {}
    assert all(event.cause.startswith("404: default backend") for event in shop.emitted(Failed))
    assert [event.attempts for event in shop.emitted(Failed)] == [1, 2, 3]


def test_a_deletion_of_an_absent_document_ends_as_a_dead_letter(tmp_path):
    """Also if no other change shows that the service can be reached; no worker backs off meanwhile."""
    space = shared.http().space()
    shop = shop_to(space.url, tmp_path, **SHORT)
    [letter] = run(handled(shop, body(2, gone=True)))
    assert letter.key == "a" and "unknown" in letter.cause
    assert all("missing=" in event.cause for event in shop.emitted(Failed))
    assert [event.attempts for event in shop.emitted(Failed)] == [1, 2]
    assert shop.emitted(Unavailable) == []


@awaited
async def test_a_service_that_asks_for_time_is_given_it_and_blames_nobody(tmp_path):
    answer = {"status": 429, "headers": {"Retry-After": "0"}}
    space = shared.http().space(fault="answer", answer=answer, times=4)
    shop = shop_to(space.url, tmp_path, attempts_max=2)
    assert await handled(shop, body(1)) == []
    assert space.versions == {"a": 1}
    assert len(shop.emitted(Snoozed)) == 4
    assert shop.emitted(Failed) == []


@awaited
async def test_a_503_with_a_time_is_waited_for_where_the_service_refuses_what_is_older(tmp_path):
    answer = {"status": 503, "headers": {"Retry-After": "0"}}
    space = shared.http().space(fault="answer", answer=answer, times=4, writes=True, conditional=409)
    shop = shop_to(f"{space.url}?grade=conditional", tmp_path, attempts_max=2)
    assert await handled(shop, body(1)) == []
    assert space.versions == {"a": 1}
    assert len(shop.emitted(Snoozed)) == 4 and shop.emitted(Failed) == []


@awaited
async def test_a_service_that_sends_everybody_away_is_left_alone_until_then_and_asked_by_one(tmp_path):
    answer = {"status": 429, "headers": {"Retry-After": "1"}}
    space = shared.http().space(fault="answer", answer=answer)
    shop = shop_to(space.url, tmp_path, attempts_max=1, concurrency=4)

    async def is_over() -> bool:
        log = space.log
        if log and log[-1]["at"] > log[0]["at"] + 2.5:
            space.rule()
        return len(space.documents) == 40

    assert await worked_until(shop, is_over, *(body(1, f"k{number}") for number in range(40))) == []
    refused = [line["at"] for line in space.log if line["status"] == 429]
    at_first = [at for at in refused if at < refused[0] + 0.9]
    later = refused[len(at_first) :]
    assert len(at_first) <= PAUSE_AFTER_KEYS + 4, "what was on its way, and nothing more"
    assert all(after - before > 0.9 for before, after in pairwise(later)) and len(later) >= 2
    assert shop.emitted(Failed) == [] and "429" in {event.cause for event in shop.emitted(Unavailable)}


@awaited
async def test_too_many_requests_without_a_time_cost_no_attempt_either(tmp_path):
    space = shared.http().space(fault="answer", answer={"status": 429}, times=4)
    shop = shop_to(space.url, tmp_path, attempts_max=2)
    assert await handled(shop, body(1)) == []
    assert space.versions == {"a": 1}
    assert [event.cause for event in shop.emitted(Unavailable)] == ["429"] * 4


@awaited
async def test_a_token_that_has_expired_is_told_and_its_changes_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("SEARCH_TOKEN", "hunter2-hunter2")
    space = shared.http().space(authorization="Bearer another one")
    shop = shop_to(f"{space.url}?token_env=SEARCH_TOKEN", tmp_path, attempts_max=1)

    async def is_told() -> bool:
        if len(shop.emitted(Unavailable)) >= 3:
            space.rule(authorization="Bearer hunter2-hunter2")
        return bool(space.documents)

    assert await worked_until(shop, is_told, body(1)) == []
    assert {event.cause for event in shop.emitted(Unavailable)} == {"401: not let in: Bearer ***"}


@awaited
async def test_a_call_ends_with_its_claim_and_the_key_is_suspect(tmp_path):
    """The service hangs for longer than the claim lasts; what it may have written is known to be in doubt."""
    space = shared.http().space(fault="hang", times=1, writes=True)
    shop = shop_to(f"{space.url}?timeout=60s", tmp_path, **SHORT, runtime_max="500ms")
    assert await handled(shop, body(1)) == []
    assert [event.cause for event in shop.emitted(Failed)] == ["the claim ended before the sink answered"]
    assert (await shop.entry("a")).suspicions == 1
    assert [line["status"] for line in space.log] == [None, 200]


@awaited
async def test_an_older_change_waits_for_a_newer_one_that_may_have_been_written(tmp_path):
    space = shared.http().space(fault="cut", times=1, writes=True)
    shop = shop_to(space.url, tmp_path, **SHORT)
    assert await handled(shop, body(1), body(2)) == []
    assert [line["headers"]["keywise-version"] for line in space.log] == ["2", "2"]
    assert [event.cause for event in shop.emitted(Failed)] == [
        f"127.0.0.1:{space.service.port}: the connection was lost"
    ]


@pytest.mark.parametrize("tells", [True, False])
def test_a_conditional_service_that_has_it_already_counts_as_applied_or_superseded(tmp_path, tells):
    """The first try arrived and its answer was lost; the service refuses the second one, which is no failure."""
    space = shared.http().space(fault="cut", times=1, writes=True, conditional=412, refuses_equal=True, tells=tells)
    shop = shop_to(f"{space.url}?grade=conditional&superseded=412", tmp_path, **SHORT)
    assert run(handled(shop, body(7))) == []
    assert [line["status"] for line in space.log] == [None, 412]
    assert run(shop.entry("a")).suspicions == 0, "the service itself keeps what is newer"


@awaited
async def test_a_worker_that_wakes_up_late_overwrites_nothing_on_a_conditional_service(tmp_path):
    """What it sends is older than what the service holds by then, without anybody's ledger."""
    space = shared.http().space(conditional=409)
    url = f"{space.url}?grade=conditional"
    assert await handled(shop_to(url, tmp_path), body(9)) == []
    (tmp_path / "late").mkdir()
    late = shop_to(url, tmp_path / "late")
    assert await handled(late, body(8)) == []
    assert space.versions == {"a": 9}
    assert [line["status"] for line in space.log] == [200, 409]


@pytest.mark.parametrize("grade", ["plain", "conditional"])
def test_a_write_that_lands_late_is_refused_or_repaired(tmp_path, grade):
    """The service works on a request long after its claim has ended, when something newer is there already."""
    rules = {"conditional": 409} if grade == "conditional" else {}
    space = shared.http().space(fault="late", times=1, **rules)
    shop = shop_to(
        f"{space.url}?grade={grade}",
        tmp_path,
        **(SHORT | {"attempts_max": 9}),
        runtime_max="500ms",
        horizon="300ms",
        repair="50ms",
    )
    landed: list[bool] = []

    @shop.definition.refetch
    def truth(key: str) -> dict:
        if not landed:
            raise OSError("the truth is away")
        return body(2, key)

    async def is_over() -> bool:
        if space.versions.get("a") == 1 and len(space.log) == 2:
            await shop.app.send("shop", body(2))
        if space.versions.get("a") == 2 and not landed:
            space.rule(**rules, releases=True)
        if space.log and space.log[0]["status"] is not None:
            landed.append(True)
        return bool(landed) and space.versions == {"a": 2} and (grade == "conditional" or bool(shop.emitted(Repaired)))

    assert run(worked_until(shop, is_over, body(1))) == []
    late, _, *later = [line["status"] for line in space.log]
    assert (late, set(later)) == (409 if grade == "conditional" else 200, {200})
    assert run(shop.entry("a")).suspicions == 0


@awaited
async def test_a_deletion_stays_deleted_though_the_service_has_forgotten_it(tmp_path):
    """A deletion of a key that nobody has seen, then the older publish: the ledger remembers, and it need not."""
    space = shared.http().space(conditional=409, forgets=True)
    url = f"{space.url}?grade=conditional&forgets_deletions=yes&missing=no+such+document"
    assert await handled(shop_to(url, tmp_path), body(5, gone=True)) == []
    assert await handled(shop_to(url, tmp_path), body(4)) == []
    assert space.documents == {}
    assert [line["status"] for line in space.log] == [404]


@awaited
async def test_there_is_no_token_without_a_ledger():
    """While the ledger is down, changes may be written without a claim."""
    space, change = shared.http().space(), Change("a", order_of(3), body=b"{}")
    async with connect(Address(space.url, "shop", {})) as sink:
        assert await sink.apply([change], [Claim("a", change.order, False, 0)]) == [APPLIED]
    assert "keywise-token" not in space.log[0]["headers"]


@awaited
async def test_the_era_is_that_of_the_claim(tmp_path):
    """Upstream names none; after a restart of its numbering, the service has to see that what is lower is newer."""
    space = shared.http().space(conditional=409)
    url = f"{space.url}?grade=conditional"
    assert await handled(shop_to(url, tmp_path), body(9)) == []
    again = shop_to(url, tmp_path)
    async with again.opened() as pipeline:
        assert await pipeline.control_store.raise_era() == 1
    assert await handled(again, body(1)) == []
    assert space.versions == {"a": 1}
    assert [line["headers"]["keywise-era"] for line in space.log] == ["0", "1"]


# A rate, and a service that enforces it.

HEAD = """
import keywise
from keywise import Rate

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", rate=Rate(1, per="1s"), poll="50ms", evict_delay="300ms")
pages.source("sqlite:///shop.db")
pages.sink({url!r})
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_a_burst_at_a_service_that_allows_one_write_a_second_ends_at_the_newest(tmp_path, started):
    """Fifty versions of one document in a second, two processes, and a service that answers 429 to what is too much."""
    space = shared.http().space(per_s=1)
    folder = Folder(tmp_path, HEAD.format(url=space.url))
    assert folder.keywise("run", "--until-empty").status == 0
    started += [folder.start("run", "shop:app") for _ in range(2)]
    for worker in started:
        assert worker.stderr.readline().startswith("pages: plain")
    run(asyncio.wait_for(send_for_a_second(tmp_path), 40), limit_s=45)
    for worker in started:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    written = [line for line in space.log if line["status"] == 200]
    versions = [int(line["headers"]["keywise-version"]) for line in written]
    assert space.versions == {"hot": VERSIONS}
    assert versions == sorted(set(versions)), "never older after newer, and each once"
    assert sum(line["at"] < written[0]["at"] + 1.0 for line in written) <= 2
    assert {line["status"] for line in space.log} <= {200, 429}
    assert folder.keywise("dead", "list", "--json").json["letters"] == []
