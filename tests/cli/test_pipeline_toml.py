"""Every command takes a TOML file where it takes an app, and tells no secret from the environment."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli.command import Answer, Folder

TOML = """
ledger = "sqlite:///${SHOP_DB}"

[pipeline.pages]
sources = ["sqlite:///${SHOP_DB}", { url = "sqlite:///${SHOP_DB}?queue=bulk" }]
sink = "sqlite:///${SHOP_DB}?table=stored"
key = "id"
version = "v"
deleted = { state = ["gone"] }
poll = "50ms"

[pipeline.mails]
sources = ["sqlite:///${SHOP_DB}"]
apply = "mailing:mail"
key = "id"
version = "v"
poll = "50ms"
retry = { attempts = 2, backoff = "10ms" }
"""
MAILING = """
import neighbour
from keywise import Change, PermanentError


def mail(change: Change[dict]) -> None:
    raise PermanentError(neighbour.CAUSE)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("SHOP_DB", "shop.db")
    folder = Folder(tmp_path, "raise SystemExit('nobody asked for this module')")
    folder.write("conf/pipeline.toml", TOML)
    folder.write("conf/mailing.py", MAILING)
    folder.write("conf/neighbour.py", "CAUSE = 'no such address'\n")
    return folder


def done(answer: Answer) -> Answer:
    assert (answer.status, answer.err) == (0, "")
    return answer


def test_every_command_takes_a_file_by_argument_option_or_variable(folder):
    app = ("--app", "conf/pipeline.toml")
    done(folder.keywise("send", "pages", '{"id": "a", "v": 2}', *app, app=None))
    done(folder.keywise("send", "mails", '{"id": "m", "v": 1}', app="conf/pipeline.toml"))
    ran = folder.keywise("run", "conf/pipeline.toml", "--until-empty", "--json", app=None)
    assert ran.status == 0, ran.err
    told = ran.json["pipelines"]
    assert (told["pages"]["outcomes"]["applied"], told["mails"]["outcomes"]["dead"]) == (1, 1)
    with closing(sqlite3.connect(folder.path / "shop.db")) as shop:
        assert shop.execute("select key, version from stored").fetchall() == [("a", 2)]
    pages, mails = done(folder.keywise("status", "--json", *app, app=None)).json["pipelines"]
    assert (pages["keys"], mails["dead"], len(pages["sources"])) == (1, 1, 2)
    assert "version 2" in done(folder.keywise("why", "a", *app, app=None)).out
    assert "no such address" in done(folder.keywise("dead", "list", *app, app=None)).out
    assert folder.keywise("dead", "show", "1", *app, app=None).status == 0
    assert folder.keywise("dead", "drop", "1", "--yes", *app, app=None).status == 0


def test_functions_are_found_in_the_folder_where_the_command_is_given_too(folder, monkeypatch):
    """Also if Python itself does not look there, as with the installed command."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (folder.path / "conf/mailing.py").rename(folder.path / "mailing.py")
    done(folder.keywise("status", app="conf/pipeline.toml"))


def expect(answer: Answer, status: int, *words: str) -> None:
    assert answer.status == status, answer
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert answer.err.startswith("Error: ")
    for word in words:
        assert word in answer.err


def test_a_file_that_is_no_app_is_told_with_what_to_write(folder, monkeypatch):
    expect(folder.keywise("status", app="pipeline.toml"), 2, "no file 'pipeline.toml'", str(folder.path))
    expect(folder.keywise("status", app="conf/pipeline.toml:app"), 2, "write conf/pipeline.toml")
    expect(folder.keywise("status", app="shop"), 2, "TOML file")
    folder.write("bad.toml", "ledger = sqlite")
    expect(folder.keywise("run", "bad.toml"), 1, "bad.toml is no TOML", "line 1")
    folder.write("bad.toml", TOML.replace("version =", "verson ="))
    expect(folder.keywise("status", app="bad.toml"), 1, "bad.toml: [pipeline.pages]", "did you mean version?")
    folder.write("empty.toml", 'ledger = "sqlite:///shop.db"')
    expect(folder.keywise("run", "empty.toml"), 1, "[pipeline.NAME]")
    folder.write("bad.toml", TOML.replace("mailing:mail", "broken:mail"))
    folder.write("broken.py", "import sys\n\n1 / 0\n")
    expect(folder.keywise("run", "bad.toml"), 1, "apply: broken cannot be imported", "broken.py, line 3")
    monkeypatch.delenv("SHOP_DB")
    expect(folder.keywise("run", "conf/pipeline.toml"), 1, "ledger", "environment variable SHOP_DB", "not set")


@pytest.mark.parametrize("arguments", [("run",), ("status",), ("send", "pages", "{}"), ("why", "a"), ("dead", "list")])
@pytest.mark.parametrize(
    "url", ["amqp://user:${SECRET}@host/q", "sqlite:///shop.db?visibility=${SECRET}", "${SECRET}", "x://${SECRET}"]
)
def test_a_secret_from_the_environment_is_never_told(folder, monkeypatch, arguments, url):
    monkeypatch.setenv("SECRET", "hunter2/p@ss")
    folder.write("shop.toml", TOML.replace('["sqlite:///${SHOP_DB}",', f'["{url}",'))
    answer = folder.keywise(*arguments, app="shop.toml")
    assert answer.status == 1
    assert "hunter2" not in answer.out + answer.err
    assert "p@ss" not in answer.out + answer.err


def test_sources_are_shown_as_they_are_written(folder, monkeypatch):
    monkeypatch.setenv("QUEUE", "hunter2")
    folder.write("shop.toml", TOML.replace("queue=bulk", "queue=${QUEUE}").replace("mailing:mail", "conf.mailing:mail"))
    folder.write("neighbour.py", "CAUSE = 'no such address'\n")
    done(folder.keywise("send", "pages", '{"id": 5}', app="shop.toml"))
    ran = folder.keywise("run", "shop.toml", "--until-empty", "--json")
    status = done(folder.keywise("status", "--json", app="shop.toml"))
    letter = done(folder.keywise("dead", "show", "1", app="shop.toml"))
    assert "queue=${QUEUE}" in ran.err
    assert [one["source"] for one in status.json["pipelines"][0]["sources"]][1] == "sqlite:///${SHOP_DB}?queue=${QUEUE}"
    assert "sqlite:///${SHOP_DB}" in letter.out
    assert "hunter2" not in ran.out + ran.err + status.out + letter.out
