"""The app: one ledger, and the pipelines and serial functions that use it."""

import asyncio
import dataclasses
import os
import random
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar, Unpack, cast

from msgspec.structs import replace

from keywise import adapters
from keywise.adapters.function.origin import FunctionOrigin, UserOrigin
from keywise.adapters.function.sink import FunctionSink, TransactedFunctionSink, signature_of
from keywise.core import events
from keywise.core.admin import ControlStore
from keywise.core.backoff import backoff_s
from keywise.core.bodies import decoder, encoded
from keywise.core.clock import boot_time
from keywise.core.controls import PLAIN
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import DatabaseError, SettingsError, UnavailableError
from keywise.core.events import Observer
from keywise.core.ledger import Ledger, LosesWrites, PluggedLedger
from keywise.core.limits import Debounce, Rate
from keywise.core.origin import Origin
from keywise.core.record import RECORDS
from keywise.core.serial.contract import TurnPolicy, Turns
from keywise.core.settings import Settings, seconds
from keywise.core.sink import AtomicSink, Sink, is_atomic
from keywise.core.source import AckTimeoutSource, LeaseFollowingSource, OutboxSource, Source
from keywise.core.target import MovableSink
from keywise.core.url import Address, filled, redacted
from keywise.flow.consumer import Consumer
from keywise.flow.degraded.journal_files import JournalDirectory
from keywise.flow.degraded.lazy_ledger import LazyLedger
from keywise.flow.handover import HandoverQueue
from keywise.flow.intake import FieldRoute, Fields, FunctionRoute, Intake, MessageReader, Read
from keywise.flow.lazy_origin import LazyOrigin
from keywise.flow.pipeline import OpenPipeline, may_show_older
from keywise.flow.refetch import from_origin, in_thread
from keywise.flow.sink_check import report_empty_sink
from keywise.flow.strategy import CommitStrategy, choose_strategy
from keywise.ingest.announcement_reader import AnnouncementReader
from keywise.ingest.announcement_source import AnnouncementSource
from keywise.ingest.away_store import AwayStore
from keywise.ingest.definition import ObjectsDefinition
from keywise.ingest.dialects import Dialect, check_store, dialect_of
from keywise.ingest.envelope_writer import RecordHandover
from keywise.ingest.open_objects import OpenObjects
from keywise.observe.history import HistoryRecorder
from keywise.observe.log import Log, still_running
from keywise.options import (
    ObjectOptions,
    PipelineOptions,
    Retry,
    check_limits,
    check_types,
    objects_from,
    settings_from,
    with_retry,
)
from keywise.reindex.shards import SHARDS, other_scope
from keywise.reindex.worker import ReindexWorker
from keywise.serial.function import SerialFunction, SerialWorker, Wiring, define

LANES = ("live", "bulk")
START_RETRY_MAX_S = 5.0
"""How often at least a pipeline that waits for its start tries to reach its source, ledger and sink."""
SILENT_START_S = 5.0
"""How long a start may take before it is reported: the limits of the clients are longer."""
_RNG = random.Random()
SAME_WISH_S = 0.2
"""Signals within this time count as one: `timeout` and some process managers signal a process and also its group."""

Handler = TypeVar("Handler", bound=Callable[..., Any])
T = TypeVar("T")


class PipelineDefinition:
    """The definition of a pipeline. Nothing is opened before the app runs."""

    def __init__(
        self,
        app: "App",
        name: str,
        route: FieldRoute | FunctionRoute | None,
        settings: Settings,
        objects: ObjectsDefinition | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.objects = objects
        """How objects are read; None for a pipeline whose messages carry their content."""
        self.records: PipelineDefinition | None = None
        """The pipeline that applies the records of objects, if they are changes with keys of their own."""
        self.debounce: Debounce | None = None
        self.rate: Rate | None = None
        self.connecting_to = ""
        """What is connected at the moment, or was the last."""
        self._app = app
        self._route = route
        self._lanes: dict[str, str] = {}
        """The lane of each source, by its URL."""
        self._dialects: dict[str, Dialect] = {}
        """The dialect of each source of an object pipeline, by its URL."""
        self._sink_url: str | None = None
        self._handler: Callable[..., Any] | None = None
        self._decode: Callable[[bytes], Any] | None = None
        self._origin: str | UserOrigin | None = None
        self._refetch: Callable[[str], Any] | None = None
        self._lookup: Callable[[str], Any] | None = None

    @property
    def bulk(self) -> frozenset[int]:
        """Indexes of the sources that give way to the others; empty if all are bulk."""
        found = frozenset(n for n, lane in enumerate(self._lanes.values()) if lane == "bulk")
        return found if len(found) < len(self._lanes) else frozenset()

    def source(self, url: str, *, lane: str = "live", dialect: str | Callable[..., Any] | None = None) -> Self:
        """Add a source. Messages of the bulk lane give way to live ones, but never starve.

        `dialect` says how the messages of an object pipeline announce objects: `s3`, `gcs`, `uri`, or a function.
        """
        if lane not in LANES:
            raise SettingsError(f"lane={lane!r} is not known; write one of {', '.join(LANES)}")
        if (dialect is not None) != (self.objects is not None):
            what = "needs dialect=" if dialect is None else "takes no dialect="
            raise SettingsError(
                f"a source of pipeline {self.name!r} {what}: app.objects reads objects that messages announce, and "
                "app.pipeline messages that carry their content"
            )
        self._app._address(url, self.name)
        if url in self._lanes:
            raise SettingsError(f"pipeline {self.name!r} has the source {redacted(url)} already; name it once")
        if dialect is not None and self.objects is not None:
            self._dialects[url] = dialect_of(dialect)
            check_store(dialect, self.objects.selection.root)
        self._lanes[url] = lane
        return self

    def source_for(self, lane: str | None) -> str:
        """Return the URL of the first source, or of the first one in a lane."""
        urls = [url for url, its_lane in self._lanes.items() if lane in (None, its_lane)]
        if not urls:
            what = "no source" if lane is None else f"no source in the lane {lane!r}"
            option = "" if lane is None else f', lane="{lane}"'
            raise SettingsError(
                f"pipeline {self.name!r} has {what}; call .source(URL{option}) (in a TOML file: sources = [URL])"
            )
        return urls[0]

    def sink(self, url: str) -> Self:
        """Write changes to a store for which keywise has an adapter."""
        if self.records is not None:
            self.records.sink(url)
            return self
        self._only_one_target()
        self._app._address(url, self.name)
        self._sink_url = url
        return self

    def apply(self, handler: Handler) -> Handler:
        """Decorate a handler: the function that writes changes."""
        if self.records is not None:
            return self.records.apply(handler)
        self._only_one_target()
        signature = signature_of(handler)
        if self.objects is not None and not signature.is_batch:
            raise SettingsError(f"a handler of {self.name!r} takes the records of a part: records: list[Record]")
        value = signature.value
        self._decode = decoder(value) if value is not Any else None
        self._handler = handler
        return handler

    def origin(self, url_or_object: str | UserOrigin) -> Self:
        """Name the source of truth: the URL of a table, or an object with the methods `shards`, `scan` and `fetch`.

        keywise repairs suspect keys with it, unless a function is decorated with `refetch`.
        """
        if self.objects is not None:
            raise SettingsError(
                f"pipeline {self.name!r} reads objects, and its source of truth is their store; leave .origin out, and "
                f"read all objects again by keywise objects backfill {self.name}"
            )
        if self._origin is not None:
            raise SettingsError(f"pipeline {self.name!r} has an origin already; name one")
        if isinstance(url_or_object, str):
            self._app._address(url_or_object, self.name)
        else:
            FunctionOrigin(url_or_object)  # It refuses an object without the methods.
        self._origin = url_or_object
        return self

    def refetch(self, function: Handler) -> Handler:
        """Decorate a function that reads the current body of a key from the source of truth.

        It returns None if the key is gone. keywise repairs suspect keys with it, even if there is an origin.
        """
        if self.records is not None:
            return self.records.refetch(function)
        self._refetch = function
        return function

    def lookup(self, function: Handler) -> Handler:
        """Decorate a function that reads what a handler's store holds of a key.

        It returns the body, or those of its fields that the store keeps; None if the key is not there.
        `keywise reconcile` compares the result with the source of truth.
        """
        if self.records is not None:
            return self.records.lookup(function)
        self._lookup = function
        return function

    def _only_one_target(self) -> None:
        if self._sink_url is not None or self._handler is not None:
            raise SettingsError(f"pipeline {self.name!r} has a sink already; a second one needs a pipeline of its own")

    def _reader(self) -> Intake:
        if self._route is None:
            return AnnouncementReader()
        return MessageReader(self._route, body_max_bytes=self.settings.body_max_bytes, decode=self._decode)


class App:
    """An application: the URL of its ledger, and its pipelines and serial functions."""

    def __init__(self, ledger: str, *, observers: Sequence[Observer] | None = None) -> None:
        self.ledger_url = ledger
        self.observers: list[Observer] = list(observers) if observers is not None else [Log()]
        self.pipelines: dict[str, PipelineDefinition] = {}
        self.serials: dict[str, SerialFunction] = {}
        self._shared: dict[tuple[Any, ...], Any] = {}
        self._stack = AsyncExitStack()
        self._senders: dict[tuple[str, str], Source] = {}
        self.owners: set[str] = set()
        """The owners of the claims of this app: one for each pipeline that is open."""
        self._consumers: list[Consumer | ReindexWorker | SerialWorker] = []
        self._is_stopping = False
        self._starting: set[asyncio.Task[None]] = set()
        """Tasks that connect pipelines, or wait until they can."""
        self._address(ledger, "")

    def pipeline(  # noqa: PLR0913 - one parameter per option
        self,
        name: str,
        *,
        key: str | None = None,
        version: str | None = None,
        deleted: Mapping[str, Sequence[Any]] | None = None,
        read: Read | None = None,
        retry: Retry | None = None,
        debounce: Debounce | None = None,
        rate: Rate | None = None,
        **options: Unpack[PipelineOptions],
    ) -> PipelineDefinition:
        """Define a pipeline. Its name is the scope of its keys in the ledger: with another name, all marks are lost.

        Name the fields of the message that hold the key and the version (`key=`, `version=`, `deleted=`), or pass a
        `read` function. Any setting can follow by its name; durations may be text, as in `lease="30s"`.
        """
        self._check_new(name)
        route = _route(name, key, version, deleted, read)
        check_limits(retry, debounce, rate)
        definition = PipelineDefinition(self, name, route, settings_from(with_retry(options, retry)))
        definition.debounce, definition.rate = debounce, rate
        self.pipelines[name] = definition
        return definition

    def objects(  # noqa: PLR0913 - one parameter per option
        self,
        name: str,
        *,
        store: str,
        key: str | None = None,
        version: str | None = None,
        deleted: Mapping[str, Sequence[Any]] | None = None,
        read: Read | None = None,
        retry: Retry | None = None,
        debounce: Debounce | None = None,
        rate: Rate | None = None,
        **options: Unpack[ObjectOptions],
    ) -> PipelineDefinition:
        """Define a pipeline that reads objects of a store, announced on a queue, and writes their records.

        `store` is the URL of a bucket or folder, and `format=` says what a record is. With `kind="state"`, the records
        are the state of their object. With `kind="envelope"`, each is a change with a key and a version of its own,
        which `key=` or `read=` say, as for `pipeline`. The settings of a pipeline can follow by their names.
        """
        is_enveloped = options.get("kind") == "envelope"
        if not is_enveloped and any(one is not None for one in (key, version, deleted, read, debounce, rate)):
            raise SettingsError(
                f"the records of {name!r} have no keys of their own, so key=, version=, deleted=, read=, debounce= and "
                'rate= do not apply; write kind="envelope" if each record is a change'
            )
        self._check_new(name)
        check_limits(retry, debounce, rate)
        objects, settings = objects_from(self._address(store, name), options, retry)
        definition = PipelineDefinition(self, name, None, settings, objects)
        if is_enveloped:
            records = PipelineDefinition(self, f"{name}/records", _route(name, key, version, deleted, read), settings)
            self._check_new(records.name)
            records.debounce, records.rate = debounce, rate
            records._lanes = {f"{RECORDS}{name}": "live"}
            definition.records = self.pipelines[records.name] = records
        self.pipelines[name] = definition
        return definition

    def serial(
        self, name: str, *, key: Callable[[Any], Any], turns: str = "", **options: Any
    ) -> Callable[[Callable[..., Any]], SerialFunction]:
        """Decorate a function, so that its calls run one at a time per key and return its answers.

        `turns` is the URL of another store than the app's ledger, or the name of a backend. Settings, `mode=` and
        `switch=` can follow.
        """
        if not name or name in self.serials:
            raise SettingsError(f"a serial function needs a name of its own, and {name!r} is taken or empty")

        def decorate(function: Callable[..., Any]) -> SerialFunction:
            def connect(owner: str, policy: TurnPolicy) -> Turns:
                is_url = "://" in turns
                address = self._address(turns if is_url else self.ledger_url, name)
                return adapters.connect_turns(address, owner, policy, backend="" if is_url else turns)

            wiring = Wiring(connect=connect, observers=self.observers)
            self.serials[name] = define(name, function, wiring, {"key": key, **options})
            return self.serials[name]

        return decorate

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that `send` and calls of serial functions have opened."""
        for serial in self.serials.values():
            await serial.close()
        self._senders.clear()
        await self._stack.aclose()

    async def send(
        self,
        pipeline: str,
        *bodies: Any,
        delay: float | str = 0.0,
        lane: str | None = None,
        within: Any = None,
    ) -> None:
        """Send messages to the first source of a pipeline, or of a lane; bytes as they are, other values as JSON.

        `within` is your own connection to the database of the queue: the messages are sent if its transaction commits.
        """
        url = self._definition(pipeline).source_for(lane)
        if (pipeline, url) not in self._senders:
            connected = self._connect_source(url, pipeline)
            self._senders[pipeline, url] = await self._stack.enter_async_context(connected)
        source, messages = self._senders[pipeline, url], [encoded(body) for body in bodies]
        if within is None:
            await source.send(messages, delay_s=seconds(delay))
        elif isinstance(source, OutboxSource):
            await source.send_within(within, messages, delay_s=seconds(delay))
        else:
            raise SettingsError(f"the source of pipeline {pipeline!r} cannot send within your own transaction")

    async def run(self, *names: str, handle_signals: bool = True, wait: bool = True) -> None:
        """Run pipelines until SIGTERM or SIGINT, then drain. A second signal ends the process without releasing.

        A pipeline whose source, ledger or sink is away waits for it, and the others go on; `wait=False` raises
        `UnavailableError` instead.
        """
        if not (names or self.pipelines or self.serials):
            raise SettingsError("this app has no pipeline; define one with app.pipeline(...)")
        self._is_stopping = False
        async with AsyncExitStack() as stack:
            if handle_signals:
                self._listen(stack)
            opened: list[OpenPipeline] = []
            away: dict[str, UnavailableError] = {}
            with self._stoppable():
                for name in self.with_records(names or self.pipelines):
                    try:
                        with self._reported_if_slow(name):
                            opened.append(await stack.enter_async_context(self.open(name)))
                            await report_empty_sink(opened[-1])
                    except UnavailableError as error:
                        if not wait:
                            raise
                        away[name] = error
            if self._is_stopping:
                return
            self._consumers = [*map(SerialWorker, () if names else self.serials.values())]
            for pipeline in opened:
                self._consumers += _consumers_of(pipeline)
            try:
                async with asyncio.TaskGroup() as group:
                    for consumer in self._consumers:
                        group.create_task(consumer.run())
                    for late, cause in away.items():
                        group.create_task(self._run_late(late, cause))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                self._consumers = []

    def with_records(self, names: Iterable[str]) -> list[str]:
        """Return the names of pipelines, with those of the records of their objects."""
        found: dict[str, None] = {}
        for name in names:
            found[name] = None
            if (records := self._definition(name).records) is not None:
                found[records.name] = None
        return list(found)

    def stop(self) -> None:
        """Drain: take no more messages, finish the changes that have begun, and release the others."""
        self._is_stopping = True
        while self._starting:
            self._starting.pop().cancel()
        for consumer in self._consumers:
            consumer.stop()

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Let `stop` break the block off."""
        task = asyncio.current_task()
        assert task is not None, "an app runs in a task"
        self._starting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Somebody else may have cancelled the task as well.
            if not self._is_stopping or task.uncancel():
                raise
        finally:
            self._starting.discard(task)

    @contextmanager
    def _reported_if_slow(self, name: str) -> Iterator[None]:
        """Report what a pipeline waits for if it cannot be connected soon, though no call has failed yet."""

        def report() -> None:
            cause = f"{self._definition(name).connecting_to}: no answer yet"
            event = events.Unavailable(pipeline=name, what=events.START, cause=cause, retry_s=0.0, calls=0)
            events.notify(self.observers, event)

        timer = asyncio.get_running_loop().call_later(SILENT_START_S, report)
        try:
            yield
        finally:
            timer.cancel()

    async def _run_late(self, name: str, error: UnavailableError) -> None:
        """Run a pipeline as soon as its source, ledger and sink can be reached."""
        task = asyncio.current_task()
        if self._is_stopping or task is None:
            return
        self._starting.add(task)
        try:
            async with AsyncExitStack() as stack:
                pipeline = await self._wait_for_start(name, error, stack)
                # From here on it is drained, and no longer cancelled.
                self._starting.discard(task)
                consumers = _consumers_of(pipeline)
                self._consumers += consumers
                await asyncio.gather(*(consumer.run() for consumer in consumers))
        finally:
            self._starting.discard(task)

    async def _wait_for_start(self, name: str, error: UnavailableError, stack: AsyncExitStack) -> OpenPipeline:
        settings, since, calls = self._definition(name).settings, boot_time(), 1
        while True:
            retry_s = backoff_s(calls, settings.backoff_s, min(settings.backoff_max_s, START_RETRY_MAX_S), _RNG)
            cause = str(error)
            events.notify(
                self.observers,
                events.Unavailable(pipeline=name, what=events.START, cause=cause, retry_s=retry_s, calls=calls),
            )
            await asyncio.sleep(retry_s)
            try:
                pipeline = await stack.enter_async_context(self.open(name))
            except UnavailableError as again:
                error, calls = again, calls + 1
            else:
                await report_empty_sink(pipeline)
                seconds = boot_time() - since
                pipeline.emit(events.Available(pipeline=name, what=events.START, seconds=seconds, calls=calls))
                return pipeline

    @asynccontextmanager
    async def open(
        self,
        name: str,
        *,
        work: bool = True,
        check_origin: bool | None = None,
        unreached: dict[str, str] | None = None,
    ) -> AsyncIterator[OpenPipeline]:
        """Connect everything that a pipeline needs. Pass `work=False` to only inspect it: then it has no heartbeat,
        no history recorder and no journal. `check_origin=False` opens the origin only when it is used, as without
        `work`. With `unreached`, sources that cannot be used are noted there with the cause, and left out."""
        definition = self._definition(name)
        async with AsyncExitStack() as stack:
            policy, ledger, sink = self._ledger_and_sink(definition)
            definition.source_for(None)
            owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
            self.owners.add(owner)
            stack.callback(self.owners.discard, owner)
            journal_store = _journal_store(definition, owner) if work else None
            lazy = LazyLedger(ledger, stack)
            definition.connecting_to = redacted(self.ledger_url)
            # A worker that may write without the ledger may also start without it.
            await (lazy.open() if journal_store is None else lazy.try_to_open())
            part = lazy.part if journal_store is not None else _itself
            definition.connecting_to = redacted(definition._sink_url or self.ledger_url)
            await stack.enter_async_context(sink)
            origin = await self._open_origin(definition, stack, at_start=work if check_origin is None else check_origin)
            loses = ledger if isinstance(ledger, LosesWrites) else None
            objects = await self._open_objects(definition, stack, work=work)
            sources = await self._open_sources(definition, ledger.control_store, objects, stack, unreached)
            pipeline = OpenPipeline(
                name=name,
                sources=sources,
                ledger=part(ledger),
                admin=part(ledger.admin),
                control_store=part(ledger.control_store),
                history_store=part(ledger.history_store),
                sink=sink,
                reader=definition._reader(),
                settings=definition.settings,
                owner=owner,
                observers=self.observers,
                reporters=[HistoryRecorder(owner, keeps=definition.settings.history, ledger=loses)] if work else [],
                origin=origin,
                shard_ledger=await self._open_shards(definition, stack),
                refetch=_refetch_of(definition, origin),
                lookup=definition._lookup,
                objects=objects,
                connect_notifier=lambda url: adapters.connect_notifier(self._address(filled(url), f"{name}-notices")),
                connect_heartbeat=self._connect_heartbeat(name, policy) if work else None,
                journal_store=journal_store,
                bulk=definition.bulk,
                debounce=definition.debounce,
                rate=definition.rate,
            )
            if isinstance(sink, MovableSink):
                pipeline.open_target = partial(self._open_target, pipeline, sink, policy)
            yield pipeline

    @asynccontextmanager
    async def _open_target(
        self, pipeline: OpenPipeline, sink: MovableSink, policy: LedgerPolicy, target: str, generation: int
    ) -> AsyncIterator[OpenPipeline]:
        """Open a pipeline on another target of its sink, in the ledger scope of the run that fills it."""
        scope, policy = other_scope(pipeline.name, generation), replace(policy, rate=None)
        ledger = adapters.connect_ledger(self._address(self.ledger_url, scope), policy)
        async with ledger, sink.at_target(target) as at_target:
            yield dataclasses.replace(
                pipeline,
                ledger=ledger,
                admin=ledger.admin,
                control_store=ledger.control_store,
                sink=at_target,
                connect_heartbeat=self._connect_heartbeat(scope, policy),
                controls=PLAIN,
                rate=None,
            )

    async def _open_origin(
        self, definition: PipelineDefinition, stack: AsyncExitStack, *, at_start: bool
    ) -> Origin | None:
        """Open the origin of a pipeline, if it can be reached; only repairs and reindexes wait for it."""
        if definition._origin is None:
            return None
        if isinstance(definition._origin, str):
            definition.connecting_to = redacted(definition._origin)
            origin = adapters.connect_origin(self._address(definition._origin, definition.name))
        else:
            origin = FunctionOrigin(definition._origin)
        return await stack.enter_async_context(LazyOrigin(origin, at_start=at_start))

    async def _open_shards(self, definition: PipelineDefinition, stack: AsyncExitStack) -> PluggedLedger | None:
        """Open the ledger scope of the shards of a reindex; None for a pipeline without an origin."""
        if definition._origin is None or definition.settings.on_ledger_down != "wait":
            return None
        address = self._address(self.ledger_url, f"{definition.name}{SHARDS}")
        policy = LedgerPolicy(command_s=definition.settings.lease_s / 3)
        return await stack.enter_async_context(adapters.connect_ledger(address, policy))

    async def _open_objects(
        self, definition: PipelineDefinition, stack: AsyncExitStack, *, work: bool
    ) -> OpenObjects | None:
        """Open the store of an object pipeline. Without `work`, a store that is away fails only when it is asked."""
        if definition.objects is None:
            return None
        url = definition.objects.store_url
        definition.connecting_to = redacted(url)
        store = adapters.connect_store(self._address(url, definition.name))
        try:
            await stack.enter_async_context(store)
        except UnavailableError as error:
            if work:
                raise
            store = AwayStore(str(error))
        queue = self._record_queue(definition.name) if definition.records is not None else None
        return definition.objects.opened(store, definition._decode, queue, definition._dialects.values())

    async def _open_sources(
        self,
        definition: PipelineDefinition,
        control_store: ControlStore,
        objects: OpenObjects | None,
        stack: AsyncExitStack,
        unreached: dict[str, str] | None,
    ) -> list[tuple[str, Source]]:
        """Open the sources of a pipeline, each with its display name."""
        settings, sources = definition.settings, list[tuple[str, Source]]()
        for url in definition._lanes:
            definition.connecting_to = name = redacted(url)
            queue = self._connect_source(url, definition.name)
            if isinstance(queue, LeaseFollowingSource):
                queue.follow_lease(settings.lease_s, settings.runtime_max_s)
            source = queue
            if objects is not None:
                dialect, fix_scale = definition._dialects[url], control_store.fix_scale
                source = AnnouncementSource(queue, dialect, objects.selection, fix_scale)
            try:
                await stack.enter_async_context(source)
            except (UnavailableError, DatabaseError) as error:
                if unreached is None:
                    raise
                unreached[name] = str(error)
                continue
            settings.check_visibility(source.visibility_s, name)
            if isinstance(queue, AckTimeoutSource):
                settings.check_ack_timeout(queue.ack_timeout_s, name)
            sources.append((name, source))
        return sources

    def strategies(self, pipeline: OpenPipeline) -> list[tuple[str, CommitStrategy]]:
        """Return the commit strategy of each source."""
        return [(name, choose_strategy(pipeline, source)) for name, source in pipeline.sources]

    def _ledger_and_sink(self, definition: PipelineDefinition) -> tuple[LedgerPolicy, PluggedLedger, Sink | AtomicSink]:
        """Connect the ledger and the sink, and check that they fit together."""
        sink = self._sink(definition)
        settings = definition.settings
        policy = LedgerPolicy(
            may_show_older(sink, has_origin=definition._origin is not None),
            settings.redelivery_s,
            settings.retention_s,
            definition.rate,
            command_s=settings.lease_s / 3,
        )
        ledger = adapters.connect_ledger(self._address(self.ledger_url, definition.name), policy)
        if is_atomic(sink) and ledger.database is None:
            raise SettingsError(
                f"the sink of pipeline {definition.name!r} writes inside the ledger's transaction, and "
                f"{redacted(self.ledger_url)} has none; put the ledger into the sink's database, or write with a "
                "handler that takes no transaction"
            )
        if is_atomic(sink) and sink.database is not ledger.database:
            raise SettingsError(
                f"the sink of pipeline {definition.name!r} writes inside the ledger's transaction, so it has to live "
                f"in the ledger's database; use the same file in both URLs ({redacted(self.ledger_url)})"
            )
        if settings.on_ledger_down == "write-anyway":
            self._check_write_anyway(definition, sink)
        return policy, ledger, sink

    def _check_write_anyway(self, definition: PipelineDefinition, sink: Sink | AtomicSink) -> None:
        """Raise `SettingsError` if the pipeline cannot write without the ledger."""
        if definition.objects is not None:
            raise SettingsError(
                f"pipeline {definition.name!r} cannot write while its ledger is down: the ledger knows how far each "
                "object has come; write on_ledger_down='wait'"
            )
        if is_atomic(sink):
            raise SettingsError(
                f"pipeline {definition.name!r} cannot write while its ledger is down: its sink is in the ledger's "
                "database; write on_ledger_down='wait'"
            )
        if definition._handler is not None and signature_of(definition._handler).wants_claim:
            raise SettingsError(
                f"the handler of pipeline {definition.name!r} asks for the claim, and while the ledger is down there "
                "is none; leave that parameter out, or write on_ledger_down='wait'"
            )

    def _sink(self, definition: PipelineDefinition) -> Sink | AtomicSink:
        if definition.records is not None:
            return RecordHandover()
        if definition._sink_url is not None:
            address = self._address(definition._sink_url, definition.name)
            connect = adapters.connect_sink if definition.objects is None else adapters.connect_record_sink
            return connect(address)
        handler = definition._handler
        if handler is None:
            raise SettingsError(
                f"pipeline {definition.name!r} has no sink; call .sink(URL) or decorate a function with .apply "
                '(in a TOML file: sink = "URL" or apply = "module:function")'
            )
        if not signature_of(handler).wants_transaction:
            return FunctionSink(handler, threads=definition.settings.concurrency)
        ledger = adapters.connect_ledger(self._address(self.ledger_url, definition.name), LedgerPolicy())
        return TransactedFunctionSink(handler, ledger.database)

    def _connect_heartbeat(self, name: str, policy: LedgerPolicy) -> Callable[[], Ledger] | None:
        """Return a function that opens a second connection to the ledger; None for a memory ledger, which has one."""
        if self.ledger_url.startswith("memory:"):
            return None
        return lambda: adapters.connect_ledger(Address(self.ledger_url, name, {}), policy)

    def _listen(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        first_at: list[float] = []

        def on_signal(number: int, frame: object) -> None:
            if not first_at:
                first_at.append(boot_time())
                loop.call_soon_threadsafe(self.stop)
            elif boot_time() - first_at[0] >= SAME_WISH_S:
                # Release nothing: the outcome of running changes is unknown, so their leases have to expire.
                self._say_what_is_left()
                os._exit(128 + number)

        # Not with loop.add_signal_handler: a handler that blocks the loop would keep the signal from being handled.
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, on_signal))

    def _say_what_is_left(self) -> None:
        """Print which changes are still running. A signal may have interrupted the log or a print, so use neither."""
        left = [one.left_now() for one in self._consumers if isinstance(one, Consumer)]
        lines = []
        for event in left:
            if event.changes:
                running, again = still_running(event)
                lines.append(f"{event.pipeline} left while {running}; {again}")
        text = "\n".join(lines) or "left at once; no change was running"
        with suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))

    def _check_new(self, name: str) -> None:
        if not name or name in self.pipelines:
            raise SettingsError(f"a pipeline needs a name of its own, and {name!r} is taken or empty")

    def _record_queue(self, name: str) -> HandoverQueue:
        """Return the queue from the objects of a pipeline to its records, of the running event loop."""
        identity = (HandoverQueue, name, id(asyncio.get_running_loop()))
        return cast(HandoverQueue, self._shared.setdefault(identity, HandoverQueue()))

    def _connect_source(self, url: str, name: str) -> Source:
        if url.startswith(RECORDS):
            return self._record_queue(url.removeprefix(RECORDS))
        return adapters.connect_source(self._address(url, name))

    def _address(self, url: str, name: str) -> Address:
        return Address(url, name, self._shared)

    def _definition(self, name: str) -> PipelineDefinition:
        if name not in self.pipelines:
            known = ", ".join(self.pipelines) or "none"
            raise SettingsError(f"no pipeline is called {name!r}; this app has: {known}")
        return self.pipelines[name]


def _route(
    name: str, key: str | None, version: str | None, deleted: Mapping[str, Sequence[Any]] | None, read: Read | None
) -> FieldRoute | FunctionRoute:
    if (read is None) == (key is None) or key == "":
        raise SettingsError(f"pipeline {name!r} needs either key= (and version=) or read=")
    check_types(key, version, deleted)
    return FunctionRoute(read) if read is not None else FieldRoute(Fields(key or "", version, deleted or {}))


def _refetch_of(definition: PipelineDefinition, origin: Origin | None) -> Callable[[str], Any] | None:
    """Return the function that reads the current body of a key: the user's own, or that of the origin."""
    if definition._refetch is not None:
        return in_thread(definition._refetch)
    return from_origin(origin) if origin is not None else None


def _consumers_of(pipeline: OpenPipeline) -> list[Consumer | ReindexWorker]:
    """Return what runs for a pipeline: its consumer, and the worker of its reindexes."""
    return [Consumer(pipeline), *([ReindexWorker(pipeline)] if pipeline.shard_ledger is not None else [])]


def _itself(role: T) -> T:
    return role


def _journal_store(definition: PipelineDefinition, owner: str) -> JournalDirectory | None:
    """Return the journal for writes without the ledger; None unless `on_ledger_down="write-anyway"` is set."""
    settings = definition.settings
    if settings.on_ledger_down != "write-anyway" or settings.journal is None:
        return None
    journal_store = JournalDirectory(settings.journal, definition.name, owner)
    journal_store.prepare()
    return journal_store
