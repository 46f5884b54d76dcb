"""Dead letters by time and cause: which are listed, shown, sent again and dropped, and what the history says of it."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cli.admin_shop import Office
from cli.command import SHOP, command, environment
from cli.terminal import Terminal

WHY = ("--why", "mended", "--who", "ada@desk")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    """Three letters of mails: one that is bad, and two that are broken, of which the second is the newest."""
    office = Office(tmp_path)
    office.write("shop.py", SHOP)
    for key, more in (("a", {"broken": True}), ("b", {"bad": True}), ("c", {"broken": True})):
        office.keywise("send", "mails", json.dumps({"id": key, "v": 1, **more}))
        office.work()
    yield office
    office.close()


def age(office: Office, number: int, seconds: float) -> None:
    """As if a letter had been buried earlier."""

    with closing(sqlite3.connect(office.path / "shop.db")) as file, file:
        file.execute("update keywise_letters set buried_at = buried_at - ? where id = ?", (seconds, number))


def listed(office: Office, *filters: str) -> list[str]:
    return [one["key"] for one in office.keywise("dead", "list", "--json", *filters).json["letters"]]


def mend(office: Office) -> None:
    text = (office.path / "shop.py").read_text()
    office.write("shop.py", text.replace('change.value.get("broken")', "False"))


def test_letters_are_listed_by_cause_and_time(office):
    age(office, 1, 7200)
    age(office, 2, 3600)
    assert listed(office) == ["c", "b", "a"]
    assert listed(office, "--cause", "ValueError") == ["c", "a"]
    assert listed(office, "--cause", "no such") == ["b"]
    assert listed(office, "--since", "90m") == ["c", "b"]
    assert listed(office, "--until", "30m") == ["b", "a"]
    assert listed(office, "--since", "90m", "--until", "30m") == ["b"]
    assert listed(office, "--since", "90m", "--cause", "ValueError") == ["c"]
    assert listed(office, "--since", "2001-01-01T00:00") == ["c", "b", "a"]
    assert listed(office, "--until", "2001-01-01 00:00:00 UTC") == []
    assert listed(office, "--since", datetime.now(UTC).replace(year=2100).isoformat()) == []
    assert office.keywise("dead", "list", "--cause", "nothing").out == "none of 3 dead letters matches\n"
    assert office.keywise("dead", "list", "--cause", "no such").out.endswith("\n1 of 3\n"), "a limit hides none"
    assert office.keywise("dead", "list", "--limit", "2").out.endswith("\n2 of 3; see more with --limit\n")
    wrong = office.keywise("dead", "list", "--since", "yesterday")
    assert wrong.status == 2 and "--since: 'yesterday' is no time" in wrong.err


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_shows_every_column(office, columns):
    """Without the number, nobody could show or replay a letter."""
    long = "file:///somewhere/with/a/long/path/of/an/object.ndjson"
    office.keywise("send", "mails", json.dumps({"id": long, "v": 1, "bad": True}))
    office.work()
    terminal = Terminal(command("dead", "list"), office.path, environment("shop:app"), columns=columns)
    assert terminal.end() == 0
    shown = terminal.text.split()
    assert shown[:6] == ["number", "when", "pipeline", "key", "version", "cause"]
    assert {"4", "mails"} <= set(shown)


def test_the_newest_letter_that_fits_is_shown_without_a_number(office):
    assert office.keywise("dead", "show", "--json").json["key"] == "c"
    assert office.keywise("dead", "show", "--cause", "no such", "--json").json["key"] == "b"
    assert office.keywise("dead", "show", "--cause", "nothing").status == 1
    assert office.keywise("dead", "show", "1", "--cause", "no such").status == 2


def test_letters_that_fit_are_sent_again_after_a_question(office):
    mend(office)
    unasked = office.keywise("dead", "replay", "--cause", "ValueError")
    assert unasked.status == 2
    assert "Send 2 letters again?" in unasked.err and "pass --yes" in unasked.err
    assert len(listed(office)) == 3
    status, shown = office.typed("y\n", "dead", "replay", "--cause", "ValueError", *WHY)
    assert status == 0 and "replayed 2 letters" in shown
    assert office.work()["mails"]["applied"] == 2
    assert listed(office) == ["b"]
    assert office.lines("replayed") == [
        ("replayed", "a", 1, "letter 1; mended", "ada@desk"),
        ("replayed", "c", 1, "letter 3; mended", "ada@desk"),
    ]


def test_one_letter_is_sent_again_without_a_question(office):
    mend(office)
    assert office.keywise("dead", "replay", "1").status == 0
    assert office.work()["mails"]["applied"] == 1


def test_after_a_reset_an_old_letter_is_news_again(office):
    mend(office)
    office.keywise("send", "mails", '{"id": "a", "v": 9}')
    office.work()
    stale = office.keywise("dead", "replay", "1")
    assert stale.status == 1 and "its mark is version 9" in stale.err
    office.act("reset", "a", "--pipeline", "mails")
    assert office.keywise("dead", "replay", "1").status == 0
    assert office.work()["mails"]["applied"] == 1


def test_letters_that_fit_are_dropped_after_a_question(office):
    age(office, 1, 7200)
    assert office.keywise("dead", "drop", "--until", "1h").status == 2
    status, shown = office.typed("n\n", "dead", "drop", "--all")
    assert status == 1 and "Delete 3 letters for ever?" in shown and "nothing was done" in shown
    assert office.keywise("dead", "drop", "--until", "1h", "--yes", *WHY).out == "dropped 1 letter\n"
    assert listed(office) == ["c", "b"]
    assert office.keywise("dead", "drop", "--all", "--yes", "--json").json == {"dropped": 2}
    assert office.lines("dropped")[0] == ("dropped", "a", 1, "letter 1; mended", "ada@desk")
    assert office.keywise("dead", "drop", "--all", "--yes").out == "dropped 0 letters\n"
    for arguments in (["drop"], ["drop", "1", "--all"], ["replay", "1", "--cause", "x"]):
        assert office.keywise("dead", *arguments).status == 2
