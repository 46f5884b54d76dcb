"""Keeps a file that one process writes to all the time open to others, such as those who send to its queue.

SQLite has one writer at a time and no line for the others: whoever looks at the wrong moments waits on.
"""

import asyncio
import contextlib
import sqlite3
import threading
import time
from urllib.parse import quote

BUSY_S = 0.003
FREE_S, FREE_PART, FREE_MAX_S = 0.001, 10, 0.02
"""After so long without a pause the file is left alone: for so long, or for one part in so many of the time before,
since on a busy machine the others come late themselves; but never for long: that time may have been a standstill."""
CHECKPOINT_EVERY_S = 0.02


class WriteFairness:
    """Leaves the file alone now and then, and moves its journal back meanwhile rather than at the end of a commit."""

    def __init__(self, path: str) -> None:
        self._busy_since = self._free_since = 0.0
        self._written, self._closed = threading.Event(), threading.Event()
        self._checkpointer = threading.Thread(
            target=self._checkpoint, args=[path], name="keywise-sqlite-checkpoint", daemon=True
        )

    def start(self) -> None:
        """Begin to move the journal back."""
        self._checkpointer.start()

    async def yield_if_busy(self) -> None:
        """Before a write: wait a moment if the file was never free for long."""
        now = time.perf_counter()
        free_s = min(max(FREE_S, (now - self._busy_since) / FREE_PART), FREE_MAX_S)
        if now - self._free_since >= free_s:
            self._busy_since = now
        elif now - self._busy_since >= BUSY_S:
            await asyncio.sleep(free_s - (now - self._free_since))
            self._busy_since = time.perf_counter()

    def record_write(self) -> None:
        """After a write."""
        self._free_since = time.perf_counter()
        self._written.set()

    def close(self) -> None:
        self._closed.set()
        self._written.set()
        self._checkpointer.join()

    def _checkpoint(self, path: str) -> None:
        # What cannot be moved now is moved by a commit later, and that one tells what is wrong.
        place = f"file:{quote(path)}?mode=rw"
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(place, uri=True, isolation_level=None)) as connection,
        ):
            connection.execute("pragma synchronous = full")
            while not self._closed.is_set():
                self._written.wait()
                self._written.clear()
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("pragma wal_checkpoint(passive)").fetchall()
                self._closed.wait(CHECKPOINT_EVERY_S)
