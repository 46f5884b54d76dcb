"""What the commands say about a queue of SQS."""

import re
from pathlib import Path

import pytest

from adapters.sqs.benches import created, fresh
from cli.command import Folder
from servers import shared

pytestmark = pytest.mark.server("elasticmq")

SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", poll="50ms")
pages.source({url!r})
pages.sink("sqlite:///shop.db?table=stored")
"""


def test_a_service_is_checked_with_queues_that_are_created_and_removed(tmp_path: Path):
    server = shared.elasticmq()
    answer = Folder(tmp_path).keywise("check", "source", f"sqs://127.0.0.1:{server.port}?tls=off")
    assert (answer.status, answer.err) == (0, ""), answer.out
    first, *_, end = answer.out.splitlines()
    prefix = first.removeprefix("writes to queues named ").partition("…")[0]
    assert prefix.startswith("check_")
    assert re.fullmatch(r"[0-9]+ promises kept, 0 broken, [0-9]+ not checked", end)
    assert prefix not in server.ask("ListQueues")


def test_a_queue_that_may_be_in_use_is_not_checked(tmp_path: Path):
    answer = Folder(tmp_path).keywise("check", "source", "sqs://127.0.0.1:1/published?tls=off")
    assert (answer.status, answer.out) == (1, "")
    assert "fixes which queue is used" in answer.err


def test_until_empty_waits_until_the_counts_of_sqs_have_settled(tmp_path: Path):
    queue = created(shared.elasticmq(), fresh("pages"))
    url = f"sqs://127.0.0.1:{shared.elasticmq().port}/{queue}?tls=off&settled=2s"
    folder = Folder(tmp_path, SHOP.format(url=url))
    folder.keywise("send", "pages", '{"id": "home", "v": 1}')
    done = folder.keywise("run", "--until-empty")
    assert done.status == 0, done.err
    assert re.search(r"--until-empty waits up to \d s more", done.err)
    [source] = folder.keywise("status", "--json").json["pipelines"][0]["sources"]
    assert source["depth"] == 0
