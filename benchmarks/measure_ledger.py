"""Bytes on disk that the ledger needs for a key when nothing is going on with it."""

import argparse
import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks import keywise_sqlite, workload
from benchmarks.figure import Figure, Scale
from benchmarks.machine import run_module

TARGET_BYTES = 75
SIZE = "select sum(pgsize) from dbstat where name = 'keywise_marks'"


def measure(scale: Scale) -> list[Figure]:
    """With small versions, and with microseconds since 1970 as versions."""
    figures = []
    for name, more in (("versions from 1", []), ("timestamps as versions", ["--timestamps"])):
        keys = scale.ledger_keys
        size = run_module("benchmarks.measure_ledger", ["--keys", str(keys), *more])
        note = f"{keys:,} uuid keys, all pages of the table" if size else "this SQLite was built without dbstat"
        value = size / keys if size else None
        figures.append(Figure(f"idle ledger entry, {name}", value, "bytes/key", note, at_most=TARGET_BYTES))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--timestamps", action="store_true")
    options = parser.parse_args()
    bodies = workload.once_each(options.keys, timestamps=options.timestamps)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_drain(bodies, Path(folder)))
        assert keywise_sqlite.stored(Path(folder)) == workload.newest(bodies)
        print(_size(keywise_sqlite.database_in(Path(folder))))


async def _drain(bodies: list[bytes], folder: Path) -> None:
    async with keywise_sqlite.app_in(folder) as app:
        await app.send(keywise_sqlite.PIPELINE, *bodies)
        await keywise_sqlite.drain(app, len(bodies))


def _size(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute("select 1 from pragma_compile_options where compile_options = ?", _DBSTAT).fetchone():
            return 0
        [size] = connection.execute(SIZE).fetchone()
        return int(size)


_DBSTAT = ("ENABLE_DBSTAT_VTAB",)

if __name__ == "__main__":
    main()
