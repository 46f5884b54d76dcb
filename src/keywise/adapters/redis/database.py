"""One Redis server that ledgers live in: pooled connections, its own clock, and what it must be set to."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import hiredis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from keywise.adapters.redis.script import Script
from keywise.core.clock import boot_time
from keywise.core.errors import AddressError, DatabaseError, UnavailableError
from keywise.core.resource import UserCount
from keywise.core.url import Address, redacted

CONNECT_S = 10.0
"""How long a connection may take, and how long one of the pool is waited for."""
COMMAND_S = 10.0
"""How long an answer may take before the server counts as unreachable, unless a short lease asks for less."""
IDLE_S = 5.0
"""A connection that nobody used for longer is made anew, which costs less than a call that fails."""
CONNECTIONS_MAX = 8
OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""What a URL may tell the client library."""
OLDEST = (7, 0)


class RedisDatabase:
    """Connections to one server, open as long as it has users."""

    def __init__(self, url: str, options: tuple[tuple[str, str], ...] = ()) -> None:
        self.name = redacted(url)
        self._url = url
        self._options = dict(options)
        self._users = UserCount(self._open, self._close)
        self._factory: Any = None
        """Makes connections as the URL says; None while this is not open."""
        self._free: dict[Any, float] = {}
        """Connections that nobody uses, the last used ones last, and since when."""
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._command_s = COMMAND_S

    async def __aenter__(self) -> Self:
        await self._users.enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._users.leave()

    async def now(self) -> float:
        """The store's clock: that of the server, the same for all who are connected to it."""
        seconds, microseconds = await self.run("TIME")
        return int(seconds) + int(microseconds) / 1e6

    def limit_commands(self, limit_s: float) -> None:
        """Let no answer take longer than this: a ledger with a short lease has to be repeated in time."""
        self._command_s = min(self._command_s, limit_s)

    def connection(self) -> Any:
        """A new one, for who listens: it is not connected yet, and whoever asked for it ends it."""
        assert self._factory is not None, "the database is not open"
        return self._factory.make_connection()

    async def run(self, *command: Any) -> Any:
        """The answer to one command."""
        with redis_errors(self.name):
            return await self._ask(*command)

    async def call(self, script: Script, *arguments: Any) -> list[Any]:
        """The answer of a script; a server that has forgotten it is given it again."""
        with redis_errors(self.name):
            try:
                answer = await self._ask("EVALSHA", script.sha, 0, *arguments)
            except NoScriptError:
                answer = await self._ask("EVAL", script.text, 0, *arguments)
        found: list[Any] = answer
        return found

    async def _ask(self, *command: Any) -> Any:
        """One command and its answer, as the server gives it.

        The pools of the client library lose connections whose users are cancelled, so this is done here.
        """
        assert self._factory is not None, "the database is not open"
        async with self._slots:
            connection = await self._taken()
            try:
                answer = await _exchanged(connection, command, self._command_s)
            except ResponseError as error:
                if _may_pass(error):
                    # By now the name may lead to another server, which only a new connection finds.
                    await self._drop(connection, *self._free)
                else:
                    self._free[connection] = boot_time()
                raise
            except BaseException:
                # Its answer may still come, and must not be taken for another one's. The others may be cut off as well.
                await self._drop(connection, *self._free)
                raise
            self._free[connection] = boot_time()
            return answer

    async def _taken(self) -> Any:
        """One that was used a moment ago, or a new one."""
        if self._free:
            connection, since = self._free.popitem()
            if boot_time() - since <= IDLE_S:
                return connection
            # Whatever lies between may have cut it off long ago, and so the others, which were idle for longer.
            await self._drop(connection, *self._free)
        return self._factory.make_connection()

    async def _drop(self, *connections: Any) -> None:
        self._free = {one: since for one, since in self._free.items() if one not in connections}
        for connection in connections:
            with suppress(OSError, TimeoutError, RedisError):
                await connection.disconnect(nowait=True)

    async def _open(self) -> None:
        with redis_errors(self.name):
            self._factory = ConnectionPool.from_url(
                self._url,
                socket_connect_timeout=CONNECT_S,
                # Its own limit on a call swallows cancellations now and then, so there is one here.
                socket_timeout=None,
                protocol=2,
                # Whoever asks decides what is tried again.
                retry=Retry(NoBackoff(), 0),
                **self._options,
            )
        try:
            await self._check()
        except BaseException:
            await self._close()
            raise

    async def _check(self) -> None:
        """Refuse a server that would lose marks by its settings, or cannot run the scripts."""
        await self.run("PING")
        try:
            info = _info(await self.run("INFO", "everything"))
        except DatabaseError:
            return  # Not everybody may ask; then it is believed to be set well.
        version = info.get("redis_version", "")
        if _version(version) < OLDEST:
            raise DatabaseError(f"{self.name} runs Redis {version}; keywise needs Redis 7.0 or newer")
        if info.get("cluster_enabled") == "1":
            raise DatabaseError(
                f"{self.name} is part of a Redis Cluster, where a step over many keys is not one step; "
                "use a server that is no cluster"
            )
        if info.get("role", "master") != "master":
            raise DatabaseError(f"{self.name} is a replica, which nobody can write to; name its master")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise DatabaseError(
                f"{self.name} has maxmemory-policy {policy}: it would throw away what keywise has to remember; "
                "set maxmemory-policy noeviction, or use a server of its own"
            )

    async def _close(self) -> None:
        self._factory = None
        await self._drop(*self._free)


async def _exchanged(connection: Any, command: tuple[Any, ...], limit_s: float) -> Any:
    """The answer to a command, over a connection that is made if it has to be."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    async with asyncio.timeout(limit_s):
        await connection.connect()
        # The client library packs in Python, which takes longer than all else that is done for a large command.
        await connection.send_packed_command(hiredis.pack_command(command))
        answer = await connection.read_response()
    if task.cancelling() > before:
        # The client library swallows it while it connects, and whoever cancelled would wait for ever.
        raise asyncio.CancelledError
    return answer


@contextmanager
def redis_errors(name: str) -> Iterator[None]:
    """Turns errors of the client library into ours, at the edge: what may pass becomes `UnavailableError`."""
    try:
        yield
    except (AuthenticationError, AuthorizationError) as error:
        raise DatabaseError(f"{name}: {error}; check user and password") from error
    except (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError) as error:
        raise UnavailableError(f"{name}: {str(error) or 'no answer in time'}") from error
    except ResponseError as error:
        if _may_pass(error):
            raise UnavailableError(f"{name}: {error}") from error
        is_forbidden = isinstance(error, NoPermissionError) or "user executing the script" in str(error)
        advice = _PERMIT if is_forbidden else _ADVICE.get(_word(error), _LOG)
        raise DatabaseError(f"{name}: {error}; {advice}") from error
    except RedisError as error:
        raise UnavailableError(f"{name}: {error}") from error


PASSING = (OutOfMemoryError, ReadOnlyError, ClusterDownError, TryAgainError)
PASSING_WORDS = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "LOADING", "MASTERDOWN"})
"""Busy with somebody's script, out of memory or disk, no longer the master: somebody else's doing."""
_LOG = "the server's log may say more"
_PERMIT = "give this user the right to do so"
_ADVICE = {
    "NOAUTH": "check user and password",
    "WRONGPASS": "check user and password",
    "WRONGTYPE": "something else writes under keywise's names; use another database number, or a server of its own",
}


def _may_pass(error: ResponseError) -> bool:
    return isinstance(error, PASSING) or _word(error) in PASSING_WORDS


def _word(error: ResponseError) -> str:
    return str(error).partition(" ")[0].rstrip(":")


def database_at(address: Address, options: dict[str, str]) -> RedisDatabase:
    """The server that an address names, one for all ledgers of an app; its options are taken out of `options`."""
    parts = urlsplit(address.url)
    address.check_ports()
    number = unquote(parts.path).strip("/")
    if number and not number.isdecimal():
        raise AddressError(
            f"{redacted(address.url)} names the database {number!r}, but Redis numbers them; write for example "
            f"{address.scheme}://localhost:6379/0"
        )
    if not parts.hostname:
        raise AddressError(
            f"{redacted(address.url)} names no server; write for example {address.scheme}://localhost:6379"
        )
    given = tuple(sorted((name, options.pop(name)) for name in OPTIONS if name in options))
    if given and address.scheme != "rediss":
        raise AddressError(f"{redacted(address.url)}: {given[0][0]} is for rediss://, which is encrypted")
    return address.shared(RedisDatabase, f"{parts.scheme}://{parts.netloc}/{number or 0}", given)


def in_pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Members with their scores, or fields with their values, as Redis lists them."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
