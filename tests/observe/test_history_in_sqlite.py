"""The history in a SQLite file: what a worker leaves there, and what `why` and `status` make of it."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from app.shop import WAYS, Shop
from cli.command import Folder
from keywise import App
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.history import HistoryRecord
from running import run

ODD = 'it\'s "odd"\n\x1b[31m🦉 [bold]'

LIMITED = """
import keywise
from keywise import Change, Rate

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", poll="50ms", rate=Rate(1, per="1h"))
pages.source("sqlite:///shop.db")


@pages.apply
def write(change: Change[dict]) -> None: ...
"""


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


def told(folder: Folder, key: str, *more: str) -> dict:
    [story] = folder.keywise("why", key, "--pipeline", "pages", "--json", *more).json["pipelines"]
    return story


def app_of(folder: Folder) -> App:
    """The ledger of a folder's app, as an operator reaches it."""
    app = App(f"sqlite:///{folder.path}/shop.db")
    app.pipeline("pages", key="id", version="v").source(app.ledger_url).sink(f"{app.ledger_url}?table=stored")
    return app


async def governed(app: App, *pauses: Pause, lines: tuple[HistoryRecord, ...] = (), eras: int = 0) -> None:
    async with app.open("pages", work=False) as pipeline:
        for pause in pauses:
            await pipeline.control_store.pause(pause)
        for _ in range(eras):
            await pipeline.control_store.raise_era()
        await pipeline.history_store.record(lines)


@pytest.mark.parametrize("way", WAYS)
def test_versions_that_were_refused_are_in_the_file(tmp_path, way):
    shop = Shop(tmp_path)
    shop.pipeline(way)

    async def act() -> None:
        await shop.app.send("shop", {"key": "a", "version": 5})
        await shop.work_until_empty()
        await shop.app.send("shop", {"key": "a", "version": 5}, {"key": ODD, "version": 1})
        await shop.work_until_empty()
        await shop.app.send("shop", {"key": "a", "version": 4})
        await shop.work_until_empty()
        await shop.app.close()

    run(act())
    rows = shop.rows("select what, key, version from keywise_lines order by id")
    assert rows == [("duplicate", "a", 5), ("stale", "a", 4)]


def test_all_or_nothing_is_kept_as_it_is_set(tmp_path):
    for keeps, wanted in (("all", [("applied", "a", 5), ("stale", "a", 4)]), ("none", [])):
        (tmp_path / keeps).mkdir()
        shop = Shop(tmp_path / keeps)
        shop.pipeline("queue_transaction", history=keeps)

        async def act(shop: Shop = shop) -> None:
            for version in (5, 4):
                await shop.app.send("shop", {"key": "a", "version": version})
                await shop.work_until_empty()
            await shop.app.close()

        run(act())
        assert shop.rows("select what, key, version from keywise_lines order by id") == wanted


def test_two_workers_write_one_history_and_take_turns_at_maintenance(tmp_path):
    shops = [Shop(tmp_path) for _ in range(2)]
    for shop in shops:
        shop.pipeline("leased", maintenance="1h", history_lines_max=5)

    async def act() -> None:
        await shops[0].app.send("shop", *({"key": f"k{number}", "version": 5} for number in range(50)))
        await asyncio.gather(*(shop.work_until_empty() for shop in shops))
        await shops[0].app.send("shop", *({"key": f"k{number}", "version": 4} for number in range(50)))
        await asyncio.gather(*(shop.work_until_empty() for shop in shops))
        for shop in shops:
            await shop.app.close()

    run(act())
    assert shops[0].rows("select count(*), count(distinct key) from keywise_lines") == [(50, 50)]
    assert shops[0].rows("select name from keywise_periodic_locks") == [("trim history",)]


STORY = [("stale", 4), ("stale", 3), ("applied", 5)]


def test_why_tells_the_history_newest_first(folder):
    for version in (5, 3, 4):
        folder.keywise("send", "pages", f'{{"id": "a", "v": {version}}}')
        folder.work()
    assert [(line["what"], line["version"]) for line in told(folder, "a")["history"]] == STORY
    assert [line["version"] for line in told(folder, "a", "--lines", "1")["history"]] == [4, 5], "and the commit"
    text = folder.keywise("why", "a", "--pipeline", "pages").out
    assert "something newer was committed already" in text
    assert text.index(" 4 ") < text.rindex(" 3 ")


def test_why_tells_pauses_and_era(folder):
    folder.keywise("send", "pages", '{"id": "a", "v": 5}')
    folder.work()
    app = app_of(folder)
    run(governed(app, Pause("a", at=1.0, by="ann \x1b[31m", why="hot\nkey"), eras=2))
    story = told(folder, "a")
    assert (story["era"], story["mark"]["era"]) == (2, 0)
    [pause] = story["pauses"]
    assert (pause["keys"], pause["by"], pause["at"][:4]) == ("a", "ann \x1b[31m", "1970")
    assert [meeting["answer"] for meeting in story["next"]] == ["paused"]
    text = folder.keywise("why", "a", "--pipeline", "pages").out
    assert "'a' by ann \\x1b[31m" in text and "hot\\nkey" in text
    assert "the next change is newer than all before" in text and "waits until its key is resumed" in text


def test_why_tells_when_the_rate_allows_the_next_dispatch(tmp_path):
    folder = Folder(tmp_path, LIMITED)
    folder.keywise("send", "pages", '{"id": "a", "v": 5}')
    folder.work()
    story = told(folder, "a")
    assert story["limit"]["n"] == 1 and story["limit"]["next_at"] > story["now"]
    assert story["next"][-1]["answer"] == "limited"
    text = folder.keywise("why", "a").out
    assert "not before" in text and "waits for the rate of its key, at most" in text


def test_odd_keys_and_lines_are_harmless(folder):
    app = app_of(folder)
    run(governed(app, lines=(HistoryRecord(1.0, "failed", ODD, 1, "\x1b[31mred\x07", "w\x1b1"),)))
    shown = folder.keywise("why", ODD, "--pipeline", "pages")
    assert shown.status == 0
    assert "\x1b" not in shown.out and "\x07" not in shown.out
    assert "\\x1b[31mred" in shown.out
    assert told(folder, ODD)["history"][0]["detail"] == "\x1b[31mred\x07"


def test_an_empty_key_is_refused_with_what_to_write(folder):
    answer = folder.keywise("why", "")
    assert (answer.status, answer.out) == (2, "")
    assert "the key is empty" in answer.err and "UTF-8" not in answer.err


def test_status_shows_pauses_era_and_alarms(folder):
    app = app_of(folder)
    keys = [Pause(f"k{number}\x1b", at=1.0) for number in range(7)]
    patterns = [Pause(EVERYTHING, is_pattern=True, at=1.0, by="ann", why="reindex"), Pause("b*", is_pattern=True)]
    run(governed(app, *keys, *patterns, eras=1))

    async def alarm() -> None:
        async with app.open("pages", work=False) as pipeline:
            now = await pipeline.admin.now()
            await pipeline.history_store.record(
                [HistoryRecord(now, "alarm", "", None, "bad; run keywise pause --all", "w1")]
            )

    run(alarm())
    text = folder.keywise("status", "--pipeline", "pages").out
    pauses = ("every key by ann", "reindex", "keys like 'b*'", "paused: 'k0\\x1b', 1970", "2 more keys")
    for words in ("pages: era 1", *pauses):
        assert words in text, words
    assert "ALARM" in text and "keywise pause --all" in text and "\x1b" not in text
    pages = folder.keywise("status", "--pipeline", "pages", "--json").json["pipelines"][0]
    assert (pages["era"], len(pages["pauses"])) == (1, 9)
    assert pages["alarms"][0]["detail"].startswith("bad")
    with closing(sqlite3.connect(folder.path / "shop.db")) as connection, connection:
        connection.execute("update keywise_lines set at = at - 4000 where what = 'alarm'")
    assert folder.keywise("status", "--pipeline", "pages", "--json").json["pipelines"][0]["alarms"] == []
