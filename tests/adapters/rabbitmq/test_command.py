"""What the commands say about messages of RabbitMQ that nobody can count."""

import re
from pathlib import Path

import pytest

from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import owner
from cli.command import Folder
from running import run
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")

SHOP = """
import keywise

app = keywise.App("sqlite:///shop.db")
pages = app.pipeline("pages", key="id", version="v", poll="50ms")
pages.source({url!r})
pages.sink("sqlite:///shop.db?table=stored")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    queue = fresh("pages")

    async def declare() -> None:
        async with owner(shared.rabbitmq().url) as they:
            await they.declare(queue)

    run(declare())
    # One second stands for the three minutes that a broker is set to by default.
    return Folder(tmp_path, SHOP.format(url=f"{shared.rabbitmq().url}?queue={queue}&dead_letter_timeout=1s"))


def test_the_depth_is_unknown_without_the_management_api(folder: Folder):
    folder.keywise("send", "pages", '{"id": "home", "v": 1}')
    status = folder.keywise("status")
    assert "1 or more" in status.out
    assert "how many messages consumers hold" in status.out and "management=" in status.out.replace("\n", " ")
    [source] = folder.keywise("status", "--json").json["pipelines"][0]["sources"]
    assert (source["depth"], source["seen"]) == (None, 1)

    first = folder.keywise("run", "--until-empty")
    assert first.status == 0, first.err
    assert "though the depth is unknown: other consumers may hold messages; name the management API" in first.err
    assert "waits up to" not in first.err, "there was no delay queue before"

    again = folder.keywise("run", "--until-empty")
    assert again.status == 0, again.err
    assert re.search(r"--until-empty waits up to \d s more, because the broker may still be moving", again.err)
    assert again.err.count("waits up to") == again.err.count("depth is unknown") == 1

    assert "unknown" in folder.keywise("status").out
    why = folder.keywise("why", "home")
    assert "queue" in why.out and "changes to this key may be among them" in why.out
