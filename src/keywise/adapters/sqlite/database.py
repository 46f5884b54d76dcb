"""One SQLite file that source, ledger and sink share: one writer, durable commits, one clock for all processes."""

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from keywise.adapters.sqlite.schema.install import install
from keywise.adapters.sqlite.write_fairness import WriteFairness
from keywise.core.clock import boot_time
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.resource import UserCount
from keywise.core.statements import read_statements

T = TypeVar("T")

BUSY_LOOK_S = 0.0005
BUSY_S = 5.0
"""How long a write waits for another process before it says that the file cannot be reached."""

PRAGMAS = """
pragma journal_mode = wal;
pragma synchronous = full;
pragma cache_size = -65536;
pragma wal_autocheckpoint = 4000;
"""

_SQL = read_statements(__name__)


class SqliteDatabase:
    """One file, open as long as it has users."""

    has_one_writer = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._users = UserCount(self._open, self._close)
        self._writing = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._writes_fairly = False
        self._write_fairness: WriteFairness | None = None
        self._clock_offset_s = 0.0
        self.runs_user_code = False
        """Meanwhile nobody may end the transaction: neither its neighbours' effects nor their marks are complete."""

    async def __aenter__(self) -> Self:
        await self._users.enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._users.leave()

    @property
    def reader(self) -> sqlite3.Connection:
        """A connection that sees what is committed, and never waits for a writer."""
        assert self._reader is not None, "the database is not open"
        return self._reader

    def now(self) -> float:
        """The store's clock: the same in all processes of this machine, never set back, and it counts suspend."""
        return self._clock_offset_s + boot_time()

    async def write(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function in one transaction of its own, off the event loop."""

        def transact() -> T:
            with writer:
                return act(writer)

        async with self._turn() as writer:
            return await self._hop(transact)

    async def execute(self, statement: str, arguments: tuple[object, ...] = ()) -> int:
        """Run one statement in a transaction of its own; return how many rows it changed."""
        return await self.write(lambda connection: connection.execute(statement, arguments).rowcount)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        """A transaction over several steps. Only its begin and its commit may block, and they leave the loop alone."""
        async with self._turn() as writer:
            try:
                yield writer
                if not writer.in_transaction:
                    raise UnavailableError(f"{self.path}: the transaction was rolled back")
                await self._hop(writer.commit)
            except BaseException:
                writer.rollback()
                raise

    def read(self, statement: str, arguments: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        """Rows of a query on what is committed."""
        with sqlite_errors(self.path):
            return self.reader.execute(statement, arguments).fetchall()

    def enable_fair_writes(self) -> None:
        """From now on leave the file alone now and then, so that other processes get at it."""
        self._writes_fairly = True
        if self._writer is not None and self._write_fairness is None:
            self._write_fairness = WriteFairness(self.path)
            self._write_fairness.start()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[sqlite3.Connection]:
        """Begin a transaction. SQLite itself waits up to 100 ms between two looks, and others would get in first."""
        writer = self._writer
        assert writer is not None, "the database is not open"
        async with self._writing:
            fairness = self._write_fairness
            if fairness is not None:
                await fairness.yield_if_busy()
            try:
                with sqlite_errors(self.path):
                    await self._when_free(lambda: writer.execute(_BEGIN))
                yield writer
            finally:
                if fairness is not None:
                    fairness.record_write()

    async def _when_free(self, act: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + BUSY_S
        while True:
            try:
                act()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or loop.time() > until:
                    raise
            await asyncio.sleep(BUSY_LOOK_S)

    async def numbered(self, select: str, insert: str, name: str) -> int:
        """The number of a named row, which is inserted where it is missing; only then it waits for other writers."""
        found: Any = self.read(select, (name,))
        if not found:
            await self.execute(insert, (name,))
            found = self.read(select, (name,))
        return int(found[0][0])

    async def _hop(self, act: Callable[[], T]) -> T:
        """Run in the writer's thread. Cancelled, it still waits: nobody may use the connection meanwhile."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, act)
        with sqlite_errors(self.path):
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await asyncio.wait([future])
                raise

    async def _open(self) -> None:
        folder = Path(self.path).parent
        if not folder.is_dir():
            raise DatabaseError(f"the folder {folder} of {self.path} does not exist; create it, or name another file")
        with sqlite_errors(self.path):
            self._writer = await self._connect()
            install(self._writer, self.path)
            self._clock_offset_s = self._agree_on_time(self._writer)
            self._reader = await self._connect()
            self._writer.execute("pragma busy_timeout = 0")
            self._writer.set_authorizer(self._authorize)
        self._writing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keywise-sqlite")
        if self._writes_fairly:
            self.enable_fair_writes()

    async def _connect(self) -> sqlite3.Connection:
        """Open the file. SQLite does not wait for its turn while the journal of a new file is being set up."""
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        await self._when_free(lambda: connection.executescript(PRAGMAS))
        return connection

    def _authorize(self, action: int, *_: object) -> int:
        """Called when a statement is compiled. Ours are compiled once, except each commit, so this costs little."""
        ends_transaction = action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if ends_transaction and self.runs_user_code else sqlite3.SQLITE_OK

    async def _close(self) -> None:
        assert self._thread is not None and self._writer is not None and self._reader is not None
        self._thread.shutdown()
        if self._write_fairness is not None:
            self._write_fairness.close()
            self._write_fairness = None
        self._reader.close()
        self._writer.close()

    def _agree_on_time(self, connection: sqlite3.Connection) -> float:
        """All processes since one boot use the offset that the first of them wrote down."""
        known = _agreed(connection)
        if known is not None:
            return known
        with connection:
            connection.execute("begin immediate")
            known = _agreed(connection)
            if known is not None:
                return known
            # The wall clock may have been set back since: what was once over must not be ahead again.
            [latest] = connection.execute(_SQL["latest"]).fetchone()
            offset = max(time.time(), float(latest)) - boot_time()
            times = [("boot", _boot_id()), ("offset", offset)]
            connection.executemany("insert or replace into keywise_meta values (?, ?)", times)
            return offset


DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
PASSING = DISK | {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}


@contextmanager
def sqlite_errors(path: str, passing: frozenset[int] = PASSING) -> Iterator[None]:
    """Turns errors of the file into ours, at the edge: what may pass becomes `UnavailableError`."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in passing:
            raise UnavailableError(f"{path}: {error}") from error
        if code in _ADVICE:
            raise DatabaseError(f"{path}: {error}; {_ADVICE[code]}") from error
        raise


_ADVICE = {
    sqlite3.SQLITE_CANTOPEN: "check that the file can be created there",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable for this user",
    sqlite3.SQLITE_NOTADB: "this is no SQLite database; name another file",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore it from a backup",
    sqlite3.SQLITE_PERM: "give this user access to the file",
    sqlite3.SQLITE_AUTH: "a handler has to leave commit and rollback to keywise",
}
# With a text of its own, so that a handler's `begin` never meets ours in the cache of compiled statements.
_BEGIN = "begin immediate -- keywise"


def _agreed(connection: sqlite3.Connection) -> float | None:
    """The offset that holds since this boot, if somebody wrote one down."""
    known = dict(connection.execute("select name, value from keywise_meta where name in ('boot', 'offset')"))
    return float(known["offset"]) if known.get("boot") == _boot_id() else None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without a boot id, the moment of the boot tells boots apart well enough.
        return f"{os.uname().nodename} {round((time.time() - boot_time()) / 60)}"
