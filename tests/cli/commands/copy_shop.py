"""A shop whose ledger moves: its app reads the URL of the ledger from the environment."""

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

from chaos.fleet import until
from cli.command import LIMIT_S, Answer, Folder, command, environment
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.entry import Entry, LedgerPolicy
from keywise.core.transfer import TransferPage
from running import run, scaled

OLD = "sqlite:///old.db"
HOSTILE = ["a", " ", "it's", 'say "hi"', "line\nbreak", "\x1b[31mred", "🦉", "%_\\", "'; drop table keywise_marks; --"]

SHOP = """
import os
import sqlite3

import keywise
from keywise import Change, PermanentError

app = keywise.App(os.environ.get("LEDGER", "sqlite:///old.db"))
pages = app.pipeline("pages", key="id", version="v", deleted={"state": ["gone"]}, poll="50ms")
pages.source("sqlite:///queue.db")
mails = app.pipeline("mails", key="id", version="v", poll="50ms").source("sqlite:///queue.db")


@mails.apply
def mail(change: Change[dict]) -> None: ...


@pages.apply
def write(change: Change[dict]) -> None:
    if change.value.get("bad"):
        raise PermanentError("no \\x1b[31m\\n🦉 'here'")
    with sqlite3.connect("store.db", isolation_level=None) as store:
        store.execute("create table if not exists log (key, version)")
        store.execute("insert into log values (?, ?)", (change.key, change.version))
"""


class Mover(Folder):
    """A folder with a shop, and the command that moves its ledger."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SHOP)

    def at(self, ledger: str, *arguments: str, status: int = 0) -> Answer:
        """A command of the app whose ledger is there."""
        done = subprocess.run(
            command(*arguments),
            cwd=self.path,
            env=environment("shop:app") | {"LEDGER": ledger},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=scaled(LIMIT_S),
            check=False,
        )
        answer = Answer(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert answer.status == status, answer
        return answer

    def send(self, *bodies: dict[str, Any]) -> None:
        self.at(OLD, "send", "pages", *map(json.dumps, bodies))

    def copy(self, *arguments: str, status: int = 0, app: str | None = "shop:app") -> Answer:
        answer = self.keywise("ledger", "copy", *arguments, app=app)
        assert answer.status == status, answer
        return answer

    def log(self) -> list[tuple[str, int]]:
        """What the handler wrote."""
        with closing(sqlite3.connect(self.path / "store.db", timeout=30)) as store:
            return store.execute("select key, version from log order by rowid").fetchall()

    def fill(self, keys: int) -> None:
        """Let the old ledger know so many keys, and pause it."""

        async def main() -> None:
            async with SqliteLedger(SqliteDatabase(str(self.path / "old.db")), "pages", LedgerPolicy()) as ledger:
                entries = [(f"k{number:06}", Entry((0, number, 0), number % 7 == 0, 5.0)) for number in range(keys)]
                await ledger.transfer.add(TransferPage(entries=entries))
                await ledger.control_store.pause(Pause(EVERYTHING, True, await ledger.now(), "ada"))

        run(main(), limit_s=60)

    def kill_in_the_middle(self, target: str, count, least: int) -> None:
        """Begin a copy, and kill it when the target holds so many keys, by what `count` says."""
        copying = subprocess.Popen(
            # On a busy machine it must not be done before this process gets to look again.
            ["nice", "-n", "19", *command("ledger", "copy", OLD, target)],
            cwd=self.path,
            env=environment("shop:app"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: count() >= least, f"{least} keys", lambda: None)
        finally:
            copying.kill()
        assert copying.wait(scaled(LIMIT_S)) == -9, "it was done before it could be killed"
