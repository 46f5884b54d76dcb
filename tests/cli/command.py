"""The real command, run as a process of its own in a folder with a small app."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running import scaled

LIMIT_S = 60

SHOP = """
import sqlite3
import keywise
from keywise import Change, PermanentError, Retry, Transaction

app = keywise.App("sqlite:///shop.db")

pages = app.pipeline("pages", key="id", version="v", deleted={"state": ["gone"]}, poll="50ms")
pages.source("sqlite:///shop.db").source("sqlite:///shop.db?queue=bulk")
pages.sink("sqlite:///shop.db?table=stored")

mails = app.pipeline("mails", key="id", version="v", retry=Retry(attempts=2, backoff="10ms"), poll="50ms")
mails.source("sqlite:///shop.db")


@mails.apply
def mail(change: Change[dict]) -> None:
    if change.value.get("bad"):
        raise PermanentError("no such address \\x1b[31m[bold]")
    if change.value.get("broken"):
        raise ValueError("broken")
"""


@dataclass
class Answer:
    """What a command said."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Folder:
    """A folder with an app in `shop.py`, and the command to run in it."""

    def __init__(self, path: Path, text: str = SHOP) -> None:
        self.path = path
        self.write("shop.py", text)

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def keywise(self, *arguments: str, stdin: str | bytes = "", app: str | None = "shop:app") -> Answer:
        """Run to the end."""
        sent = stdin if isinstance(stdin, bytes) else stdin.encode()
        done = subprocess.run(
            command(*arguments),
            cwd=self.path,
            input=sent,
            env=environment(app),
            capture_output=True,
            timeout=scaled(LIMIT_S),
            check=False,
        )
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
        """Run beside the test, which reads what it says."""
        return subprocess.Popen(
            command(*arguments),
            cwd=self.path,
            env=environment("shop:app"),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def work(self) -> dict[str, Any]:
        """Run all pipelines until nothing is left; what became of the messages of each."""
        answer = self.keywise("run", "shop:app", "--until-empty", "--json")
        assert answer.status == 0, answer.err
        return {name: told["outcomes"] for name, told in answer.json["pipelines"].items()}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "keywise", *arguments]


def environment(app: str | None) -> dict[str, str]:
    """As in a fresh shell, with or without the variable that names the app."""
    kept = {name: value for name, value in os.environ.items() if name not in {"KEYWISE_APP", "FORCE_COLOR"}}
    return kept | ({"KEYWISE_APP": app} if app is not None else {})
