"""A process that reads one announced object into a sink that only counts, and says how much memory that took."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import keywise
from keywise import Record
from keywise.core import events


async def main(store: str, folder: str) -> dict[str, int]:
    ledger, counted = f"sqlite:///{folder}/ledger.db", 0

    def observe(event: events.Event) -> None:
        if isinstance(event, events.Settled):
            app.stop()

    app = keywise.App(ledger, observers=[observe])
    logs = app.objects("logs", store=store, format="ndjson", poll="50ms")
    logs.source(ledger, dialect="uri")

    @logs.apply
    async def count(records: list[Record[Any]]) -> None:
        nonlocal counted
        counted += len(records)

    async with app:
        await app.send("logs", b"s3://generated/o")
        await app.run(handle_signals=False)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"records": counted, "peak_bytes": 1024 * int(status["VmHWM"].split()[0])}


if __name__ == "__main__":
    os.write(1, json.dumps(asyncio.run(main(*sys.argv[1:]))).encode())
