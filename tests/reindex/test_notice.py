"""The notice of a run: sent once to a queue or a URL when the run has ended, and again after a crash."""

import asyncio
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cli.command import Folder
from keywise import adapters
from keywise.core import events
from keywise.core.errors import AdminError, SettingsError
from keywise.core.url import Address
from keywise.reindex.admin import require_origin
from keywise.reindex.notice import RECEIVER, send_notice
from keywise.reindex.shards import NOTICE
from reindex.reindex_rig import Catalogue, Works, row
from running import run
from servers import machine


def works_of(folder: Path, **options: Any) -> Works:
    return Works(folder, Catalogue(row("a", 1), row("b", 2)), **options)


async def messages_in(url: str) -> list[dict[str, Any]]:
    """What a queue holds."""
    async with adapters.connect_source(Address(url, "unused", {})) as source:
        return [msgspec.json.decode(one.body) for one in await source.receive(100, 0.0)]


async def _nothing() -> None:
    pass


class Receiver:
    """A web server that takes notices, and answers as it is asked to."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[tuple[str, str, Any]] = []
        """Method, target and body."""
        self.statuses: list[int] = []
        """What it answers next; afterwards 204."""
        self.before_answer: Callable[[], Awaitable[object]] = _nothing

    @property
    def posted(self) -> list[Any]:
        return [body for method, _, body in self.requests if method == "POST"]

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, msgspec.json.decode(body) if body else None))
        is_post = request.method == "POST"
        if is_post:
            await self.before_answer()
        return web.Response(status=self.statuses.pop(0) if is_post and self.statuses else 204 if is_post else 405)


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    one = Receiver()
    runner = web.ServerRunner(web.Server(one.serve))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one.port = runner.addresses[0][1]
    try:
        yield one
    finally:
        await runner.cleanup()


def test_a_queue_gets_one_notice_with_the_counts(tmp_path: Path):
    works, url = works_of(tmp_path), f"sqlite:///{tmp_path}/shop.db?queue=reindexed"

    async def story() -> None:
        await works.start(notify=url, generation=7)
        async with works.working() as working:
            await working.until(lambda: is_sent(works))
            assert (await works.report()).run.is_notified
        [notice] = await messages_in(url)
        assert notice.pop("ended_at") >= notice.pop("started_at") > 0
        assert notice == {
            "pipeline": "shop",
            "generation": 7,
            "state": "complete",
            "counts": {"read": 2, "applied": 2},
            "gone": 0,
            "by": "ada",
            "why": "a test",
        }
        assert works.content() == {"a": 1, "b": 2}, "the pipeline has not read its notice"

    run(story())


async def is_sent(works: Works) -> bool:
    return (await works.report()).run.is_notified


def test_a_url_gets_one_notice_by_post_whichever_worker_ends_the_run(tmp_path: Path):
    async def story() -> None:
        async with receiver() as there:
            crew = [works_of(tmp_path) for _ in range(3)]
            await crew[0].start(notify=f"http://127.0.0.1:{there.port}/hooks/reindex?from=keywise&a=b%20c")
            assert [one[:2] for one in there.requests] == [("HEAD", "/hooks/reindex?from=keywise&a=b%20c")]
            async with crew[0].working() as working, crew[1].working(), crew[2].working():
                # The answer comes when the others have seen the end of the run, and looked twice at the claim.
                there.before_answer = lambda: working.until(lambda: sum(looks_after_end(one) >= 2 for one in crew) >= 2)
                await working.until(lambda: is_sent(crew[0]))
            [(method, target, notice)] = there.requests[1:]
            assert (method, target) == ("POST", "/hooks/reindex?from=keywise&a=b%20c")
            assert (notice["pipeline"], notice["state"], notice["counts"]["read"]) == ("shop", "complete", 2)

    run(story())


def looks_after_end(works: Works) -> int:
    """How often a worker that has not ended the run has looked around since it has heard of that."""
    stages = [isinstance(one, events.ReindexMoved) and one.stage == "complete" for one in works.events]
    seen = works.events[stages.index(True) :] if True in stages else []
    return sum(isinstance(one, events.Waiting) for one in seen)


def test_a_cancelled_run_sends_its_notice_too(tmp_path: Path):
    works, url = works_of(tmp_path), f"sqlite:///{tmp_path}/shop.db?queue=reindexed"

    async def story() -> None:
        await works.start(notify=url)
        await works.cancel()
        async with works.working() as working:
            await working.until(lambda: is_sent(works))
        assert [one["state"] for one in await messages_in(url)] == ["cancelled"]

    run(story())


def test_no_notice_describes_the_run_that_has_begun_since(tmp_path: Path):
    """Its worker was slow: the notice of the ended run would have the facts of the next one."""
    works, url = works_of(tmp_path), f"sqlite:///{tmp_path}/shop.db?queue=reindexed"

    async def story() -> None:
        await works.start(notify=url)
        ended = await works.cancel()
        await works.start()
        async with works.opened() as pipeline:
            _, shards = require_origin(pipeline)
            await send_notice(pipeline, shards, ended)
        assert await messages_in(url) == []

    run(story())


def test_a_notice_that_is_refused_or_finds_no_receiver_is_sent_again(tmp_path: Path):
    works = works_of(tmp_path)

    async def story() -> None:
        async with receiver() as there:
            there.statuses = [503, 429, 404]
            await works.start(notify=f"http://127.0.0.1:{there.port}/")
            async with works.working() as working:
                await working.until(lambda: is_sent(works))
        assert [one["generation"] for one in there.posted] == [1, 1, 1, 1]
        away = [one.cause for one in works.emitted(events.Unavailable) if one.what == RECEIVER]
        assert [cause.partition(": ")[2] for cause in away] == ["503", "429"]
        [failed] = works.emitted(events.Failed)
        assert failed.key == NOTICE and "404; a receiver has to answer 2xx to a POST request" in failed.cause
        assert len(works.emitted(events.ReindexEnded)) == 1

    run(story())


SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="key", version="version", lease="1s", margin="200ms", poll="50ms")
pages.source("sqlite:///shop.db").sink("sqlite:///shop.db?table=stored").origin("sqlite:///truth.db?table=pages")
"""


def test_a_notice_is_sent_again_if_its_worker_is_killed_before_the_ledger_knows(tmp_path: Path):
    folder = Folder(tmp_path, SHOP)
    with closing(sqlite3.connect(tmp_path / "truth.db")) as truth, truth:
        truth.execute("create table pages (key text primary key, version integer)")
        truth.execute("insert into pages values ('a', 5)")

    async def story() -> None:
        async with receiver() as there:
            started = ("reindex", "start", "pages", "--notify", f"http://127.0.0.1:{there.port}/")
            answer = await asyncio.to_thread(folder.keywise, *started)
            assert answer.status == 0, answer.err
            doomed = folder.start("run")
            there.before_answer = lambda: asyncio.to_thread(doomed.kill)
            assert await asyncio.to_thread(doomed.wait) == -signal.SIGKILL
            doomed.communicate()
            there.before_answer = _nothing
            assert [one["state"] for one in there.posted] == ["complete"]
            work = await asyncio.to_thread(folder.keywise, "run", "--until-empty")
            assert work.status == 0, work.err
            assert [one["state"] for one in there.posted] == ["complete", "complete"]
            shown = await asyncio.to_thread(folder.keywise, "reindex", "status", "pages")
            assert f"notice      sent to http://127.0.0.1:{there.port}/" in shown.out

    run(story(), limit_s=60)


def test_a_start_is_refused_if_the_receiver_cannot_be_reached(tmp_path: Path):
    works, port = works_of(tmp_path), machine.free_port()

    async def story() -> None:
        for url, why in {
            f"http://127.0.0.1:{port}/": "cannot be sent: 127.0.0.1:.*nothing was started",
            f"postgresql://nobody@127.0.0.1:{port}/nowhere?queue=done": "cannot be sent: .*nothing was started",
            "memory://": "in the memory of one process",
            works.url: "is a source of pipeline 'shop', which would read the notice as a message",
            "https://ops:secret1@example.com/": r"ops:\*\*\*@example.com/ has a password or a token, which the ledger",
            "https://example.com/?token=secret1": r"token=\*\*\* has a password or a token",
        }.items():
            with pytest.raises(AdminError, match=why):
                await works.start(notify=url)
        for url, why in {
            "ftp://example.com/": "no notifier understands ftp://.*known are: .*http, https, .*sqlite",
            "https://ops:${NO_SUCH}@example.com/": "needs the environment variable NO_SUCH",
            "https://example.com/#here": "is never sent",
        }.items():
            with pytest.raises(SettingsError, match=why):
                await works.start(notify=url)
        assert (await works.controls()).run is None

    run(story())


def test_a_secret_comes_from_the_environment_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    works = works_of(tmp_path)

    async def story() -> None:
        async with receiver() as there:
            monkeypatch.setenv("HOOK_TOKEN", "s3cret")
            url = f"http://ops:${{HOOK_TOKEN}}@127.0.0.1:{there.port}/?token=${{HOOK_TOKEN}}"
            assert (await works.start(notify=url)).notify == url
            async with works.working() as working:
                await working.until(lambda: is_sent(works))
            assert there.requests[-1][:2] == ("POST", "/?token=s3cret")
            assert "s3cret" not in str(await works.controls())

    run(story())
