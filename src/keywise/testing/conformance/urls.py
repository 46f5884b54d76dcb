"""Benches for a plug that is named by its URL: under names of their own, which are cleaned up afterwards."""

import itertools
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from keywise import adapters
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import SettingsError
from keywise.core.serial.contract import TurnPolicy
from keywise.core.url import Address, redacted
from keywise.flow.pipeline import is_atomic
from keywise.testing.conformance.benches import bench_of
from keywise.testing.conformance.claims import LedgerBench
from keywise.testing.conformance.serial.ordering import TurnsBench
from keywise.testing.conformance.sinks import SinkBench
from keywise.testing.conformance.sources import SourceBench

THINGS = {"sources": "queue", "ledgers": "scope", "sinks": "table", "turns": "serial function"}
CHECKS = {"sources": "check_source", "ledgers": "check_ledger", "sinks": "check_sink", "turns": "check_turns"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {"ledgers": (LedgerPolicy(),), "turns": ("w1", TurnPolicy())}
"""What a plug is made with besides its address."""
OWN_NAMES = ("queue", "table", "index", "topic", "stream", "collection", "exchange")
"""Options with which a URL names something that may hold what somebody needs."""


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
        self._bench = bench_of(Address(url, "", {}).scheme)
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
        name = self._name()
        shared = await self._prepared(name)
        async with AsyncExitStack() as stack:
            source = self._connect("sources", name, shared)
            if is_brokered := hasattr(source, "declare"):
                stack.push_async_callback(source.forget, name)
                await source.declare()
            await stack.enter_async_context(source)
            # A broker tells nobody what other processes hold, so both are of one; their connections are their own.
            beside = shared if is_brokered else await self._second(name, shared)
            another = await stack.enter_async_context(self._connect("sources", name, beside))
            if not is_brokered:
                stack.push_async_callback(self._bench.remove, source, name)
            transaction = None
            if source.database is not None:
                ledger = await stack.enter_async_context(self._ledger(name, shared))
                stack.push_async_callback(self._bench.remove, ledger, name)
                transaction = _connections(ledger)
            yield SourceBench(
                source=source, another=another, advance=self._advance(source, another), transaction=transaction
            )

    @asynccontextmanager
    async def ledger(self, policy: LedgerPolicy) -> AsyncIterator[LedgerBench]:
        name = self._name()
        shared = await self._prepared(name)
        async with AsyncExitStack() as stack:
            ledger = await stack.enter_async_context(self._connect("ledgers", name, shared, policy))
            another = await stack.enter_async_context(
                self._connect("ledgers", name, await self._second(name, shared), policy)
            )
            stack.push_async_callback(self._bench.remove, ledger, name)
            yield LedgerBench(ledger=ledger, another=another, advance=self._advance(ledger, another))

    @asynccontextmanager
    async def sink(self) -> AsyncIterator[SinkBench]:
        name = self._name()
        shared = await self._prepared(name)
        async with AsyncExitStack() as stack:
            sink = await stack.enter_async_context(self._connect("sinks", name, shared))
            stack.push_async_callback(self._bench.remove, sink, name)
            recorded = _Recorded(sink)
            if not is_atomic(sink):
                yield SinkBench(sink=recorded, content=recorded.content)
                return
            ledger = await stack.enter_async_context(self._ledger(name, shared))
            stack.push_async_callback(self._bench.remove, ledger, name)
            if ledger.database is not sink.database:
                raise SettingsError(f"no ledger shares the database of the atomic sink {redacted(self.url)}")
            yield SinkBench(sink=recorded, content=recorded.content, transaction=ledger.transaction)

    @asynccontextmanager
    async def turns(self, policy: TurnPolicy) -> AsyncIterator[TurnsBench]:
        name = self._name()
        shared = await self._prepared(name)
        other = f"{name}_beside"
        async with AsyncExitStack() as stack:

            async def opened(function: str, owner: str, shared: dict[tuple[Any, ...], Any]) -> Any:
                return await stack.enter_async_context(self._connect("turns", function, shared, owner, policy))

            turns = await opened(name, "w1", shared)
            stack.push_async_callback(self._bench.remove, turns, name)
            beside = await opened(other, "w1", shared)
            stack.push_async_callback(self._bench.remove, beside, other)
            another = await opened(name, "w2", await self._second(name, shared))
            advance = self._advance(turns, another)
            yield TurnsBench(turns=turns, another=another, beside=beside, advance=advance, function=name)

    def _name(self) -> str:
        return f"{self.prefix}_{next(self._numbers)}"

    async def _prepared(self, name: str) -> dict[tuple[Any, ...], Any]:
        """What the adapters of one process share, with what the bench puts there."""
        shared: dict[tuple[Any, ...], Any] = {}
        await self._bench.prepare(Address(self.url, name, shared), self._role)
        return shared

    async def _second(self, name: str, shared: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        """Connections of their own, as another process has; memory is shared by nothing else."""
        return shared if self._is_memory else await self._prepared(name)

    def _advance(self, *adapters: Any) -> Callable[[float], None]:
        return lambda seconds: self._bench.move_clock(adapters, seconds)

    def _connect(self, role: str, name: str, shared: dict[tuple[Any, ...], Any], *arguments: Any) -> Any:
        address = _NamedAddress(self.url, name, shared)
        plug = adapters.connect(role, address, *arguments)
        if role == "sinks" and not hasattr(plug, "read"):
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
        return adapters.connect("ledgers", Address(self.url.partition("?")[0], name, shared), LedgerPolicy())

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


def _new_files(url: str) -> list[str]:
    """Files that a check of this URL makes, and that were not there before."""
    address = Address(url, "", {})
    if address.scheme != "sqlite":
        return []
    path = address.file()
    return [] if Path(path).exists() else [path, f"{path}-wal", f"{path}-shm"]
