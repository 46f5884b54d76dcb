"""The same work by keywise: queue, ledger and table in one SQLite file, with the observers that are on by default."""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import keywise
from keywise.core.events import BatchClosed, Event, Observer, Settled, Started

PIPELINE = "bench"


def app_in(folder: Path, batch: int = 1000) -> keywise.App:
    """An app as a user would write it."""
    url = f"sqlite:///{quote(str(database_in(folder)))}"
    app = keywise.App(url)
    pipeline = app.pipeline(PIPELINE, key="content_id", version="payload_version", batch_max=batch)
    pipeline.source(url).sink(f"{url}?table=pages")
    return app


def database_in(folder: Path) -> Path:
    return folder.resolve() / "keywise.db"


class Finish:
    """An observer that measures from the opened pipeline to the last commit, and then ends the work."""

    def __init__(
        self,
        changes: int,
        stop: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        counted: type[BatchClosed | Settled] = BatchClosed,
    ) -> None:
        self.elapsed_s = self.cpu_s = 0.0
        self._left = changes
        self._stop = stop
        self._clock = clock
        self._counted = counted

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started, self._cpu = self._clock(), time.process_time()
        elif isinstance(event, self._counted):
            # In one transaction, a batch is told after the commit; changes that were leased are settled after theirs.
            self._left -= event.changes
            if self._left <= 0:
                self.elapsed_s, self.cpu_s = self._clock() - self._started, time.process_time() - self._cpu
                self._stop()


async def drain(
    app: keywise.App, changes: int, *more: Observer, counted: type[BatchClosed | Settled] = BatchClosed
) -> Finish:
    """Run until so many changes are committed; all of them must have been settled."""
    figures, finish = keywise.Counters(), Finish(changes, app.stop, counted=counted)
    app.observers += [figures, finish, *more]
    await app.run(handle_signals=False)
    settled = figures.outcomes.total()
    assert settled == changes, f"{settled} of {changes} changes are settled: {figures.outcomes}"
    return finish


def stored(folder: Path) -> dict[str, int]:
    """The version of each key that the table holds."""
    with closing(sqlite3.connect(database_in(folder))) as connection:
        return dict(connection.execute("select key, version from pages"))
