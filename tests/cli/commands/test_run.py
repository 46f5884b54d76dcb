"""`keywise run` as an operator meets it: what it promises, how it drains, and how it ends."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import LIMIT_S, Folder
from keywise.app import SAME_WISH_S
from keywise.cli.commands.run import _print_totals
from keywise.core import events
from keywise.core.change import Outcome
from keywise.observe.run_view import View
from running import scaled
from servers import machine

HANGING = """
import threading
import keywise
from keywise import Change

app = keywise.App("sqlite:///shop.db")
slow = app.pipeline("slow", key="id", version="v", drain="{drain}", poll="50ms")
slow.source("sqlite:///shop.db")


@slow.apply
def hang(change: Change[dict]) -> None:
    print("begun", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def line(process: subprocess.Popen[str], word: str) -> str:
    """Wait for a line on stderr."""
    for said in process.stderr:
        if word in said:
            return said
    pytest.fail(f"the command ended without saying {word!r}")


def test_grade_promise_and_way_of_each_source_are_said_at_the_start(folder):
    answer = folder.keywise("run", "shop:app", "--until-empty")
    assert answer.status == 0
    for said in (
        "pages: atomic (each effect exactly once), queue_transaction, from sqlite:///shop.db\n",
        "pages: atomic (each effect exactly once), queue_transaction, from sqlite:///shop.db?queue=bulk\n",
        "mails: plain (at least once, ends at the newest), leased, from sqlite:///shop.db\n",
    ):
        assert said in answer.err
    assert [row.split()[0] for row in answer.out.splitlines()] == ["pipeline", "pages", "mails"]
    assert "\x1b" not in answer.out + answer.err


def test_an_end_with_nothing_running_is_one_line_for_each_pipeline(folder):
    err = folder.keywise("run", "shop:app", "--until-empty").err
    assert "draining" not in err
    assert [said.count("stopped") for said in err.splitlines() if "stopped" in said] == [1, 1]


def test_the_level_of_the_log_can_be_chosen(folder):
    folder.keywise("send", "mails", '{"id": "a", "v": 1}')
    debug = folder.keywise("run", "shop:app", "mails", "--until-empty", "--log-level", "debug").err
    assert " DEBUG settled pipeline='mails' outcome='applied' changes=1" in debug
    quiet = folder.keywise("run", "shop:app", "mails", "--until-empty", "--log-level", "warning").err
    assert "INFO" not in quiet and "stopped" not in quiet
    answer = folder.keywise("run", "shop:app", "mails", "--until-empty", "--log-level", "loud")
    assert answer.status == 2
    assert "'loud' is not known; write one of debug, info, warning, error" in answer.err


AWAY = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", backoff="10ms")
pages.source("amqp://shop:s3cret@127.0.0.1:{port}/?queue=pages")
pages.apply(lambda change: None)
"""


@pytest.mark.parametrize("arguments", [(), ("--until-empty",)])
def test_a_broker_that_is_away_at_the_start_is_waited_for_with_one_line(folder, arguments):
    folder.write("shop.py", AWAY.format(port=(port := machine.free_port())))
    process = folder.start("run", "shop:app", *arguments)
    said = line(process, "pages")
    assert said.startswith(f"pages waits to start: amqp://shop:***@127.0.0.1:{port}/")
    assert said.endswith("; keywise tries again until it can be reached (--no-wait exits instead)\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    assert (process.returncode, "waits to start" in err, "s3cret" in err) == (len(arguments), False, False)
    assert [row.split()[0] for row in out.splitlines()] == ["pipeline", "pages"], "what is known: nothing was done"


def test_until_empty_that_is_stopped_before_says_so_and_fails(folder):
    folder.write("shop.py", AWAY.format(port=machine.free_port()))
    process = folder.start("run", "shop:app", "--until-empty", "--json")
    line(process, "waits to start")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    assert process.returncode == 1
    assert err.endswith("Error: stopped before all queues of pages were empty\n")
    assert json.loads(out)["pipelines"]["pages"]["outcomes"]["applied"] == 0


def test_a_broker_that_is_away_ends_a_worker_that_may_not_wait(folder):
    folder.write("shop.py", AWAY.format(port=machine.free_port()))
    answer = folder.keywise("run", "shop:app", "--no-wait")
    assert answer.status == 1
    assert answer.err.startswith("Error: amqp://shop:***@127.0.0.1:")


SILENT = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v")
pages.source("{url}")
pages.apply(lambda change: None)
"""


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of a server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("amqp://shop:s3cret@127.0.0.1:{}/?queue=pages", ()),
        ("postgresql://shop:s3cret@127.0.0.1:{}/shop", ("--no-wait",)),
        ("amqp://shop:s3cret@127.0.0.1:{}/?queue=pages", ("--until-empty",)),
    ],
)
def test_a_server_that_does_not_answer_is_named_and_a_signal_ends_the_wait(folder, silent_port, url, arguments):
    folder.write("shop.py", SILENT.format(url=url.format(silent_port)))
    process = folder.start("run", "shop:app", *arguments)
    said = line(process, "pages")
    assert said.startswith("pages waits to start: ") and f"***@127.0.0.1:{silent_port}/" in said
    assert said.endswith(": no answer yet\n"), "long before the attempt has failed"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=scaled(LIMIT_S))
    assert (process.returncode, "were empty" in err) == ((1, True) if "--until-empty" in arguments else (0, False))


def test_only_the_named_pipelines_run(folder):
    for pipeline in ("pages", "mails"):
        folder.keywise("send", pipeline, '{"id": "a", "v": 1}')
    answer = folder.keywise("run", "shop:app", "mails", "--until-empty", "--json")
    assert list(answer.json["pipelines"]) == ["mails"]
    assert answer.json["pipelines"]["mails"]["outcomes"]["applied"] == 1
    pages, mails = folder.keywise("status", "--json").json["pipelines"]
    assert (pages["sources"][0]["depth"], mails["sources"][0]["depth"]) == (1, 0)


def test_until_empty_waits_for_retries(folder):
    folder.keywise("send", "mails", '{"id": "a", "v": 1, "broken": true}')
    answer = folder.keywise("run", "shop:app", "--until-empty", "--json")
    told = answer.json["pipelines"]["mails"]
    assert (told["failed_attempts"], told["outcomes"]["dead"]) == (1, 1)
    assert "WARNING failed" in answer.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_summary_follows(folder, number):
    process = folder.start("run", "shop:app")
    line(process, "mails: plain")
    process.send_signal(number)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    assert process.returncode == 0
    assert "mails: stopped, 0 changes" in err
    assert out.startswith("pipeline ")


def test_a_hung_handler_does_not_keep_the_process(folder):
    folder.write("shop.py", HANGING.format(drain="100ms"))
    folder.keywise("send", "slow", '{"id": "a", "v": 1}')
    process = folder.start("run", "shop:app")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    assert process.returncode == 0
    assert out.startswith("pipeline "), err
    [said] = [one for one in err.splitlines() if "WARNING" in one]
    assert said.endswith(
        "slow stopped while 1 change was still running ('a'), because the time of `drain` was over; "
        "it runs again when its lease has expired, or earlier"
    )


def test_a_signal_that_comes_twice_at_once_is_one(folder):
    """As GNU timeout sends it: to the process, and to its group."""
    folder.write("shop.py", HANGING.format(drain="100ms"))
    folder.keywise("send", "slow", '{"id": "a", "v": 1}')
    process = folder.start("run", "shop:app")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    assert process.returncode == 0
    assert out.startswith("pipeline "), err


def test_a_second_signal_leaves_at_once_and_the_claim_stays(folder):
    folder.write("shop.py", HANGING.format(drain='10m", lease="10m'))
    folder.keywise("send", "slow", '{"id": "a", "v": 1}')
    process = folder.start("run", "shop:app")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    said = line(process, "draining")
    assert said.startswith("slow is draining: it waits for 1 change that has begun ('a'), at most 10 min; ")
    assert said.endswith("a second Ctrl-C or signal leaves at once, and its lease expires\n")
    threading.Timer(SAME_WISH_S, process.send_signal, [signal.SIGTERM]).start()
    _, err = process.communicate(timeout=scaled(LIMIT_S))
    assert process.returncode == 128 + signal.SIGTERM
    assert err.endswith(
        "slow left while 1 change was still running ('a'); it runs again when its lease has expired, or earlier\n"
    )
    [story] = folder.keywise("why", "a", "--json").json["pipelines"]
    assert story["holder"] is not None
    text = folder.keywise("why", "a").out
    assert "held by" in text and "intent  version 1" in text and "waits for the key" in text
    waiting = folder.start("run", "shop:app", "--until-empty")
    said = line(waiting, "--until-empty waits")
    assert "slow: --until-empty waits for 1 change that another worker has begun ('a'); " in said
    assert "if that worker is dead, this one takes the change over when the lease expires, in " in said
    waiting.send_signal(signal.SIGTERM)
    waiting.communicate(timeout=scaled(LIMIT_S))


def test_the_summary_counts_rows_of_removed_keys_once_there_are_some(capsys):
    view = View(["pages", "mails"])
    for removed in (0, 3):
        view(events.Settled(pipeline="mails", outcome=Outcome.REMOVED, changes=removed))
        _print_totals(view, False, 1.0)
        header, _, mails = capsys.readouterr().out.splitlines()
        assert ("removed" in header) is bool(removed)
        numbers = ["0"] * 7 if not removed else ["0", "0", "0", "0", "3", "0", "0", "0"]
        assert mails.split() == ["mails", *numbers]
