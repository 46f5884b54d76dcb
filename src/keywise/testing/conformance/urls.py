"""Benches for a plug that is named by its URL: under names of their own, which are cleaned up afterwards."""

import itertools
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from keywise import adapters
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import SettingsError
from keywise.core.serial.contract import TurnPolicy
from keywise.core.sink import ReadableSink, is_atomic
from keywise.core.url import Address, redacted
from keywise.testing.conformance.claims import LedgerBench
from keywise.testing.conformance.promise import UncheckedError
from keywise.testing.conformance.serial.ordering import TurnsBench
from keywise.testing.conformance.sinks import SinkBench
from keywise.testing.conformance.sources import SourceBench

THINGS = {"sources": "queue", "ledgers": "scope", "sinks": "table", "turns": "serial function"}
CHECKS = {"sources": "check_source", "ledgers": "check_ledger", "sinks": "check_sink", "turns": "check_turns"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {"ledgers": (LedgerPolicy(),), "turns": ("w1", TurnPolicy())}
"""What a plug is made with besides its address."""
CONNECT: dict[str, Callable[..., Any]] = {
    "sources": adapters.connect_source,
    "ledgers": adapters.connect_ledger,
    "sinks": adapters.connect_sink,
    "turns": adapters.connect_turns,
}
OWN_NAMES = ("queue", "table", "index", "topic", "stream", "collection", "exchange")
"""Options with which a URL names something that may hold what somebody needs."""
QUEUE_BITS = 40
DRAIN_MAX = 1000


class Playground:
    """A URL with names that nobody else uses: where benches are made, and what is left there."""

    def __init__(self, role: str, url: str) -> None:
        self.url = url
        self.thing = THINGS[role]
        self.prefix = f"check_{secrets.token_hex(4)}"
        self._role = role
        self._numbers = itertools.count(1)
        self._is_memory = url.startswith("memory:")
        self._made_files = _new_files(url)
        self._check_names()
        # Made and not opened: what cannot be checked is told before anything is written.
        self._connect(role, self.prefix, {}, *ARGUMENTS.get(role, ()))

    def __str__(self) -> str:
        """What is written where, for people who want to know before."""
        return f"{self.thing}s named {self.prefix}_… in {redacted(self.url)}; they are removed afterwards"

    async def clean(self) -> None:
        """Remove files that were not there before."""
        for file in self._made_files:
            with suppress(FileNotFoundError):
                os.remove(file)

    @asynccontextmanager
    async def source(self) -> AsyncIterator[SourceBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        async with AsyncExitStack() as stack:
            source = self._connect("sources", name, shared)
            if is_brokered := hasattr(source, "declare"):
                stack.push_async_callback(source.forget, name)
                await source.declare()
            await stack.enter_async_context(source)
            # A broker tells nobody what other processes hold, so both are of one; their connections are their own.
            beside = shared if is_brokered else self._second(shared)
            another = await stack.enter_async_context(self._connect("sources", name, beside))
            if not is_brokered:
                stack.push_async_callback(_clean, source, name)
            transaction = None
            if source.database is not None:
                ledger = await stack.enter_async_context(self._ledger(name, shared))
                stack.push_async_callback(_clean, ledger, name)
                transaction = _connections(ledger)
            yield SourceBench(
                source=source, another=another, advance=_advance(source, another), transaction=transaction
            )

    @asynccontextmanager
    async def ledger(self, policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        async with AsyncExitStack() as stack:
            ledger = await stack.enter_async_context(self._connect("ledgers", name, shared, policy))
            another = await stack.enter_async_context(self._connect("ledgers", name, self._second(shared), policy))
            stack.push_async_callback(_clean, ledger, name)
            yield LedgerBench(ledger=ledger, another=another, advance=_advance(ledger, another))

    @asynccontextmanager
    async def sink(self) -> AsyncIterator[SinkBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        async with AsyncExitStack() as stack:
            sink = await stack.enter_async_context(self._connect("sinks", name, shared))
            stack.push_async_callback(_clean, sink, name)
            recorded = _Recorded(sink)
            if not is_atomic(sink):
                yield SinkBench(sink=recorded, content=recorded.content)
                return
            ledger = await stack.enter_async_context(self._ledger(name, shared))
            stack.push_async_callback(_clean, ledger, name)
            if ledger.database is not sink.database:
                raise SettingsError(f"no ledger shares the database of the atomic sink {redacted(self.url)}")
            yield SinkBench(sink=recorded, content=recorded.content, transaction=ledger.transaction)

    @asynccontextmanager
    async def turns(self, policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        other = f"{name}_beside"
        async with AsyncExitStack() as stack:

            async def opened(function: str, owner: str, shared: dict[tuple[Any, ...], Any]) -> Any:
                return await stack.enter_async_context(self._connect("turns", function, shared, owner, policy))

            turns = await opened(name, "w1", shared)
            stack.push_async_callback(_clean, turns, name)
            beside = await opened(other, "w1", shared)
            stack.push_async_callback(_clean, beside, other)
            another = await opened(name, "w2", self._second(shared))
            advance = _advance(turns, another)
            yield TurnsBench(turns=turns, another=another, beside=beside, advance=advance, function=name)

    def _name(self) -> str:
        return f"{self.prefix}_{next(self._numbers)}"

    def _second(self, shared: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        """A connection of its own, as another process has; memory is shared by nothing else."""
        return shared if self._is_memory else {}

    def _connect(self, role: str, name: str, shared: dict[tuple[Any, ...], Any], *arguments: Any) -> Any:
        address = _NamedAddress(self.url, name, shared)
        plug = CONNECT[role](address, *arguments)
        if role == "sinks" and not isinstance(plug, ReadableSink):
            raise SettingsError(
                f"the sink {redacted(self.url)} cannot be read, so nobody can tell what it holds; give it a method "
                "read(keys), or call keywise.testing.check_sink with a bench whose content() asks the store"
            )
        if not address.is_named and not self._is_memory:
            raise SettingsError(
                f"{redacted(self.url)} says itself which {self.thing} is used, so what the check writes could not be "
                f"told apart from what is there; call keywise.testing.{CHECKS[self._role]} with a bench of its own"
            )
        return plug

    def _ledger(self, name: str, shared: dict[tuple[Any, ...], Any]) -> Any:
        return adapters.connect_ledger(Address(self.url.partition("?")[0], name, shared), LedgerPolicy())

    def _check_names(self) -> None:
        options = Address(self.url, "", {})._options
        for option in OWN_NAMES:
            if option in options:
                raise SettingsError(
                    f"{redacted(self.url)} names a {option} that may hold what you need; leave {option}= out, and the "
                    f"check plays with one that is named {self.prefix}_…"
                )


class _NamedAddress(Address):
    """An address that remembers whether anybody asked for the pipeline's name."""

    def __init__(self, url: str, name: str, shared: dict[tuple[Any, ...], Any]) -> None:
        self.is_named = False
        super().__init__(url, name, shared)
        self.is_named = False

    @property
    def name(self) -> str:
        self.is_named = True
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name


class _Recorded:
    """A sink that remembers which keys it was given, so that all of them can be read."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._keys: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sink, name)
        return self._recording(found, 0 if name == "apply" else 1) if name in ("apply", "write") else found

    async def content(self) -> Mapping[str, bytes]:
        held = await self._sink.read(list(self._keys))
        for key, one in held.items():
            if not isinstance(one.body, bytes):
                raise SettingsError(f"the sink keeps only some fields of {key!r}; check one that keeps whole bodies")
        return {key: one.body for key, one in held.items()}

    def _recording(self, method: Callable[..., Awaitable[Any]], place: int) -> Callable[..., Awaitable[Any]]:
        async def record(*arguments: Any) -> Any:
            self._keys.update((change.key, None) for change in arguments[place])
            return await method(*arguments)

        return record


def _connections(ledger: Any) -> Callable[[], Any]:
    @asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        async with ledger.transaction() as opened:
            yield opened.connection

    return transaction


def _advance(*plugs: Any) -> Callable[[float], None]:
    """Moves the clocks of all plugs; who has none that can be moved, leaves promises about time unchecked."""
    clocks = list({id(clock): clock for plug in plugs if (clock := _clock_of(plug)) is not None}.values())
    ahead_s = 0.0
    for clock in clocks:
        if isinstance(clock, MemoryDatabase):
            now = clock.clock
            clock.clock = lambda now=now: now() + ahead_s  # type: ignore[misc]

    def advance(seconds: float) -> None:
        nonlocal ahead_s
        if not clocks:
            raise UncheckedError("the clock of this store cannot be moved, and nobody wants to wait so long")
        ahead_s += seconds
        for clock in clocks:
            if isinstance(clock, SqliteDatabase):
                clock._clock_offset_s += seconds
            elif not isinstance(clock, MemoryDatabase):
                clock.advance(seconds)

    return advance


def _clock_of(plug: Any) -> Any:
    database = getattr(plug, "database", None)
    candidates = [one for one in (database, plug) if one is not None]
    movable = (one for one in candidates if isinstance(one, MemoryDatabase | SqliteDatabase) or hasattr(one, "advance"))
    return next(movable, None)


async def _clean(plug: Any, name: str) -> None:
    """Remove what a bench has written: rows and tables of a database, else messages that can be received."""
    database: Any = getattr(plug, "database", None)
    if isinstance(database, SqliteDatabase):
        await database.write(lambda connection: _delete(connection, name))
    elif hasattr(database, "forget"):
        await database.forget(name)
    elif hasattr(plug, "forget"):
        await plug.forget(name)
    elif hasattr(plug, "receive"):
        await _drain(plug)


async def _drain(source: Any) -> None:
    for _ in range(DRAIN_MAX):
        deliveries = await source.receive(DRAIN_MAX, 0.0)
        if not deliveries:
            return
        await source.ack(deliveries)


def _delete(connection: sqlite3.Connection, name: str) -> None:
    for (queue,) in connection.execute("select id from keywise_queues where name = ?", (name,)).fetchall():
        stretch = (queue << QUEUE_BITS, ((queue + 1) << QUEUE_BITS) - 1)
        connection.execute("delete from keywise_ready where id between ? and ?", stretch)
        connection.execute("delete from keywise_held where queue = ?", (queue,))
        connection.execute("delete from keywise_queues where id = ?", (queue,))
    for (scope,) in connection.execute("select id from keywise_scopes where name = ?", (name,)).fetchall():
        for table in _tables_with_scope(connection):
            connection.execute(f"delete from {table} where scope = ?", (scope,))  # noqa: S608 - our own tables
        connection.execute("delete from keywise_scopes where id = ?", (scope,))
    connection.execute(f'drop table if exists "{name}"')


def _tables_with_scope(connection: sqlite3.Connection) -> Sequence[str]:
    named = "select name from sqlite_master where type = 'table' and name like 'keywise%'"
    tables = [name for (name,) in connection.execute(named).fetchall()]
    return [one for one in tables if any(row[1] == "scope" for row in connection.execute(f"pragma table_info({one})"))]


def _new_files(url: str) -> list[str]:
    """Files that a check of this URL makes, and that were not there before."""
    address = Address(url, "", {})
    if address.scheme != "sqlite":
        return []
    path = address.file()
    return [] if Path(path).exists() else [path, f"{path}-wal", f"{path}-shm"]
