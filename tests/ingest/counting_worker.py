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


async def count_records(store: str, name: str, folder: str) -> int:
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
        await app.send("logs", f"s3://generated/{name}".encode())
        await app.run(handle_signals=False)
    return counted


def peak_bytes() -> int:
    """The most memory that this process has had, without that of the process which started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


if __name__ == "__main__":
    records = asyncio.run(count_records(*sys.argv[1:]))
    os.write(1, json.dumps({"records": records, "peak_bytes": peak_bytes()}).encode())
