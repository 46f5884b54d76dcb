"""The view of a run as somebody at a terminal sees it: while it works, when it ends, and however it ends."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from rich.cells import cell_len

from cli.command import LIMIT_S, Folder, command, environment
from cli.commands.test_run import HANGING
from cli.terminal import Terminal
from example_runs.test_publishing_house import MAIN, ROOT
from keywise.app import SAME_WISH_S
from running import scaled

EVIL = "\x1b[2J\x1b[31m[bold]red[/bold]\r\n\u202e"
TOLD = "\\x1b[2J\\x1b[31m[bold]red[/bold]\\r\\n\\u202e"

NOISY = """
import logging
import keywise
from keywise import Change, Retry

logging.basicConfig(format="MINE %(message)s")
app = keywise.App("sqlite:///shop.db")
mails = app.pipeline("mails", key="id", version="v", retry=Retry(attempts=2, backoff="10ms"), poll="50ms")
mails.source("sqlite:///shop.db")


@mails.apply
def mail(change: Change[dict]) -> None:
    print("printed by the handler")
    raise ValueError("refused " + change.key)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def start(folder: Folder, *arguments: str, columns: int = 80) -> Terminal:
    return Terminal(command(*arguments), folder.path, environment("shop:app"), columns=columns)


def test_the_view_is_drawn_and_the_summary_follows(folder):
    folder.keywise("send", "pages", '{"id": "a", "v": 1}', '{"id": "b", "v": 1}')
    terminal = start(folder, "run", "--until-empty")
    assert terminal.end() == 0
    text = terminal.text
    assert "pages: atomic (each effect exactly once), queue_transaction" in text
    frame, _, summary = text.rpartition("pages  stopped  atomic")[2].partition("\npipeline")
    assert "applied 2" in frame and "mails  stopped  plain" in frame
    assert summary.split()[:2] == ["applied", "stale"]
    assert terminal.shows_cursor


@pytest.mark.parametrize("columns", [80, 40])
def test_hostile_keys_and_causes_are_shown_and_not_obeyed_and_lines_stay_whole(folder, columns):
    folder.write("shop.py", NOISY)
    folder.keywise("send", "mails", json.dumps({"id": EVIL, "v": 1}))
    terminal = start(folder, "run", "--until-empty", columns=columns)
    assert terminal.end() == 0
    assert "\x1b[2J" not in terminal.raw and "\u202e" not in terminal.raw
    lines = terminal.text.splitlines()
    assert lines.count("printed by the handler") == 2
    assert [line for line in lines if line.startswith("MINE dead letter pipeline='mails'")]
    frame, _, summary = (
        part.splitlines() for part in terminal.text.rpartition("mails  stopped")[2].partition("\npipe")
    )
    assert all(cell_len(line) <= columns for line in summary)
    assert " ".join(summary).count(" dead ") == 1, "no column is cut off"
    assert all(cell_len(line) <= columns for line in frame)
    assert TOLD[:20] in "".join(line.strip() for line in frame)


def test_a_signal_drains_and_the_last_frame_stays(folder):
    terminal = start(folder, "run")
    terminal.wait_for(lambda text: "mails  running" in text)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 0
    assert "mails  stopped" in terminal.text and "\npipeline " in terminal.text
    assert terminal.shows_cursor


def test_a_second_signal_leaves_a_cursor_and_a_fresh_line(folder):
    folder.write("shop.py", HANGING.format(drain="10m"))
    folder.keywise("send", "slow", '{"id": "a", "v": 1}')
    terminal = start(folder, "run")
    terminal.wait_for(lambda text: "begun" in text)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(lambda text: "slow  draining" in text)
    threading.Timer(SAME_WISH_S, terminal.process.send_signal, [signal.SIGINT]).start()
    assert terminal.end() == 128 + signal.SIGINT
    assert terminal.shows_cursor
    assert terminal.text.endswith("\n")


def test_an_error_at_the_start_is_the_last_line_and_the_only_news(folder):
    (folder.path / "shop.db").mkdir()
    terminal = start(folder, "run")
    assert terminal.end() == 1
    assert terminal.text.strip().startswith("Error: shop.db: ")
    assert terminal.shows_cursor


@pytest.mark.parametrize("dumb", [False, True], ids=["asked for", "a terminal that cannot draw"])
def test_lines_instead_of_the_view(folder, dumb):
    folder.keywise("send", "pages", '{"id": "a", "v": 1}')
    arguments = command("run", "shop:app", "pages", "--until-empty", *([] if dumb else ["--plain"]))
    if dumb:
        arguments = ["env", "TERM=dumb", *arguments]
    terminal = Terminal(arguments, folder.path, environment("shop:app"))
    assert terminal.end() == 0
    before, _, after = terminal.raw.partition("INFO pages: stopped, 1 change in ")
    assert after and "\x1b" not in before


def test_a_log_has_one_line_for_each_pipeline_at_the_end(folder):
    folder.keywise("send", "pages", '{"id": "a", "v": 1}')
    answer = folder.keywise("run", "shop:app", "--until-empty")
    told = [line.partition(" INFO ")[2] for line in answer.err.splitlines() if " in " in line]
    assert [line.split(",")[0] for line in told] == ["pages: stopped", "mails: stopped"]
    assert told[0].endswith("; 1 applied")


def test_the_publishing_house_shows_the_view_and_ends_as_it_does_elsewhere(tmp_path):
    size = ("--events", "2000", "--documents", "200", "--folder", str(tmp_path))
    terminal = Terminal([sys.executable, str(MAIN), *size], ROOT, os.environ)
    assert terminal.end() == 0
    frame, _, report = terminal.text.rpartition("search  stopped  atomic")[2].partition("\nThe table beside the truth")
    assert "rate     average " in frame
    assert "keywise: 0\n" in report and report.rstrip().endswith("house.py:app")
    assert terminal.shows_cursor


def test_the_status_is_watched_until_ctrl_c(folder):
    terminal = start(folder, "status", "--watch", "--every", "100ms", "--pipeline", "mails")
    terminal.wait_for(lambda text: "mails         0  leased" in text)
    folder.keywise("send", "mails", '{"id": "a", "v": 1}')
    terminal.wait_for(lambda text: "mails         1  leased" in text)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text and "Abort" not in terminal.text


def test_a_watched_status_as_json_is_one_line_for_each_look(folder):
    process = folder.start("status", "--watch", "--every", "100ms", "--json")
    told = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=scaled(LIMIT_S))
    assert (process.returncode, err.strip()) == (0, "")
    assert [one["pipelines"][0]["pipeline"] for one in told] == ["pages"] * 3
    assert told[0]["at"] < told[1]["at"] < told[2]["at"]
