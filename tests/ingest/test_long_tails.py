"""Objects that become much shorter: an earlier version has more records behind the end than one step deletes."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import keywise
from ingest.uploads import versioned
from keywise.core import events
from keywise.ingest.executor import SMALL_BYTES
from keywise.ingest.object_note import ContentNote
from running import awaited

PART = 20


class Logs:
    """A folder, and a pipeline that writes its objects to a record table."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = path / "in"
        self._root.mkdir()
        database = f"sqlite:///{path}/logs.db"
        self.app = keywise.App(database, observers=[self._observe])
        options: dict[str, Any] = {"poll": "50ms", "part_records": PART}
        logs = self.app.objects("logs", store=f"file://{self._root}", format="ndjson", **options)
        logs.source(database, dialect=versioned).sink(f"{database}?table=logs")
        self._left = 0

    def _observe(self, event: events.Event) -> None:
        if isinstance(event, events.Settled):
            self._left -= event.changes
            if self._left <= 0:
                self.app.stop()

    def put(self, name: str, records: int, width: int = 1) -> str:
        lines = (json.dumps({"n": n, "text": "x" * width}) for n in range(records))
        (self._root / name).write_text("".join(f"{line}\n" for line in lines))
        return f"file://{self._root}/{name}"

    async def read(self, version: int, *uris: str) -> None:
        await self.app.send("logs", *[{"uri": uri, "v": version} for uri in uris])
        self._left = len(uris)
        async with asyncio.timeout(300):
            await self.app.run(handle_signals=False)

    def rows(self, uri: str) -> list[int]:
        with sqlite3.connect(self._path / "logs.db") as connection:
            found = connection.execute("select ordinal from logs where object = ? order by ordinal", (uri,)).fetchall()
        return [ordinal for (ordinal,) in found]


@awaited
async def test_a_long_tail_goes_beside_a_large_object(tmp_path: Path):
    """Of the objects that are claimed together, only the short one is small: it has its transaction for itself."""
    logs = Logs(tmp_path)
    short, large = logs.put("short", 10 * PART), logs.put("large", 2)
    await logs.read(1, short, large)
    logs.put("short", 1)
    logs.put("large", 3, width=SMALL_BYTES)
    await logs.read(2, short, large)
    assert (logs.rows(short), logs.rows(large)) == ([0], [0, 1, 2])
    async with logs.app.open("logs", work=False) as pipeline:
        assert ContentNote.of(await pipeline.admin.inspect(short)).records == 1


@awaited
async def test_long_tails_of_several_small_objects_go(tmp_path: Path):
    logs = Logs(tmp_path)
    uris = [logs.put(f"o{number}", 5 * PART) for number in range(4)]
    await logs.read(1, *uris)
    for number in range(4):
        logs.put(f"o{number}", number)
    await logs.read(2, *uris)
    assert [logs.rows(uri) for uri in uris] == [list(range(number)) for number in range(4)]
