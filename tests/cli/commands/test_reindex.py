"""`keywise reindex` refuses options that would start another run than the one that was meant, and reads keys."""

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli.command import Folder

SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")

pages = app.pipeline("pages", key="id", version="v")
pages.source("sqlite:///shop.db").sink("sqlite:///shop.db?table=stored&key=id&columns=v")
pages.origin("sqlite:///cms.db?table=pages&key=id")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    with closing(sqlite3.connect(tmp_path / "cms.db")) as cms, cms:
        cms.execute("create table pages (id text primary key, v integer)")
        cms.executemany("insert into pages values (?, 1)", [("home",), ("a\u2028b",), (" news",)])
    return Folder(tmp_path, SHOP)


def build(folder: Folder) -> None:
    """Build a target beside the live one, until it has caught up once."""
    folder.keywise("reindex", "start", "pages", "--into", "stored_{generation}")
    with folder.start("run") as worker:
        while not folder.keywise("reindex", "status", "pages", "--json").json["catch_up"]["passes"]:
            assert worker.poll() is None, worker.communicate()
        worker.send_signal(signal.SIGTERM)
        worker.communicate()


def break_row(folder: Folder) -> None:
    """Give a row a version that is no number, and nothing else that is wrong."""
    with closing(sqlite3.connect(folder.path / "cms.db")) as cms, cms:
        cms.execute("update pages set v = 'first' where id = 'home'")


@pytest.mark.parametrize("command", [("start", "--into"), ("start", "--where"), ("run", "--into")])
def test_an_empty_option_starts_no_other_run(folder: Folder, command: tuple[str, str]):
    """A script passes it when a variable is not set; a run in place of all rows may delete keys."""
    verb, option = command
    answer = folder.keywise("reindex", verb, "pages", option, "")
    assert (answer.status, answer.out) == (2, "")
    assert f"{option} is empty" in answer.err
    assert "was never reindexed" in folder.keywise("reindex", "status", "pages").err


def test_keys_are_lines_as_editors_write_them(folder: Folder):
    (folder.path / "keys").write_bytes("\ufeffhome\r\n news\r\na\u2028b\r\n\r\n".encode())
    answer = folder.keywise("reindex", "start", "pages", "--ids", "keys", "--dry-run", "--json")
    assert answer.json["counts"] == {"read": 3, "apply": 3}


def test_keys_without_a_row_are_named(folder: Folder):
    """Spaces are part of a key, so one that was meant without them is not found."""
    (folder.path / "keys").write_text("home\nnews\nhome \n" + "".join(f"k{number}\n" for number in range(5)))
    some = folder.keywise("reindex", "start", "pages", "--ids", "keys", "--dry-run", "--unchecked")
    assert "1 of 8 keys found; the origin has no row of 'news', 'home ', 'k0', 'k1', 'k2', …\n" in some.err
    (folder.path / "keys").write_text("news\n")
    none = folder.keywise("reindex", "start", "pages", "--ids", "keys")
    assert "Warning: 0 of 1 key found; the origin has no row of 'news'\n" in none.err
    (folder.path / "keys").write_text("home\n")
    assert "1 of 1 key found\n" in folder.keywise("reindex", "start", "pages", "--ids", "keys", "--dry-run").err


def test_a_run_that_goes_on_has_not_ended(folder: Folder):
    assert folder.keywise("reindex", "start", "pages", "--json").json["ended_at"] is None


def test_the_help_of_the_group_cuts_no_sentence(folder: Folder):
    shown = " ".join(folder.keywise("reindex", "--help").out.split())
    assert "Show how far the last run has come, how its rows ended, and why it waits." in shown
    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.parametrize("sample", ["0", "-1", "some"])
def test_a_gate_without_a_sample_is_refused(folder: Folder, sample: str):
    """It would say that the swap may begin, whatever the target holds."""
    answer = folder.keywise("reindex", "verify", "pages", f"--sample={sample}")
    assert (answer.status, answer.err) == (2, f"Error: --sample {sample}: write how many keys, at least 1, or all\n")


def test_a_forced_write_that_the_new_target_does_not_get_is_said(folder: Folder):
    assert folder.keywise("send", "pages", '{"id": "home", "v": 1}').status == 0
    folder.work()
    assert folder.keywise("force", "home").err == "", "there is one target"
    assert folder.keywise("reindex", "start", "pages", "--into", "stored_{generation}").status == 0
    forced = folder.keywise("force", "home")
    assert (forced.status, "forced 'home' in pages" in forced.out) == (0, True)
    assert ", beside the live target, does not get this write, because the version is not new" in forced.err
    with closing(sqlite3.connect(folder.path / "cms.db")) as cms, cms:
        cms.execute("update pages set v = 2 where id = 'home'")
    assert folder.keywise("force", "home").err == "", "a pass sees the new version"


def test_the_row_for_which_the_gate_refuses_is_found_by_its_key(folder: Folder):
    assert "there is no target beside a live one" in folder.keywise("dead", "list", "--beside").err
    break_row(folder)
    build(folder)
    gate = {line["name"]: line for line in folder.keywise("reindex", "verify", "pages", "--json").json["lines"]}
    assert gate["dead"]["value"].startswith("1 row ('home': body cannot be read: ")
    assert "see keywise dead list --pipeline pages --beside;" in gate["dead"]["advice"]
    [letter] = folder.keywise("dead", "list", "--pipeline", "pages", "--beside", "--json").json["letters"]
    assert (letter["key"], letter["version"]) == ("home", None)
    assert folder.keywise("dead", "list", "--json").json["letters"] == [], "live messages have letters of their own"
    assert "cause    body cannot be read" in folder.keywise("dead", "show", "--beside").out
    assert "body cannot be read" in folder.keywise("why", "home").out


def test_a_run_with_dead_rows_says_where_they_are(folder: Folder):
    break_row(folder)
    dry = folder.keywise("reindex", "start", "pages", "--dry-run")
    assert "malformed  'home': body cannot be read: a version is an integer" in dry.out
    with folder.start("run") as worker:
        waited = folder.keywise("reindex", "run", "pages")
        worker.send_signal(signal.SIGTERM)
        worker.communicate()
    line = "1 row could not be read or written; see keywise dead list --pipeline pages"
    assert (waited.status, waited.out) == (0, f"reindex 1 of pages is complete\n{line}\n")
    assert line in folder.keywise("reindex", "status", "pages").out
    [letter] = folder.keywise("dead", "list", "--json").json["letters"]
    assert letter["key"] == "home"


@pytest.mark.parametrize("command", ["verify", "swap", "rollback"])
def test_every_gate_takes_a_sample(folder: Folder, command: str):
    answer = folder.keywise("reindex", command, "pages", "--sample=0")
    assert (answer.status, answer.err) == (2, "Error: --sample 0: write how many keys, at least 1, or all\n")


def test_a_sample_in_place_is_refused(folder: Folder):
    answer = folder.keywise("reindex", "run", "pages", "--sample=all")
    assert (answer.status, answer.out) == (2, "")
    assert "--sample is for a target beside the live one" in answer.err


def test_the_limits_of_a_swap_are_those_of_its_own_request(folder: Folder):
    build(folder)
    shown = folder.keywise("reindex", "verify", "pages", "--sample=all")
    assert "the swap may begin: keywise reindex swap pages --sample all" in shown.out
    limits = []
    for option in (["--pause-max", "20s", "--sample", "7"], []):
        folder.keywise("reindex", "swap", "pages", "--yes", "--no-wait", *option)
        asked = folder.keywise("reindex", "status", "pages", "--json").json["run"]
        limits.append((asked["pause_max_s"], asked["sample_keys"]))
    assert limits == [(20, 7), (5, 500)]


def test_a_swap_for_which_nothing_may_wait_is_refused(folder: Folder):
    answer = folder.keywise("reindex", "swap", "pages", "--yes", "--pause-max", "0s")
    assert (answer.status, answer.out) == (2, "")
    assert "--pause-max 0s allows no swap" in answer.err
