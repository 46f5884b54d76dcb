"""The commands on a pipeline of objects, as an operator types them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.command import Answer, Folder, command, environment
from cli.terminal import Terminal

SHOP = """
import json
import pathlib

import keywise
from keywise import Record

app = keywise.App("sqlite:///shop.db")
store = f"file://{pathlib.Path('in').resolve()}"
logs = app.objects("logs", store=store, format="ndjson", part_records=2, poll="50ms", attempts_max=1)
logs.source("sqlite:///shop.db", dialect="uri")


@logs.apply
def write(records: list[Record]) -> None:
    with open("written.jsonl", "a") as file:
        for record in records:
            if pathlib.Path("closed").exists() and record.ordinal >= 2:
                raise OSError("closed")
            file.write(json.dumps([record.object, record.ordinal, record.deleted]) + "\\n")
"""
LONG = "x" * 200 + "/" + "y" * 200 + "/" + "z" * 200


class Uploads(Folder):
    """A folder with an app whose objects are in `in`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SHOP)
        (path / "in").mkdir()

    def put(self, name: str, *lines: str) -> str:
        file = self.path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))
        return f"file://{self.path}/in/{name}"

    def act(self, *arguments: str) -> Answer:
        """A command that has to succeed."""
        answer = self.keywise(*arguments)
        assert answer.status == 0, answer
        return answer

    def read(self, *uris: str) -> dict[str, Any]:
        self.act("send", "logs", *uris)
        return self.work()["logs"]

    def written(self) -> list[Any]:
        """The records that the handler was given since the last look: name, ordinal, whether deleted."""
        file = self.path / "written.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        return [(Path(uri).name, ordinal, deleted) for uri, ordinal, deleted in rows]


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path)


def test_an_object_is_sent_read_shown_forced_and_removed(uploads: Uploads):
    uri = uploads.put("a", "1", "2", "3")
    assert uploads.keywise("send", "logs", "-", stdin=f"{uri}\n\n").out == "sent 1 message to logs\n"
    assert uploads.work()["logs"]["applied"] == 1
    why = uploads.act("why", uri).out
    assert re.search(r"^content +ETag .*, 3 records$", why, re.MULTILINE)
    assert re.search(r"^store +has the same content: ETag .*, 6 B$", why, re.MULTILINE)
    assert "no version               is a duplicate: acked, nothing is read" in why
    found = uploads.act("why", uri, "--json").json["pipelines"][0]["object"]
    assert (found["content"]["records"], found["stored"]["size"], found["differs"]) == (3, 6, False)
    uploads.put("a", "4")
    why = uploads.act("why", uri).out
    assert "keywise force            announces it above all of these" in why
    assert "keywise objects backfill logs does so for every object whose content differs" in why
    forced = uploads.act("force", uri).out
    assert forced == f"announced {uri!r} again in logs, at no version; a worker reads it\n"
    uploads.written()
    uploads.work()
    assert uploads.written() == [("a", 0, False), ("a", 1, True), ("a", 2, True)]
    removed = uploads.act("remove", uri).out
    assert removed == f"announced {uri!r} again in logs, as removed, at no version; a worker deletes its records\n"
    uploads.work()
    assert uploads.written() == [("a", 0, True)]


def test_status_names_the_store_and_the_order_of_events(uploads: Uploads):
    store = f"file://{uploads.path}/in"
    assert f"logs: objects of {store}; their order is known from the first event" in uploads.act("status").out
    uploads.read(uploads.put("a", "1"))
    assert f"logs: objects of {store}; events have no version (once per object)" in uploads.act("status").out
    [figures] = uploads.act("status", "--json").json["pipelines"]
    order = {"scale": "unversioned", "promise": "once per object"}
    assert figures["objects"] == {"store": store, **order, "in_parts": 0, "largest": [], "cause": ""}


def test_a_long_uri_is_paused_and_shown_like_any_key(uploads: Uploads):
    uri = uploads.put(LONG, "1")
    uploads.read(uri)
    uploads.act("pause", uri)
    assert f"uri  {uri}" in re.sub(" +", "  ", uploads.act("why", uri).out)
    assert "it is paused, and a worker reads it once it is resumed" in uploads.act("force", uri).out
    uploads.act("resume", uri)
    assert uploads.work()["logs"]["applied"] == 1
    assert uploads.act("reset", uri).out.endswith("is in era 1: the next change wins\n")
    assert uploads.read(uri)["applied"] == 1


def test_letters_of_objects_and_records_are_replayed(uploads: Uploads):
    (uploads.path / "closed").touch()
    uri = uploads.put("a", "1", "2", "3", "4")
    assert uploads.read(uri, uploads.put("b", "1", "bad"))["dead"] == 1
    listed = uploads.act("dead", "list", "--json").json["letters"]
    assert sorted(letter["key"] for letter in listed) == [uri, f"file://{uploads.path}/in/b#1"]
    why = uploads.act("why", uri).out
    assert re.search(r"^position +no version: 2 records written, 4 B of 8 B read; the next message", why, re.MULTILINE)
    assert "record 1" in uploads.act("why", f"file://{uploads.path}/in/b").out
    (uploads.path / "closed").unlink()
    uploads.written()
    assert uploads.act("dead", "replay", "--all", "--yes").out == "replayed 2 letters\n"
    uploads.work()
    # In place of the bad record, an earlier content may have had a good one: it is deleted.
    assert sorted(uploads.written()) == [("a", 2, False), ("a", 3, False), ("b", 0, False), ("b", 1, True)]
    assert [letter["key"] for letter in uploads.act("dead", "list", "--json").json["letters"]] == [
        f"file://{uploads.path}/in/b#1"
    ]


def test_a_backfill_prints_its_counts(uploads: Uploads):
    uploads.put("a", "1")
    uploads.put("b", "1")
    facts = "0 unchanged, 0 being read, 0 skipped"
    dry = uploads.act("objects", "backfill", "logs", "--dry-run")
    assert dry.out == f"listed 2 objects: 2 to announce, {facts}\n"
    first = uploads.act("objects", "backfill", "logs", "--limit", "1", "--why", "ticket 7")
    assert first.out == f"listed 1 object: 1 announced, {facts}; the limit is reached, go on with --after 'a'\n"
    rest = uploads.act("objects", "backfill", "logs", "--after", "a", "--json").json
    assert (rest["pipeline"], rest["announced"], rest["is_listed"], rest["dry_run"]) == ("logs", 1, True, False)
    assert uploads.work()["logs"]["applied"] == 2
    (uploads.path / "in/a").unlink()
    gone = uploads.act("objects", "backfill", "logs")
    assert gone.out.endswith("; 1 is known and not listed, announced so that a worker asks the store\n")
    uploads.written()
    uploads.work()
    assert uploads.written() == [("a", 0, True)]


def test_a_backfill_leaves_what_an_operator_has_removed(uploads: Uploads):
    uri = uploads.put("a", "1")
    uploads.read(uri)
    uploads.act("remove", uri)
    uploads.work()
    assert re.search("^content +nothing: an operator removed it$", uploads.act("why", uri).out, re.MULTILINE)
    why = uploads.act("why", uri).out
    assert re.search("^store +has the content that was removed: ETag", why, re.MULTILINE)
    assert "keywise force " in why and "keywise objects backfill" not in why
    facts = "0 unchanged, 0 being read, 0 skipped"
    for arguments in ((), ("--dry-run",)):
        counts = uploads.act("objects", "backfill", "logs", *arguments, "--json").json
        assert (counts["announced"], counts["removed"]) == (0, 1)
    line = uploads.act("objects", "backfill", "logs").out
    assert line == f"listed 1 object: 0 announced, {facts}, 1 removed by an operator\n"
    brought = uploads.act("objects", "backfill", "logs", "--also-removed").out
    assert brought == f"listed 1 object: 1 announced, {facts}\n"


def test_a_backfill_in_a_terminal_leaves_one_line(uploads: Uploads):
    uploads.put("a", "1")
    arguments = command("objects", "backfill", "logs")
    terminal = Terminal(arguments, uploads.path, environment("shop:app"))
    assert terminal.end() == 0
    assert "listed 1 object: 1 announced, 0 unchanged, 0 being read, 0 skipped" in terminal.text


def expect(answer: Answer, status: int, *words: str) -> None:
    assert (answer.status, answer.out) == (status, ""), answer
    assert answer.err.startswith("Error: ") and answer.err.count("\n") == 1, answer.err
    assert all(word in answer.err for word in words), answer.err


def test_wrong_input_is_refused_with_what_to_write(uploads: Uploads):
    uploads.put("a", "1")
    expect(uploads.keywise("why", "s3://other/a"), 1, "'s3://other/a'", f"logs (file://{uploads.path}/in)")
    expect(uploads.keywise("force", "s3://other/a"), 1, "is not in", "give the URI of an object in it")
    expect(uploads.keywise("force", "s3://other/a", "--older"), 1, "leave out --older")
    expect(uploads.keywise("objects", "backfill", "loggs"), 2, "no pipeline is called 'loggs'; did you mean logs?")
    expect(uploads.keywise("reconcile"), 1, "keywise objects backfill logs --dry-run")


def test_an_empty_or_missing_folder_is_reported_and_nothing_announced(uploads: Uploads):
    uploads.read(uploads.put("a", "1"))
    (uploads.path / "in/a").unlink()
    expect(uploads.keywise("objects", "backfill", "logs"), 1, "as if it was not mounted", "0 objects announced so far")
    (uploads.path / "in").rmdir()
    expect(uploads.keywise("objects", "backfill", "logs"), 1, "is no folder; create or mount it")
    uploads.put("other", "1")
    assert uploads.work()["logs"]["applied"] == 0


def test_without_its_folder_the_status_and_a_key_are_shown_all_the_same(uploads: Uploads):
    """An operator looks just then."""
    uri = uploads.put("a", "1")
    uploads.read(uri)
    (uploads.path / "in/a").unlink()
    (uploads.path / "in").rmdir()
    status = uploads.keywise("status")
    assert status.status == 1
    assert "logs: their store gives no answer: " in status.out
    assert "is no folder; create or mount it" in status.out
    assert "logs cannot be shown in full; see the cause above" in status.err
    assert uploads.keywise("status", "--json").json["pipelines"][0]["keys"] == 1
    why = uploads.keywise("why", uri)
    assert why.status == 0, why
    assert "gives no answer: " in why.out


def test_nothing_is_announced_to_a_queue_in_memory(uploads: Uploads):
    uri = uploads.put("a", "1")
    uploads.write("shop.py", SHOP.replace('source("sqlite:///shop.db"', 'source("memory://"'))
    for arguments in (("force", uri), ("remove", uri), ("objects", "backfill", "logs")):
        expect(uploads.keywise(*arguments), 1, "a queue in memory that ends with this command")


def test_a_run_warns_of_announcements_of_another_store_and_counts_them(uploads: Uploads):
    uploads.act("send", "logs", "s3://in/a", "s3://in/b")
    ran = uploads.act("run", "--until-empty", "--plain")
    assert ran.err.count("misdirected") == 1
    assert f"'s3://in/a' is not in the store file://{uploads.path}/in" in ran.err
    header, row = [line.split() for line in ran.out.splitlines()[-2:]]
    assert row[header.index("ignored")] == "2"
