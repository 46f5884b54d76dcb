"""The command line from the first message to the last dead letter, as a new user types it."""

import json
import os
import pty
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

import keywise
from causes import said
from cli.command import LIMIT_S, Folder, command, environment
from running import scaled

ACTS = ("pause", "resume", "reset", "force", "remove", "repair", "reconcile", "prune")
ODD_KEY = 'it\'s "odd"\n\x1b[31m[red]x[/red] :smile: \U0001f600'


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def body(key: str, version: int, **more: object) -> str:
    return json.dumps({"id": key, "v": version, **more})


def test_the_version_is_printed(folder):
    assert folder.keywise("--version").out == f"keywise {keywise.__version__}\n"


def test_help_lists_every_command_with_one_line_each(folder):
    answer = folder.keywise("--help")
    for name in ("run", "send", "status", "why", "dead", "simulate", *ACTS):
        assert f"\n  {name} " in answer.out
    assert "..." not in answer.out.partition("Commands:")[2], "no line is cut"


@pytest.mark.parametrize(
    "name", ["run", "send", "status", "why", "simulate", "dead list", "dead show", "dead replay", "dead drop", *ACTS]
)
def test_every_command_has_an_example_and_json(folder, name):
    answer = folder.keywise(*name.split(), "--help")
    assert answer.status == 0
    assert f"Example:\n    keywise {name}" in answer.out
    assert "--json" in answer.out


def test_messages_are_sent_applied_and_counted(folder):
    sent = folder.keywise("send", "pages", body("a", 1), body("a", 3), body("a", 2), body("b", 1, state="gone"))
    assert (sent.status, sent.out) == (0, "sent 4 messages to pages\n")
    assert folder.work()["pages"] == {
        "applied": 2,
        "stale": 0,
        "duplicate": 0,
        "superseded": 2,
        "removed": 0,
        "dead": 0,
        "ignored": 0,
    }
    with closing(sqlite3.connect(folder.path / "shop.db")) as shop:
        assert shop.execute("select key, version from stored").fetchall() == [("a", 3)]


def test_status_shows_grade_way_depth_and_figures(folder):
    folder.keywise("send", "pages", body("a", 1), body("b", 1, state="gone"))
    folder.work()
    folder.keywise("send", "pages", body("a", 2), "--delay", "1h")
    pages, mails = folder.keywise("status", "--json").json["pipelines"]
    assert (pages["grade"], mails["grade"]) == ("atomic", "plain")
    assert [(one["strategy"], one["depth"]) for one in pages["sources"]] == [
        ("queue_transaction", 1),
        ("queue_transaction", 0),
    ]
    assert {name: pages[name] for name in ("keys", "tombstones", "claims", "suspects", "dead")} == {
        "keys": 2,
        "tombstones": 1,
        "claims": 0,
        "suspects": 0,
        "dead": 0,
    }
    table = folder.keywise("status", "--pipeline", "pages").out
    assert table.splitlines()[1].split() == ["pages", "atomic", "2", "1", "0", "0", "0"]
    assert "mails" not in table


def test_one_document_per_line_is_read_from_stdin(folder):
    lines = "".join(body(f"key-{number}", 1) + "\n" for number in range(2500)) + "\n" + body("last", 1)
    sent = folder.keywise("send", "pages", "-", "--json", stdin=lines)
    assert sent.json == {"pipeline": "pages", "sent": 2501}
    assert sent.err == ""
    assert folder.work()["pages"]["applied"] == 2501


def test_the_lines_before_a_broken_one_are_sent_and_it_is_named(folder):
    answer = folder.keywise("send", "pages", stdin=f"{body('a', 1)}\n\n{{oops\n{body('b', 1)}\n")
    assert answer.status == 1
    assert "line 3" in answer.err and "sent so far: 1 message" in answer.err
    assert folder.work()["pages"]["applied"] == 1


def test_what_arrives_slowly_is_sent_at_once(folder):
    process = folder.start("send", "pages", stdin=subprocess.PIPE)
    process.stdin.write(body("a", 1) + "\n")
    process.stdin.flush()
    # The stream is still open, and a batch would be far from full.
    while folder.keywise("status", "--json").json["pipelines"][0]["sources"][0]["depth"] == 0:
        assert process.poll() is None
    out, _ = process.communicate(body("b", 1), timeout=scaled(LIMIT_S))
    assert out == "sent 2 messages to pages\n"


def test_a_line_without_end_is_given_up(folder):
    answer = folder.keywise("send", "pages", stdin=b'"' + b"x" * (9 << 20))
    assert answer.status == 1
    assert "line 1" in answer.err


def test_why_tells_the_mark_and_what_happens_next(folder):
    folder.keywise("send", "pages", body("a", 7), body("b", 2, state="gone"))
    folder.work()
    text = folder.keywise("why", "a").out
    for line in ("version 7, committed", "up to version 6", "is stale", "is a duplicate", "version 8 or above"):
        assert line in text
    [story] = folder.keywise("why", "b", "--json").json["pipelines"]
    assert (story["mark"]["version"], story["mark"]["deleted"], story["mark"]["kept_until"]) == (2, True, None)
    assert [(one["lowest"], one["highest"], one["answer"]) for one in story["next"]] == [
        (None, 1, "stale"),
        (2, 2, "duplicate"),
        (3, None, "granted"),
    ]


def test_why_says_that_it_does_not_know_a_key(folder):
    answer = folder.keywise("why", "nobody", "--pipeline", "pages")
    assert (answer.status, answer.out) == (1, "")
    assert "'nobody'" in answer.err and "keywise status" in answer.err


def test_an_odd_key_is_shown_escaped_and_never_obeyed(folder):
    folder.keywise("send", "mails", body(ODD_KEY, 1, bad=True))
    folder.work()
    for shown in (folder.keywise("why", ODD_KEY), folder.keywise("dead", "list"), folder.keywise("dead", "show", "1")):
        assert shown.status == 0
        assert repr(ODD_KEY) in shown.out
        assert "\x1b" not in shown.out
    assert folder.keywise("why", ODD_KEY, "--json").json["key"] == ODD_KEY
    assert "\x1b[31m" not in in_a_terminal(folder, "why", ODD_KEY)
    assert "\x1b[1m" in in_a_terminal(folder, "why", ODD_KEY), "a terminal gets bold names"


def test_a_fresh_dead_letter_is_replayed_and_applied(folder):
    folder.keywise("send", "mails", body("a", 1, bad=True))
    assert folder.work()["mails"]["dead"] == 1
    # What was wrong is put right, and the letter has its second chance.
    text = (folder.path / "shop.py").read_text()
    folder.write("shop.py", text.replace('change.value.get("bad")', "False"))
    replayed = folder.keywise("dead", "replay", "1", "--json")
    assert (replayed.status, replayed.json) == (0, {"replayed": [1], "refused": []})
    assert folder.work()["mails"]["applied"] == 1
    assert folder.keywise("dead", "list").out == "no dead letters\n"


def test_a_stale_dead_letter_is_refused_and_stays(folder):
    folder.keywise("send", "mails", body("a", 1, bad=True), body("b", 1, bad=True))
    folder.work()
    folder.keywise("send", "mails", body("a", 5))
    folder.work()
    refused = folder.keywise("dead", "replay", "--all", "--yes")
    assert (refused.status, refused.out) == (1, "replayed 1 letter\n")
    assert "version 1 of 'a'" in refused.err and "mark is version 5" in refused.err
    assert [one["key"] for one in folder.keywise("dead", "list", "--json").json["letters"]] == ["a"]


def test_a_dead_letter_is_not_replayed_into_the_memory_of_a_command_that_ends(folder):
    folder.keywise("send", "mails", body("a", 1, bad=True))
    folder.work()
    text = (folder.path / "shop.py").read_text()
    folder.write("shop.py", text.replace('mails.source("sqlite:///shop.db")', 'mails.source("memory://")'))
    refused = folder.keywise("dead", "replay", "1")
    assert refused.status == 1 and "letter 1 stays" in refused.err
    assert folder.keywise("dead", "list", "--json").json["dead"] == 1


def test_an_unreadable_dead_letter_is_refused_until_it_can_be_read(folder):
    folder.keywise("send", "mails", '{"id": 5, "v": 1}')
    folder.work()
    refused = folder.keywise("dead", "replay", "1")
    assert refused.status == 1
    assert "Expected `str`, got `int`" in refused.err
    text = (folder.path / "shop.py").read_text()
    read = "read=lambda said: keywise.Put(str(said['id']), said['v'])"
    folder.write("shop.py", text.replace('"mails", key="id", version="v"', f'"mails", {read}'))
    assert folder.keywise("dead", "replay", "1").status == 0
    assert folder.work()["mails"]["applied"] == 1


def test_dead_letters_are_listed_newest_first_and_shown_whole(folder):
    for number in (1, 2, 3):
        folder.keywise("send", "mails", body(f"key-{number}", number, broken=True))
        folder.work()
    listed = folder.keywise("dead", "list", "--limit", "2")
    assert [line.split()[0] for line in listed.out.splitlines()[1:3]] == ["3", "2"]
    assert "2 of 3" in listed.out
    letter = folder.keywise("dead", "show", "2", "--json").json
    assert (letter["key"], letter["version"], said(letter["cause"])) == ("key-2", 2, "ValueError: broken")
    assert letter["body"] == body("key-2", 2, broken=True)
    assert body("key-2", 2, broken=True) in folder.keywise("dead", "show", "2").out


def test_the_traceback_of_a_handler_is_in_the_log_the_dead_letter_and_why(folder):
    folder.keywise("send", "mails", body("a", 1, broken=True))
    log = folder.keywise("run", "--until-empty").err
    letter = folder.keywise("dead", "show", "1", "--json").json
    assert letter["cause"].startswith("ValueError: broken (shop.py, line ")
    traceback = letter["traceback"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert "    raise ValueError(" in traceback and traceback.endswith("\nValueError: broken")
    assert traceback in folder.keywise("dead", "show", "1").out
    assert traceback in folder.keywise("why", "a").out
    assert traceback in log.replace("\n  ", "\n")
    assert folder.keywise("why", "a", "--json").json["pipelines"][0]["letters"][0]["traceback"] == traceback


def test_dead_letters_are_dropped(folder):
    folder.keywise("send", "mails", body("a", 1, bad=True), body("b", 1, bad=True))
    folder.work()
    assert folder.keywise("dead", "drop", "1", "--yes").out == "dropped 1 letter\n"
    assert folder.keywise("dead", "drop", "2", "--yes", "--json").json == {"dropped": 1}
    gone = folder.keywise("dead", "drop", "1", "2", "--yes")
    assert (gone.status, gone.err) == (1, "Error: no dead letter has the number 1 or 2; see keywise dead list\n")


def in_a_terminal(folder: Folder, *arguments: str) -> str:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(*arguments), cwd=folder.path, env=environment("shop:app"), stdout=theirs):
        os.close(theirs)
        with open(ours, "rb", buffering=0) as terminal:
            said = b""
            try:
                while part := terminal.read(65536):
                    said += part
            except OSError:
                pass  # The other side is closed, and everything was read.
    return said.decode()


def test_a_lane_is_sent_to_by_its_name(tmp_path):
    text = """
import keywise
app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v").source("sqlite:///shop.db").sink("sqlite:///shop.db?table=pages")
pages.source("sqlite:///shop.db?queue=resync", lane="bulk")
only = app.pipeline("only", key="id", version="v").source("sqlite:///shop.db?queue=only").sink("sqlite:///shop.db?table=o")
"""
    folder = Folder(tmp_path, text)
    for lane in ("bulk", "bulk", "live"):
        assert folder.keywise("send", "pages", body("a", 1), "--lane", lane).status == 0
    sources = folder.keywise("status", "--json", "--pipeline", "pages").json["pipelines"][0]["sources"]
    assert [source["depth"] for source in sources] == [1, 2]
    wrong = folder.keywise("send", "pages", body("a", 1), "--lane", "slow")
    assert (wrong.status, "write one of live, bulk" in wrong.err) == (2, True)
    missing = folder.keywise("send", "only", body("a", 1), "--lane", "bulk")
    assert (missing.status, "no source in the lane 'bulk'; call .source(URL, lane=\"bulk\")" in missing.err) == (
        2,
        True,
    )
