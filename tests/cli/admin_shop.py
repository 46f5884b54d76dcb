"""A folder whose app can be acted upon: a table and a handler's store, a source of truth, and a worker beside them."""

import json
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from chaos.fleet import until
from cli.command import LIMIT_S, Answer, Folder, command, environment
from cli.terminal import Terminal
from running import scaled

SHOP = """
import json
import pathlib
import sqlite3
import threading
from contextlib import closing

import keywise
from keywise import Change

app = keywise.App("sqlite:///shop.db")


def truth(key):
    path = pathlib.Path("truth.json")
    return json.loads(path.read_text()).get(key) if path.exists() else None


pages = app.pipeline("pages", key="id", version="v", deleted={"state": ["gone"]}, poll="50ms", horizon="100ms")
pages.source("sqlite:///shop.db").sink("sqlite:///shop.db?table=stored")
pages.refetch(truth)

mails = app.pipeline("mails", key="id", version="v", poll="50ms", horizon="100ms", lease="5s", margin="1s")
mails.source("sqlite:///shop.db?visibility=10s")
mails.refetch(truth)


def log(*row):
    with closing(sqlite3.connect("store.db", timeout=30, isolation_level=None)) as store:
        store.execute("insert into log values (?, ?, ?, ?)", row)


@mails.apply
def write(change: Change[dict]) -> None:
    log("begin", change.key, change.version, change.deleted)
    while pathlib.Path("closed").exists():
        threading.Event().wait(0.01)
    if pathlib.Path("broken").exists():
        raise OSError(pathlib.Path("broken").read_text())
    log("end", change.key, change.version, change.deleted)


@mails.lookup
def lookup(key):
    with closing(sqlite3.connect("store.db")) as store:
        row = store.execute("select version, deleted from log where key = ? and op = 'end' order by rowid desc", (key,))
        found = row.fetchone()
    return {"v": found[0]} if found and not found[1] else None
"""


class Office(Folder):
    """A folder in which an operator acts, perhaps beside a worker."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SHOP)
        with closing(sqlite3.connect(path / "store.db")) as store:
            store.execute("create table log (op, key, version, deleted)")
        self.worker: subprocess.Popen[bytes] | None = None

    def start_worker(self) -> None:
        with (self.path / "worker.log").open("wb") as log:
            arguments = command("run", "shop:app")
            self.worker = subprocess.Popen(
                arguments, cwd=self.path, env=environment(None), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.until(lambda: "mails: plain" in (self.path / "worker.log").read_text(), "the worker")

    def close(self) -> None:
        """Let the worker drain; it must end well."""
        if self.worker is not None:
            self.worker.send_signal(signal.SIGTERM)
            assert self.worker.wait(scaled(LIMIT_S)) == 0, (self.path / "worker.log").read_text()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        until(lambda: bool(condition()), what, self._check)

    def _check(self) -> None:
        assert self.worker is None or self.worker.poll() is None, (self.path / "worker.log").read_text()

    def send(self, pipeline: str, *bodies: dict[str, Any]) -> None:
        assert self.keywise("send", pipeline, *map(json.dumps, bodies)).status == 0

    def tell_truth(self, **bodies: dict[str, Any] | None) -> None:
        self.write("truth.json", json.dumps(bodies))

    def act(self, *arguments: str) -> Answer:
        """An act that has to succeed."""
        answer = self.keywise(*arguments)
        assert answer.status == 0, answer
        return answer

    def typed(self, keys: str, *arguments: str) -> tuple[int, str]:
        """Run in a terminal and answer its question; the exit status and all that was shown."""
        terminal = Terminal(command(*arguments), self.path, environment("shop:app"))
        terminal.wait_for(lambda text: "[y/N]" in text)
        assert terminal.shows_cursor, "nothing is drawn while somebody types"
        terminal.press(keys)
        return terminal.end(), terminal.text

    def rows(self, file: str, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path / file, timeout=30)) as store:
            return store.execute(statement).fetchall()

    def execute(self, *statements: str) -> None:
        """Somebody else writes the shop's file."""
        with closing(sqlite3.connect(self.path / "shop.db", timeout=30)) as file, file:
            for statement in statements:
                file.execute(statement)

    def stored(self) -> dict[str, int]:
        """The table of pages."""
        found = self.rows("shop.db", "select name from sqlite_master where name = 'stored'")
        return dict(self.rows("shop.db", "select key, version from stored")) if found else {}

    def log(self) -> list[tuple[Any, ...]]:
        """What the handler of mails did."""
        return self.rows("store.db", "select op, key, version, deleted from log order by rowid")

    def lines(self, *whats: str) -> list[tuple[Any, ...]]:
        """The history, oldest first, of these acts."""
        found = self.rows("shop.db", "select what, key, version, detail, by from keywise_lines order by id")
        return [line for line in found if line[0] in whats]
