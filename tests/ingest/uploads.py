"""A folder of objects, a pipeline in a SQLite file that reads them, and a handler that notes their records."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import keywise
from keywise import Put, Record
from keywise.core import events
from keywise.flow.pipeline import OpenPipeline

LONG = f"{'x' * 200}/{'y' * 200}/{'z' * 200}"
"""A name whose URI is longer than a key may be."""


def versioned(message: dict[str, Any]) -> Put:
    """The dialect of messages with a version."""
    return Put(message["uri"], message["v"])


class Uploads:
    """The objects and the app. `written` is what the handler holds, by object and ordinal."""

    def __init__(self, path: Path, *, dialect: str | Callable[..., Any] = "uri", **options: Any) -> None:
        self.folder = path / "in"
        self.folder.mkdir()
        self.store_url = f"file://{self.folder}"
        self.written: dict[tuple[str, int], Any] = {}
        self.calls: list[list[int]] = []
        """The ordinals of each call of the handler."""
        self.broken_at: int | None = None
        """The handler fails from this ordinal on."""
        self.on_write: Callable[[int], Awaitable[None]] | None = None
        """Called by the handler with the first ordinal of its records."""
        self.app = keywise.App(f"sqlite:///{path}/ledger.db", observers=[self._observe])
        self._ended, self._wanted = 0, 0
        settings = {"format": "ndjson", "lease": "30s", "poll": "50ms", "backoff": "10ms", **options}
        logs = self.app.objects("logs", store=self.store_url, **settings)
        logs.source(f"sqlite:///{path}/ledger.db", dialect=dialect)
        self.definition = logs
        logs.apply(self._write)

    async def _write(self, records: list[Record[Any]]) -> None:
        if self.on_write is not None:
            await self.on_write(records[0].ordinal)
        self.calls.append([record.ordinal for record in records])
        if self.broken_at is not None and any(record.ordinal >= self.broken_at for record in records):
            raise RuntimeError("out of order")
        for record in records:
            place = (record.object, record.ordinal)
            if record.deleted:
                self.written.pop(place, None)
            else:
                self.written[place] = record.value

    def _observe(self, event: events.Event) -> None:
        if isinstance(event, events.Settled | events.Ignored):
            self._ended += event.changes
        if self._ended >= self._wanted:
            self.app.stop()

    def uri(self, name: str) -> str:
        return f"{self.store_url}/{name}"

    def put(self, name: str, *records: Any) -> str:
        """Write an object; return its URI. A text is written as it is."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records))
        return self.uri(name)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def held(self, name: str) -> list[Any]:
        """The records of an object that the handler holds."""
        uri = self.uri(name)
        return [value for (place, _), value in sorted(self.written.items()) if place == uri]

    async def work(self, messages: int) -> None:
        """Run a worker until so many messages have ended."""
        self._ended, self._wanted = 0, messages
        if messages:
            await self.app.run(handle_signals=False)
        assert await self.depth() == 0, "more messages than expected"

    async def depth(self) -> int:
        async with self.app.open("logs", work=False) as pipeline:
            return sum([await source.depth() or 0 for _, source in pipeline.sources])

    async def ask(self, act: Callable[[OpenPipeline], Any]) -> Any:
        """Run an action on the open pipeline."""
        async with self.app.open("logs", work=False) as pipeline:
            return await act(pipeline)

    async def read(self, *uris: str) -> None:
        """Announce objects, and let a worker read them."""
        await self.app.send("logs", *[uri.encode() for uri in uris])
        await self.work(len(uris))
