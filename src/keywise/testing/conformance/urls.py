"""Fixtures for an adapter that is given by its URL: they use random names, which are removed afterwards."""

import itertools
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from keywise import adapters
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import SettingsError
from keywise.core.serial.contract import TurnPolicy
from keywise.core.sink import ReadableSink, is_atomic
from keywise.core.target import MovableSink
from keywise.core.url import Address, redacted
from keywise.testing.conformance.benches import RowBench, SharingBench, bench_of
from keywise.testing.conformance.claims import LedgerBench
from keywise.testing.conformance.origins import KeyKind, OriginBench
from keywise.testing.conformance.serial.ordering import TurnsBench
from keywise.testing.conformance.sinks import SinkBench
from keywise.testing.conformance.sources import SourceBench

THINGS = {
    "sources": "queue",
    "ledgers": "scope",
    "sinks": "table",
    "origins": "table",
    "turns": "serial function",
}
CHECKS = {role: f"check_{role.removesuffix('s')}" for role in THINGS} | {"turns": "check_turns"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {"ledgers": (LedgerPolicy(),), "turns": ("w1", TurnPolicy())}
"""What an adapter is made with besides its address."""
CONNECT: dict[str, Callable[..., Any]] = {
    "sources": adapters.connect_source,
    "ledgers": adapters.connect_ledger,
    "sinks": adapters.connect_sink,
    "origins": adapters.connect_origin,
    "turns": adapters.connect_turns,
}
OWN_NAMES = ("queue", "table", "index", "topic", "stream", "collection", "exchange")
"""Options with which a URL names something that may hold data in use."""


class Playground:
    """Makes fixtures at a URL under random names, and removes what they leave there."""

    def __init__(self, role: str, url: str) -> None:
        self.url = url
        self.thing = THINGS[role]
        self.prefix = f"check_{secrets.token_hex(4)}"
        self._role = role
        self._numbers = itertools.count(1)
        self._is_memory = url.startswith("memory:")
        self._made_files = _new_files(url)
        self._check_names()
        # Made and not opened: an adapter that cannot be checked is refused before anything is written.
        self._connect(role, self.prefix, {}, *ARGUMENTS.get(role, ()))
        self._bench = bench_of(Address(url, "", {}).scheme)
        self._shares = isinstance(self._bench, SharingBench) and self._bench.shares
        if role == "origins" and not isinstance(self._bench, RowBench):
            raise SettingsError(
                f"the check cannot write rows for the origin {redacted(url)}; call keywise.testing.check_origin with a "
                "fixture of your own"
            )

    def __str__(self) -> str:
        """What the check writes, and where; shown before it starts."""
        return f"{self.thing}s named {self.prefix}_… in {redacted(self.url)}; they are removed afterwards"

    async def clean(self) -> None:
        """Remove the files that the check created."""
        for file in self._made_files:
            with suppress(FileNotFoundError):
                os.remove(file)

    @asynccontextmanager
    async def source(self) -> AsyncIterator[SourceBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        async with AsyncExitStack() as stack:
            source = await self._opened(stack, "sources", name, shared)
            another = await self._another(stack, "sources", name, self._others(shared))
            transaction = None
            if source.database is not None:
                transaction = _connections(await self._ledger(stack, name, shared))
            advance = partial(self._bench.move_clock, (source, another))
            yield SourceBench(source=source, another=another, advance=advance, transaction=transaction)

    @asynccontextmanager
    async def ledger(self, policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        async with AsyncExitStack() as stack:
            ledger = await self._opened(stack, "ledgers", name, shared, policy)
            another = await self._another(stack, "ledgers", name, self._others(shared), policy)
            advance = partial(self._bench.move_clock, (ledger, another))
            yield LedgerBench(ledger=ledger, another=another, advance=advance)

    @asynccontextmanager
    async def sink(self) -> AsyncIterator[SinkBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        async with AsyncExitStack() as stack:
            sink = await self._opened(stack, "sinks", name, shared)
            bench = await self._sink_bench(stack, sink, name, shared)
            if isinstance(sink, MovableSink):
                others = self._others(shared)
                another = await self._another(stack, "sinks", name, others)
                bench.another = await self._sink_bench(stack, another, name, others)
            yield bench

    async def _sink_bench(
        self, stack: AsyncExitStack, sink: Any, name: str, shared: dict[tuple[Any, ...], Any]
    ) -> SinkBench:
        recorded = _Recorded(sink)
        if not is_atomic(sink):
            return SinkBench(sink=recorded, content=recorded.content)
        ledger = await self._ledger(stack, name, shared)
        if ledger.database is not sink.database:
            raise SettingsError(f"no ledger shares the database of the atomic sink {redacted(self.url)}")
        return SinkBench(sink=recorded, content=recorded.content, transaction=ledger.transaction)

    @asynccontextmanager
    async def origin(self, keys: KeyKind) -> AsyncIterator[OriginBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        assert isinstance(self._bench, RowBench), "checked above"
        async with AsyncExitStack() as stack:
            rows = await stack.enter_async_context(self._bench.rows(Address(self.url, name, shared), keys))
            origin = self._connect("origins", name, shared)
            another = self._connect("origins", name, self._others(shared))
            yield OriginBench(origin=origin, another=another, rows=rows)

    @asynccontextmanager
    async def turns(self, policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
        name, shared = self._name(), dict[tuple[Any, ...], Any]()
        other = f"{name}_beside"
        async with AsyncExitStack() as stack:
            turns = await self._opened(stack, "turns", name, shared, "w1", policy)
            beside = await self._opened(stack, "turns", other, shared, "w1", policy)
            another = await self._another(stack, "turns", name, self._others(shared), "w2", policy)
            advance = partial(self._bench.move_clock, (turns, another))
            yield TurnsBench(turns=turns, another=another, beside=beside, advance=advance, function=name)

    def _name(self) -> str:
        return f"{self.prefix}_{next(self._numbers)}"

    async def _opened(
        self, stack: AsyncExitStack, role: str, name: str, shared: dict[tuple[Any, ...], Any], *arguments: Any
    ) -> Any:
        """Open an adapter. What is written under its name is removed before it is closed."""
        await self._bench.prepare(Address(self.url, name, shared), role)
        adapter = self._connect(role, name, shared, *arguments)
        try:
            await stack.enter_async_context(adapter)
        except BaseException:
            # The caller needs the error of the opening, even if the removal fails too.
            with suppress(Exception):
                await self._bench.remove(adapter, name)
            raise
        stack.push_async_callback(self._bench.remove, adapter, name)
        return adapter

    async def _another(
        self, stack: AsyncExitStack, role: str, name: str, shared: dict[tuple[Any, ...], Any], *arguments: Any
    ) -> Any:
        """Open the same adapter again, as another process would; see `_others`."""
        if not self._shares:
            await self._bench.prepare(Address(self.url, name, shared), role)
        return await stack.enter_async_context(self._connect(role, name, shared, *arguments))

    def _others(self, shared: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        """Return what another process shares: nothing, unless the bench asks for it."""
        return shared if self._shares else {}

    def _connect(self, role: str, name: str, shared: dict[tuple[Any, ...], Any], *arguments: Any) -> Any:
        address = _NamedAddress(self.url, name, shared)
        adapter = CONNECT[role](address, *arguments)
        if role == "sinks" and not isinstance(adapter, ReadableSink):
            raise SettingsError(
                f"the sink {redacted(self.url)} cannot be read, so the check cannot see what it holds; give it a "
                "method read(keys), or call keywise.testing.check_sink with a SinkBench whose content() asks the store"
            )
        if not address.is_named and not self._is_memory:
            raise SettingsError(
                f"{redacted(self.url)} fixes which {self.thing} is used, so the check cannot keep its data apart from "
                f"yours; call keywise.testing.{CHECKS[self._role]} with a fixture of your own"
            )
        return adapter

    async def _ledger(self, stack: AsyncExitStack, name: str, shared: dict[tuple[Any, ...], Any]) -> Any:
        """Open the ledger in the database of an open adapter."""
        address = Address(self.url.partition("?")[0], name, shared)
        ledger = await stack.enter_async_context(adapters.connect_ledger(address, LedgerPolicy()))
        stack.push_async_callback(self._bench.remove, ledger, name)
        return ledger

    def _check_names(self) -> None:
        options = Address(self.url, "", {})._options
        for option in OWN_NAMES:
            if option in options:
                raise SettingsError(
                    f"{redacted(self.url)} names a {option} that may hold data in use; leave {option}= out, and the "
                    f"check uses one that is named {self.prefix}_…"
                )


class _NamedAddress(Address):
    """An address that records whether the adapter has read the pipeline's name."""

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
    """A sink that records the keys of its changes, so that all of them can be read."""

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


def _new_files(url: str) -> list[str]:
    """Return the files that a check of this URL creates, unless they exist already."""
    address = Address(url, "", {})
    if address.scheme != "sqlite":
        return []
    path = address.file()
    return [] if Path(path).exists() else [path, f"{path}-wal", f"{path}-shm"]
