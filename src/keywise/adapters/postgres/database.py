"""One Postgres database that source, ledger and sink share: pooled connections, its own clock, durable commits."""

import asyncio
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self, TypeAlias
from urllib.parse import urlencode, urlsplit
from weakref import WeakSet

import asyncpg

from keywise.adapters.postgres.schema.install import LOCKS, install
from keywise.core.errors import DatabaseError, UnavailableError
from keywise.core.resource import UserCount
from keywise.core.url import Address, redacted

CONNECT_S = 10.0
"""How long a connection may take, and how long one of the pool is waited for."""
COMMAND_S, SLOW_S = 10.0, 60.0
"""How long a statement may take before the database counts as unreachable; the second, over very many rows."""
IDLE_S, IDLE_IN_HANDLER_S = 10, 3600
"""How long a transaction may do nothing before the server ends it: else a worker that was stopped in the midst of one
would hold up its keys for ever. Handlers may have to wait for something else meanwhile."""
WRITERS_MAX, READERS_MAX, STEPPERS_MAX, HANDLERS_MAX = 8, 2, 2, 8
CHANNEL = "keywise"
LOST = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    AttributeError,  # See `_is_of_closed_connection`.
)
"""What a connection that is lost in the midst of something may raise."""
OPTIONS = ("host", "port", "user", "passfile", "sslmode", "sslrootcert", "sslcert", "sslkey")
"""What a URL may tell the client library."""


Limit: TypeAlias = Callable[[], asyncio.Timeout]
"""Limits statements: each of them, or several together."""


def limit_each(limit_s: float) -> Limit:
    """A limit per statement."""
    return lambda: asyncio.timeout(limit_s)


def limit_total(limit_s: float) -> Limit:
    """One deadline for all statements."""
    until = asyncio.get_running_loop().time() + limit_s
    return lambda: asyncio.timeout_at(until)


class PostgresDatabase:
    """Connections to one database, open as long as it has users."""

    is_async = True
    """What a transaction gives to write with has to be awaited."""

    def __init__(self, url: str) -> None:
        self.name = redacted(url)
        self._url = url
        self._users = UserCount(self._open, self._close)
        self._listening = asyncio.Lock()
        self._writers: Any = None
        self._readers: Any = None
        """Apart from the writers, so that a transaction may read besides, however many there are."""
        self._steppers: Any = None
        """Apart too, so that requests get their turns however many handlers have a transaction."""
        self._handlers: Any = None
        """A pool of its own: handler statements have no time limit."""
        self._connections: WeakSet[Any] = WeakSet()
        """Of the pools and the listener. Not those of `connected`: their callers may hold locks on them."""
        self._in_use: set[int] = set()
        """The sessions of connections that are not idle."""
        self._left_behind: list[int] = []
        """Sessions that may still be in a transaction at the server, though their connections were given up."""
        self._listener: Any = None
        self.reset_search_path = ""
        """The statement after which a session finds the tables of keywise again, whatever user code has set."""
        self._bells: dict[str, dict[str, asyncio.Event]] = {}
        self._finishing: dict[int, list[Callable[[], Awaitable[None]]]] = {}

    async def __aenter__(self) -> Self:
        await self._users.enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._users.leave()

    async def now(self) -> float:
        """The store's clock: that of the server, the same for all who are connected to it."""
        [[now]] = await self.read("select extract(epoch from clock_timestamp())::float8")
        return float(now)

    async def read(self, statement: str, *arguments: object, limit_s: float | None = None) -> Sequence[Any]:
        """Rows of a query on what is committed."""
        return await self._fetch(self._readers, statement, arguments, limit_s)

    async def write(self, statement: str, *arguments: object, limit_s: float | None = None) -> Sequence[Any]:
        """Rows of one statement that is a transaction of its own."""
        return await self._fetch(self._writers, statement, arguments, limit_s)

    async def step(self, statement: str, *arguments: object) -> Sequence[Any]:
        """As `write`, besides all handlers that have a transaction."""
        return await self._fetch(self._steppers, statement, arguments, SLOW_S)

    async def _fetch(
        self, pool: Any, statement: str, arguments: Sequence[object], limit_s: float | None
    ) -> Sequence[Any]:
        async with self._acquired(pool) as connection:
            with postgres_errors(self.name):
                rows: Sequence[Any] = await connection.fetch(statement, *arguments, timeout=limit_s or COMMAND_S)
                return rows

    @asynccontextmanager
    async def answered(self, limit: Limit) -> AsyncIterator[None]:
        """Statements of keywise's own: their errors become ours, and a server that does not answer is unreachable."""
        with postgres_errors(self.name):
            async with limit():
                yield

    @asynccontextmanager
    async def transaction(
        self,
        *,
        scope: int = 0,
        exclusive: bool = False,
        begin: str = "begin",
        end: str = "commit",
        limit: Limit | None = None,
        runs_user_code: bool = False,
    ) -> AsyncIterator[Any]:
        """A transaction over several steps. What an operator has set for a scope does not change meanwhile.

        With `exclusive`, no other transaction of the scope runs. The limit holds for the begin
        and the end, and for whatever else the caller applies it to.
        """
        is_own = limit is not None and not runs_user_code
        limit = limit or limit_each(SLOW_S)
        if runs_user_code:
            begin += f"; {self.reset_search_path}"
        if scope:
            begin += f"; {controls_lock(scope, exclusive=exclusive)}"
        async with self._acquired(self._handlers if runs_user_code else None, limit) as connection:
            try:
                async with self.answered(limit):
                    await connection.execute(begin)
                yield connection
                async with self.answered(limit):
                    for finish in self._finishing.get(id(connection), ()):
                        await finish()
                    done = await connection.execute(end)
                if done != "COMMIT":
                    raise UnavailableError(f"{self.name}: the transaction was rolled back")
            except BaseException as error:
                if _is_unanswered(error) or (is_own and isinstance(error, asyncio.CancelledError)):
                    # Nothing may come over this connection any more, not even the answer to a rollback.
                    self._give_up(connection)
                else:
                    await _roll_back(connection)
                raise
            finally:
                self._finishing.pop(id(connection), None)

    def before_commit(self, connection: Any, finish: Callable[[], Awaitable[None]]) -> None:
        """Have something done in a transaction of this database when everything else is done."""
        self._finishing.setdefault(id(connection), []).append(finish)

    async def bell(self, name: str, owner: str = "") -> asyncio.Event:
        """Rung when there is news under a name, from anybody but its owner, as long as the server can tell."""
        bell = self._bells.setdefault(name, {}).setdefault(owner, asyncio.Event())
        async with self._listening:
            if self._listener is None or self._listener.is_closed():
                # Who waits looks by himself now and then, so this may fail.
                with suppress(*LOST):
                    listener = await self._connect(self._url)
                    async with closed_after_error(listener):
                        await listener.add_listener(CHANNEL, self._ring)
                    self._listener = listener
                    # Only now that it is idle: `_give_up` would close it in the middle of its statement.
                    self._connections.add(listener)
                    # Whatever was told before is not heard any more.
                    for told in self._bells:
                        self._ring(None, 0, CHANNEL, told)
        return bell

    def _ring(self, connection: object, process: int, channel: str, notice: str) -> None:
        name, _, by = notice.partition(" ")
        for owner, bell in self._bells.get(name, {}).items():
            if not by or owner != by:
                bell.set()

    async def connected(self, application: str) -> Any:
        """A connection that is nobody else's, under a name of its own; the caller closes it."""
        with postgres_errors(self.name):
            connection = await self._connect(self._url)
            async with closed_after_error(connection):
                await connection.execute("select set_config('application_name', $1, false)", application)
            return connection

    async def _connect(self, url: str, **options: Any) -> Any:
        connection = await _connected(url, **options)
        async with closed_after_error(connection):
            # Not with the other settings of a connection: poolers refuse those that they do not know.
            await connection.execute(_SESSION)
        return connection

    async def _connect_shared(self, url: str, **options: Any) -> Any:
        """Open a connection that holds nothing while it is idle, so that `_give_up` may close it."""
        connection = await self._connect(url, **options)
        self._connections.add(connection)
        return connection

    @asynccontextmanager
    async def _acquired(self, pool: Any = None, limit: Limit | None = None) -> AsyncIterator[Any]:
        assert self._writers is not None, "the database is not open"
        pool = pool or self._writers
        with postgres_errors(self.name):
            try:
                async with (limit or limit_each(CONNECT_S))():
                    connection = await pool.acquire(timeout=CONNECT_S)
                # Fails if `_give_up` closed the connection before it got here.
                session = connection.get_server_pid()
            except TimeoutError as error:
                cause = (
                    f"the server does not answer, or all {pool.get_max_size()} connections of this process are in use"
                )
                raise UnavailableError(f"{self.name}: {cause}") from error
        self._in_use.add(session)
        try:
            if self._left_behind:
                await self._end_left_behind(connection)
            yield connection
        except UnavailableError as error:
            if isinstance(error.__cause__, asyncpg.ReadOnlySQLTransactionError):
                # Whether a session may write is often settled when it begins.
                await pool.expire_connections()
            elif _is_unanswered(error):
                self._give_up(connection)
            raise
        finally:
            try:
                with suppress(*LOST):
                    await pool.release(connection)
            finally:
                # Last: a release may roll back, and `_give_up` would close the connection meanwhile.
                self._in_use.discard(session)

    def _give_up(self, silent: Any) -> None:
        """Give up a connection that is silent, and all idle ones: whatever made it silent concerns them too."""
        with suppress(asyncpg.InterfaceError):
            if not silent.is_closed():
                self._left_behind.append(silent.get_server_pid())
            silent.terminate()
        for connection in list(self._connections):
            if not connection.is_closed() and connection.get_server_pid() not in self._in_use:
                connection.terminate()

    async def _end_left_behind(self, connection: Any) -> None:
        """End sessions whose connections were given up: the server would keep their locks until it notices."""
        sessions, self._left_behind = self._left_behind, []
        async with self.answered(limit_each(COMMAND_S)):
            await connection.fetch(_END_SESSIONS, sessions, timeout=COMMAND_S)

    async def _open(self) -> None:
        with postgres_errors(self.name, at_start=True):
            # Before anything is set: a session that is mixed is also that of other applications.
            await self._refuse_mixed_sessions()
            connection = await self._connect(self._url)
            try:
                await self._prepare(connection)
            finally:
                await connection.close()
            self._writers = await self._pool(WRITERS_MAX)
            self._readers = await self._pool(READERS_MAX)
            self._steppers = await self._pool(STEPPERS_MAX)
            self._handlers = await self._pool(HANDLERS_MAX, command_timeout=None)

    async def _prepare(self, connection: Any) -> None:
        await install(connection, self.name)
        self.reset_search_path = await connection.fetchval(_RESET_SEARCH_PATH)

    async def _refuse_mixed_sessions(self) -> None:
        """A pooler may hand one session to several clients by turns; what is prepared in it, or heard, goes astray."""
        async with _bare(self._url) as one, _bare(self._url) as other:
            async with one.transaction(), other.transaction():
                # Nothing of either of them is shared as long as it has a transaction.
                mine, theirs = [await session.fetchval("select pg_backend_pid()") for session in (one, other)]
            # A pooler that hands out what was used last gives `mine` to both; one that takes turns, first `theirs`.
            still = [await _is_in(one, mine), await _is_in(other, theirs)]
        if not all(still):
            raise DatabaseError(f"{self.name}: {_POOLED}")

    async def _pool(self, size: int, **options: Any) -> Any:
        sizes = {"min_size": 0, "max_size": size}
        return await asyncpg.create_pool(self._url, connect=self._connect_shared, reset=_reset, **sizes, **options)

    async def _close(self) -> None:
        for part in (self._listener, self._readers, self._writers, self._steppers, self._handlers):
            if part is not None:
                with suppress(*LOST):
                    await asyncio.wait_for(part.close(), CONNECT_S)
        self._listener = self._readers = self._writers = self._steppers = self._handlers = None


@asynccontextmanager
async def closed_after_error(connection: Any) -> AsyncIterator[None]:
    """Give a connection up if what it is needed for fails."""
    try:
        yield
    except BaseException:
        connection.terminate()
        raise


def controls_lock(scope: int, *, exclusive: bool = False) -> str:
    """The statement after which the controls of a scope do not change until the end of the transaction."""
    return f"select pg_advisory_xact_lock{'' if exclusive else '_shared'}({LOCKS}, {scope})"


# The client library takes more time to encode a list than the server takes to split a text, so long lists go as texts.


def numbers(values: Iterable[int | None]) -> str:
    """Whole numbers as one text, for `$1::text::bigint[]`."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def hex_codes(codes: Iterable[bytes]) -> str:
    """Encoded keys as one text, for `string_to_array($1, ',')`, and `decode(code, 'hex')` of each."""
    return ",".join([code.hex() for code in codes])


def joined(*columns: Sequence[str]) -> list[str]:
    """Each column of texts as one text, and the separator of all of them, for `string_to_array(text, separator)`.

    A column with one empty text is split into an empty array, which `unnest` pads with null.
    """
    for separator in ("\x1f", secrets.token_hex(16)):
        texts = [separator.join(column) for column in columns]
        if sum(text.count(separator) for text in texts) == sum(max(0, len(column) - 1) for column in columns):
            break
    return [*texts, separator]


@contextmanager
def postgres_errors(name: str, *, at_start: bool = False, of_handler: bool = False) -> Iterator[None]:
    """Turns errors of the client library into ours, at the edge: what may pass becomes `UnavailableError`.

    Whatever else a handler meets is a failure of its change.
    """
    try:
        yield
    except asyncpg.PostgresError as error:
        state = error.sqlstate or ""
        advice = _ADVICE.get(state, "")
        if state in PASSING or state[:2] in PASSING_CLASSES:
            raise UnavailableError(f"{name}: {error}{advice and f'; {advice}'}") from error
        if of_handler:
            raise
        raise DatabaseError(f"{name}: {error}; {advice or 'the server log may say more'}") from error
    except (asyncpg.DataError, asyncpg.ClientConfigurationError) as error:
        if not at_start:
            raise
        raise DatabaseError(f"{name}: {error}; check the URL") from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise UnavailableError(f"{name}: {error}") from error
    except AttributeError as error:
        if not _is_of_closed_connection(error):
            raise
        raise UnavailableError(f"{name}: the connection was closed in the middle of a statement") from error
    except (OSError, TimeoutError) as error:
        if of_handler:
            raise
        raise UnavailableError(f"{name}: {str(error) or 'no answer in time'}") from error


def is_gone(connection: Any) -> bool:
    """Whether a connection of a pool is closed; the pool has taken it back then, and refuses to be asked."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


def _is_of_closed_connection(error: AttributeError) -> bool:
    """Whether asyncpg uses a connection that was closed between two steps of a statement.

    asyncpg also closes connections by itself, in the background, if it cannot cancel a statement at the server.
    The next step then finds None in place of the protocol.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.obj is None and str(frame.f_globals.get("__name__")).startswith("asyncpg.")


def _is_unanswered(error: BaseException) -> bool:
    return isinstance(error, UnavailableError) and isinstance(error.__cause__, TimeoutError)


def is_trouble_of_server(error: BaseException) -> bool:
    """Whether every handler would meet this error now, whatever its change: the disk is full, or nothing may write."""
    return isinstance(error, asyncpg.DiskFullError | asyncpg.ReadOnlySQLTransactionError)


def is_conflict(error: BaseException | None) -> bool:
    """Whether the server rolls a transaction back because of another one: a deadlock or a serialization failure."""
    return isinstance(error, asyncpg.TransactionRollbackError)


PASSING_CLASSES = frozenset({"08", "53", "58"})
"""The connection; resources; the system under the server."""
PASSING = frozenset(
    {"57P01", "57P02", "57P03", "57P05", "57014", "40001", "40P01", "40003", "55P03", "55006", "25006", "25P03"}
)
"""Shut down, starting, cancelled, timed out, deadlocked, read-only for now: somebody else's doing."""
# A plan that was made while a table was nearly empty is kept while it grows, so it has to use the index at once.
_SESSION = (
    "set jit = off; set enable_seqscan = off; select set_config('idle_in_transaction_session_timeout', "
    f"'{IDLE_S}s', false) where current_setting('idle_in_transaction_session_timeout') = '0'"
)
FOR_HANDLERS = (
    "set local enable_seqscan = on; select set_config('idle_in_transaction_session_timeout', "
    f"'{IDLE_IN_HANDLER_S}s', true) where current_setting('idle_in_transaction_session_timeout') = '{IDLE_S}s'"
)
"""Unless the user's own setting says otherwise."""
# Not to the default: a pooler may have set another path for its sessions.
_RESET_SEARCH_PATH = """
    select format($$select set_config('search_path', %L, false)$$, current_setting('search_path'))
"""
# Those of keywise only: a pooler may have made the number up, and it may be that of another session by now.
_END_SESSIONS = (
    "select pg_terminate_backend(pid) from pg_stat_activity where pid = any($1::int[]) and pid != pg_backend_pid() "
    "and usename = current_user and application_name like 'keywise%' and state != 'idle'"
)
_POOLED = "a pooler between keywise and the server mixes sessions; use session pooling, or connect to the server itself"
_IS_READ_ONLY = "it is a standby, or read-only; name the primary, or wait until it may write"
_ADVICE = {
    "25006": _IS_READ_ONLY,
    "25P02": "a function or handler went on after an error of the server; let it raise",
    "25P03": "the worker was stopped, or a handler waited too long, in the midst of a transaction",
    "53100": "free some disk space on the server",
    "53300": "raise max_connections of the server, or run fewer workers",
    "55P03": "somebody else holds a lock for longer than lock_timeout of this user allows",
    "57014": "if it happens again and again, raise statement_timeout of this user, or lower batch_max",
    "26000": _POOLED,
    "42P05": _POOLED,
    "28P01": "check user and password",
    "28000": "check the user, and what the server allows it",
    "3D000": "create the database, or name another one",
    "42501": "give this user the right to do so",
    "42P01": "a table of keywise is missing; restore it, or name another database",
    "42883": "a serial function changed search_path and has to set it back; or restore the functions of keywise",
}


def database_at(address: Address, options: dict[str, str]) -> PostgresDatabase:
    """The database that an address names, one for all plugs of an app; its options are taken out of `options`."""
    return address.shared(PostgresDatabase, database_url(address, options))


def database_url(address: Address, options: dict[str, str]) -> str:
    """What of an address the client library is told; those options are taken out of `options`."""
    address.check_ports()
    parts = urlsplit(address.url)
    given = sorted((name, options.pop(name)) for name in OPTIONS if name in options)
    return f"postgresql://{parts.netloc}{parts.path}" + (f"?{urlencode(given)}" if given else "")


async def _connected(url: str, **options: Any) -> Any:
    given = {"timeout": CONNECT_S, "command_timeout": SLOW_S, **options}
    try:
        return await asyncpg.connect(url, server_settings={"application_name": "keywise"}, **given)
    except (ValueError, OverflowError) as error:
        if isinstance(error, asyncpg.InterfaceError):
            raise
        # Its text would tell a part of the URL, perhaps of the password.
        raise asyncpg.ClientConfigurationError("host and port cannot be read") from None


@asynccontextmanager
async def _bare(url: str) -> AsyncIterator[Any]:
    """A connection that leaves nothing in its session, not even a prepared statement."""
    connection = await _connected(url, statement_cache_size=0)
    try:
        yield connection
    finally:
        await connection.close()


async def _is_in(connection: Any, session: int) -> bool:
    """Whether a connection has that session now. Asked in one step: nothing is prepared for it."""
    done: str = await connection.execute(f"select where pg_backend_pid() = {session}")
    return done == "SELECT 1"


async def _reset(connection: Any) -> None:
    """Instead of a round trip after each use: handlers have a transaction, and nothing of ours outlives one."""
    if connection.is_in_transaction():
        await connection.execute("rollback")


async def _roll_back(connection: Any) -> None:
    """Nothing is left behind: a connection that cannot be rolled back is given up."""
    try:
        if not connection.is_closed() and connection.is_in_transaction():
            await connection.execute("rollback", timeout=CONNECT_S)
    except LOST:
        # One that was lost meanwhile is the pool's no more.
        with suppress(asyncpg.InterfaceError):
            connection.terminate()
