"""`keywise ledger copy` and `keywise ledger list`, between SQLite files."""

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli.command import command, environment
from cli.commands.copy_shop import HOSTILE, OLD, Mover
from cli.terminal import Terminal

NEW = "sqlite:///new.db"
PAUSE = ("pause", "--all", "--wait", "--yes", "--pipeline", "pages", "--why", "moving")
RESUME = ("resume", "--all", "--yes", "--pipeline", "pages")


@pytest.fixture
def shop(tmp_path: Path) -> Mover:
    return Mover(tmp_path)


def worked(shop: Mover) -> None:
    """Some of everything: hostile keys, a tombstone, a dead letter."""
    shop.send(*({"id": key, "v": 5} for key in HOSTILE), {"id": "gone", "v": 5, "state": "gone"})
    shop.send({"id": "bad 🦉", "v": 1, "bad": True})
    shop.at(OLD, "run", "--until-empty")


def keys_in(shop: Mover, file: str) -> int:
    """How many keys a file holds; it may not be there yet."""
    if not (shop.path / file).exists():
        return 0
    with closing(sqlite3.connect(f"file:{shop.path / file}?mode=ro", uri=True, timeout=30)) as opened:
        if opened.execute("select 1 from sqlite_master where name = 'keywise_marks'").fetchone() is None:
            return 0
        return opened.execute("select count(*) from keywise_marks").fetchone()[0]


def test_a_pipeline_moves_and_goes_on_where_it_was(shop):
    worked(shop)
    before = shop.log()
    shop.at(OLD, *PAUSE)
    copied = shop.copy(OLD, NEW, "--why", "a bigger disk", "--who", "ada@desk")
    assert copied.out.startswith(f"copied pages: {len(HOSTILE) + 1} keys, 1 dead letter, ")
    assert "both sides agree, digest " in copied.out
    assert "then: keywise resume --all --pipeline pages" in copied.out
    assert "holds nothing of mails" in copied.err
    waiting = [{"id": key, "v": version} for key in (*HOSTILE, "gone") for version in (4, 5, 6)]
    shop.send(*waiting)
    shop.at(NEW, *RESUME)
    shop.at(NEW, "run", "--until-empty")
    assert sorted(shop.log()[len(before) :]) == sorted((key, 6) for key in (*HOSTILE, "gone"))
    [letter] = shop.at(NEW, "dead", "list", "--json").json["letters"]
    assert letter["key"] == "bad 🦉" and "🦉 'here'" in letter["cause"]
    for ledger, detail in ((NEW, f"from {OLD}"), (OLD, f"to {NEW}")):
        assert f"{detail}: 10 keys, 1 dead letters; a bigger disk" in _history(shop, ledger)


def _history(shop: Mover, ledger: str) -> str:
    with closing(sqlite3.connect(shop.path / ledger.removeprefix("sqlite:///"))) as file:
        return "\n".join(
            text
            for (text,) in file.execute("select detail from keywise_lines where what = 'copied' and by = 'ada@desk'")
        )


def test_a_copy_is_told_as_json_and_a_second_one_finds_the_same(shop):
    worked(shop)
    shop.at(OLD, *PAUSE)
    planned = shop.copy(OLD, NEW, "--dry-run", "--json").json
    [would] = planned["pipelines"]
    assert (planned["dry_run"], would["outcome"], would["keys"], would["letters"]) == (True, "to copy", 10, 1)
    assert not (shop.path / "new.db").exists(), "a dry run leaves no file behind"
    told = shop.copy(OLD, NEW, "--json").json
    [copied] = told["pipelines"]
    assert (told["from"], told["to"], told["dry_run"]) == (OLD, NEW, False)
    assert (copied["pipeline"], copied["outcome"], copied["keys"], copied["letters"]) == ("pages", "copied", 10, 1)
    assert set(copied["digests"]) == {"keys", "letters", "lines"} and copied["clock_shift_s"] == 0.0
    [again] = shop.copy(OLD, NEW, "--json").json["pipelines"]
    assert again["outcome"] == "same"
    assert "nothing to do, both sides agree on pages: 10 keys, 1 dead letter" in shop.copy(OLD, NEW, app=None).out


def test_what_cannot_be_copied_is_refused_with_what_to_do(shop):
    worked(shop)
    assert "pipeline 'pages' is not paused" in shop.copy(OLD, NEW, status=1).err
    shop.at(OLD, *PAUSE)
    for arguments, status, told in (
        ((OLD, f"sqlite:///{shop.path}/old.db"), 2, "FROM and TO are the same ledger"),
        (("sqlite:///odl.db", NEW), 2, f"there is no file 'odl.db', seen from {shop.path}"),
        (("memory://", NEW), 2, "FROM is memory://, which lives and dies with one process"),
        ((OLD, "memory://"), 2, "TO is memory://"),
        ((OLD, NEW, "--pipeline", "page"), 2, "knows no pipeline 'page'; did you mean pages?"),
        ((OLD, NEW, "--pipeline", "xyz"), 2, "knows no pipeline 'xyz'; it has: pages"),
        ((OLD, "sqlite://new.db"), 1, "has two slashes where a file needs three; write sqlite:///new.db"),
        ((OLD, "nosuch://host/x"), 1, "no ledger understands nosuch://"),
        ((OLD, "sqlite:///no/such/folder.db"), 1, "the folder no/such of no/such/folder.db does not exist"),
    ):
        answer = shop.copy(*arguments, status=status)
        assert told in answer.err and answer.out == "", (arguments, answer)
    assert not (shop.path / "odl.db").exists() and not (shop.path / "new.db").exists()


def test_another_content_is_replaced_only_on_request_and_while_it_is_paused(shop):
    worked(shop)
    shop.at(OLD, *PAUSE)
    shop.copy(OLD, NEW)
    shop.at(NEW, *RESUME)
    shop.send({"id": "a", "v": 9})
    shop.at(NEW, "run", "--until-empty")
    refused = shop.copy(OLD, NEW, status=1)
    assert f"{NEW} already holds something else of pipeline 'pages': 10 keys, and some of them" in refused.err
    assert "is not paused in sqlite:///new.db, so it may be in use" in shop.copy(OLD, NEW, "--replace", status=1).err
    shop.at(NEW, *PAUSE)
    assert "pass --yes" in shop.copy(OLD, NEW, "--replace", status=2).err
    assert "would copy pages" in shop.copy(OLD, NEW, "--replace", "--dry-run").out
    shop.copy(OLD, NEW, "--replace", "--yes")
    assert "nothing to do" in shop.copy(OLD, NEW).out


def test_pipelines_are_those_of_the_app_or_those_that_are_named_or_all(shop):
    worked(shop)
    shop.write("other.py", "import keywise\napp = keywise.App('sqlite:///old.db')\n")
    shop.at(OLD, *PAUSE)
    with closing(sqlite3.connect(shop.path / "old.db")) as file, file:
        file.execute("insert into keywise_scopes (name, controls) select 'older', min(controls) from keywise_scopes")
    noted = shop.copy(OLD, NEW)
    assert "also knows older, which this app does not have; copy it with --pipeline" in noted.err
    assert shop.copy(OLD, "sqlite:///all.db", app=None).out.count("copied ") == 2
    assert "copied older: 0 keys" in shop.copy(OLD, "sqlite:///one.db", "--pipeline", "older").out
    nothing = shop.copy(OLD, "sqlite:///none.db", "--app", "other:app", status=1)
    assert f"there is nothing to copy: {OLD} knows no pipeline of this app; it has: older, pages" in nothing.err


def test_a_ledger_is_listed(shop):
    worked(shop)
    assert "pages       10           1       0         0     1  no" in shop.keywise("ledger", "list", OLD).out
    shop.at(OLD, *PAUSE)
    [told] = shop.keywise("ledger", "list", OLD, "--json").json["pipelines"]
    figures = {"keys": 10, "tombstones": 1, "claims": 0, "suspects": 0, "dead": 1, "paused": True}
    assert told == {"pipeline": "pages"} | figures
    missing = shop.keywise("ledger", "list", NEW)
    assert missing.status == 2 and "there is no file 'new.db'" in missing.err
    with closing(sqlite3.connect(shop.path / "new.db")):
        pass
    (shop.path / "new.db").touch()
    assert shop.keywise("ledger", "list", NEW).out == f"{NEW} holds nothing of any pipeline\n"


@pytest.mark.parametrize("least", [1, 10_000, 20_000])
def test_a_copy_that_is_killed_is_begun_anew_and_is_right_then(shop, least):
    shop.fill(20_000)
    shop.kill_in_the_middle(NEW, lambda: keys_in(shop, "new.db"), least)
    assert "keys like '**'" in shop.at(NEW, "status").out, "it cannot be worked with"
    assert "not finished" in shop.at(NEW, "status").out
    assert "still paused: keys like '**'" in shop.at(NEW, *RESUME).err
    # Something that the old ledger has not: it goes when the copy is begun anew.
    with closing(sqlite3.connect(shop.path / "new.db", timeout=30)) as file, file:
        [scope] = file.execute("select id from keywise_scopes where name = 'pages'").fetchone()
        file.execute("insert or replace into keywise_marks values (?, 'stray', 0, 1, 0, 0, 1)", (scope,))
    assert "copied pages: 20,000 keys" in shop.copy(OLD, NEW).out
    statement = "select key, era, version, generation, deleted, updated_at from keywise_marks order by key"
    contents = []
    for name in ("old.db", "new.db"):
        with closing(sqlite3.connect(shop.path / name)) as file:
            contents.append(file.execute(statement).fetchall())
    assert contents[0] == contents[1] and len(contents[0]) == 20_000


def test_a_terminal_shows_how_far_it_is_and_control_c_says_what_is_left(shop):
    shop.fill(60_000)
    terminal = Terminal(command("ledger", "copy", OLD, NEW), shop.path, environment("shop:app"))
    terminal.wait_for(lambda text: "pages: copying" in text and "%" in text)
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 1
    assert "Error: stopped; unfinished pipelines stay paused in sqlite:///new.db" in terminal.text
    assert terminal.shows_cursor
    again = Terminal(command("ledger", "copy", OLD, NEW), shop.path, environment("shop:app"))
    assert again.end() == 0 and again.shows_cursor
    assert "copied pages: 60,000 keys" in again.text and "pages: checking the original" in again.text
