"""A shop whose ledger goes away: by default its queue and its plain store are SQLite files beside it."""

import json
import sqlite3
import subprocess
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from chaos.fleet import until
from cli.command import Answer, Folder, command, environment

SHOP = """
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import keywise

app = keywise.App({url!r})
shop = app.pipeline(
    "shop", key="id", version="v", deleted={{"gone": [True]}}, on_ledger_down={mode!r}, journal="journal",
    ledger_grace="300ms", poll="50ms", backoff="10ms", backoff_max="100ms", lease="3s", margin="500ms", horizon="1s",
    repair="200ms", maintenance="500ms", journal_keys_max={keys_max},
)
shop.source("sqlite:///queue.db?visibility=3s")


@shop.apply
def keep(change: keywise.Change) -> None:
    with closing(sqlite3.connect("store.db", timeout=60)) as store, store:
        store.execute("insert into log (key, version) values (?, ?)", (change.key, change.version))
        if change.deleted:
            store.execute("delete from stock where key = ?", (change.key,))
        else:
            store.execute("insert or replace into stock values (?, ?)", (change.key, change.version))


@shop.refetch
def truth(key: str) -> bytes | None:
    body = json.loads(Path("truth.json").read_text()).get(key)
    return None if body is None else json.dumps(body).encode()
"""


class Workplace:
    """A folder with an app, its workers and its truth; what they wrote is elsewhere."""

    pipeline = "shop"

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        self.workers: list[subprocess.Popen] = []
        self._folder = Folder(folder, text)
        self._errors = (folder / "errors").open("ab")
        self._truth: dict[str, dict] = {}
        self._save()

    def start(self) -> subprocess.Popen:
        """One more worker, once its pipeline runs."""
        started = self.said(", leased, from")
        arguments = command("run", "shop:app", "--plain")
        worker = subprocess.Popen(
            arguments, cwd=self.folder, env=environment(None), stdout=subprocess.DEVNULL, stderr=self._errors
        )
        self.workers.append(worker)
        self.until(lambda: self.said(", leased, from") > started, "a worker to start")
        return worker

    def kill(self, worker: subprocess.Popen) -> None:
        """`kill -9`."""
        self.workers.remove(worker)
        worker.kill()
        worker.wait(30)

    def close(self) -> None:
        for worker in list(self.workers):
            self.kill(worker)
        self._errors.close()

    def change(self, keys: Iterable[str], version: int, *, again: Iterable[dict] = ()) -> list[dict]:
        """Bring keys to a version, every tenth to its end; some older messages come once more."""
        bodies = [{"id": key, "v": version, "gone": key.endswith("9")} for key in keys]
        self._truth.update((body["id"], body) for body in bodies)
        self._save()
        lines = "".join(f"{json.dumps(body)}\n" for body in [*bodies, *again])
        answer = self._folder.keywise("send", self.pipeline, "-", stdin=lines)
        assert answer.status == 0, answer
        return bodies

    def wanted(self) -> dict[str, int]:
        return {key: body["v"] for key, body in self._truth.items() if not body["gone"]}

    def keywise(self, *arguments: str) -> Answer:
        return self._folder.keywise(*arguments)

    def figures(self) -> dict:
        answer = self.keywise("status", "--json")
        return answer.json["pipelines"][0] if answer.status == 0 else {}

    def said(self, text: str) -> int:
        """How often the workers have said something."""
        return (self.folder / "errors").read_text().count(text)

    def until(self, condition, what: str, limit_s: float = 60) -> None:
        until(condition, what, self._check, limit_s=limit_s)

    def _check(self) -> None:
        for worker in self.workers:
            assert worker.poll() is None, (self.folder / "errors").read_text()[-3000:]

    def _save(self) -> None:
        fresh = self.folder / "fresh.json"
        fresh.write_text(json.dumps({key: body for key, body in self._truth.items() if not body["gone"]}))
        fresh.rename(self.folder / "truth.json")


class OutageShop(Workplace):
    """Its store logs every write."""

    def __init__(self, folder: Path, url: str, mode: str, keys_max: int = 1000) -> None:
        super().__init__(folder, SHOP.format(url=url, mode=mode, keys_max=keys_max))
        with closing(sqlite3.connect(folder / "store.db")) as store, store:
            store.execute("create table stock (key text primary key, version int)")
            store.execute("create table log (seq integer primary key, key text, version int)")

    def stock(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.folder / "store.db", timeout=60)) as store:
            return dict(store.execute("select key, version from stock"))

    def writes(self, key: str = "%", version: int | str = "%") -> int:
        """How many there were, of all keys and versions or of one."""
        with closing(sqlite3.connect(self.folder / "store.db", timeout=60)) as store:
            counted = "select count(*) from log where key like ? and version like ?"
            return store.execute(counted, (key, version)).fetchone()[0]
