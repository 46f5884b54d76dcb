"""What the commands say about a subscription of Pub/Sub."""

import re
from pathlib import Path

import pytest

from adapters.pubsub.benches import PROJECT, created, fresh
from cli.command import Folder
from running import run
from servers import shared

pytestmark = pytest.mark.server("pubsub")

SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", poll="50ms")
pages.source({url!r})
pages.sink("sqlite:///shop.db?table=stored")
"""


def test_a_service_is_checked_with_subscriptions_that_are_created_and_removed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", shared.pubsub().address)
    answer = Folder(tmp_path).keywise("check", "source", f"pubsub://{PROJECT}")
    assert (answer.status, answer.err) == (0, ""), answer.out
    *lines, end = answer.out.splitlines()
    assert re.fullmatch(r"[0-9]+ promises kept, 0 broken, [0-9]+ not checked", end)
    assert any("the service does not count messages" in line for line in lines)


def test_a_subscription_that_may_be_in_use_is_not_checked(tmp_path: Path):
    answer = Folder(tmp_path).keywise("check", "source", f"pubsub://{PROJECT}/orders?emulator=127.0.0.1:1")
    assert (answer.status, answer.out) == (1, "")
    assert "fixes which queue is used" in answer.err


def test_until_empty_ends_when_no_message_has_come_for_a_while(tmp_path: Path):
    name = run(created(fresh("pages")))
    url = f"pubsub://{PROJECT}/{name}?emulator={shared.pubsub().address}&settled=3s"
    folder = Folder(tmp_path, SHOP.format(url=url))
    sent = folder.keywise("send", "pages", '{"id": "home", "v": 2}', '{"id": "home", "v": 1}')
    assert (sent.status, sent.out) == (0, "sent 2 messages to pages\n")
    done = folder.keywise("run", "--until-empty")
    assert done.status == 0, done.err
    assert re.search(r"--until-empty waits up to \d s more", done.err)
    [source] = folder.keywise("status", "--json").json["pipelines"][0]["sources"]
    assert source["depth"] is None
    status = folder.keywise("status").out
    assert "unknown" in status and "num_undelivered_messages" in status
