"""A handler function as a sink: async or plain, for one change or a batch, outside or inside the transaction."""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, get_args, get_origin, get_type_hints

import msgspec

from keywise.core.change import Change, Outcome
from keywise.core.database import AsyncDatabase
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import OutcomeUnknownError, PermanentError, SettingsError, TransientError, UnavailableError
from keywise.core.failures import cause_of_error, is_permanent
from keywise.core.limits import Snooze
from keywise.core.sink import APPLIED, Grade, SinkResult
from keywise.core.tracebacks import traceback_of
from keywise.core.transaction import Transaction

BATCH_MAX = 1000


class Signature(msgspec.Struct, frozen=True):
    """What a handler asks for by its annotations."""

    is_async: bool
    is_batch: bool
    wants_transaction: bool
    wants_claim: bool
    value: Any
    """The type of `change.value`."""


def signature_of(handler: Callable[..., Any]) -> Signature:
    """Read a handler's parameters: a change or a list of changes, then optionally a transaction or a claim."""
    try:
        parameters = list(inspect.signature(handler).parameters.values())
        hints = get_type_hints(handler)
    except (NameError, TypeError, ValueError) as error:
        raise SettingsError(
            f"the parameters of {_name(handler)} cannot be read: {error}; write a function whose annotations are "
            "names of its module"
        ) from error
    if not parameters:
        raise SettingsError(f"{_name(handler)} takes no parameter; write def {_name(handler)}(change: Change[...])")
    kinds = [hints.get(parameter.name) for parameter in parameters]
    is_batch = get_origin(kinds[0]) in (list, Sequence)
    change = (get_args(kinds[0]) or (None,))[0] if is_batch else kinds[0]
    extras = [Claim if is_batch and kind == list[Claim] else kind for kind in kinds[1:]]
    if sum(kind in (Transaction, Claim) for kind in extras) > 1:
        raise SettingsError(f"{_name(handler)} asks for more than one of transaction and claim; keep one of them")
    for parameter, kind in zip(parameters[1:], extras, strict=True):
        if kind not in (Transaction, Claim):
            raise SettingsError(
                f"{_name(handler)} asks for {parameter.name!r}; after the change, a handler may ask for "
                "a keywise.Transaction or a keywise.Claim, by annotation"
            )
    return Signature(
        is_async=inspect.iscoroutinefunction(handler),
        is_batch=is_batch,
        wants_transaction=Transaction in extras,
        wants_claim=Claim in extras,
        value=(get_args(change) or (Any,))[0],
    )


NO_THREAD = SinkResult(Outcome.BUSY, "every thread runs a handler that hangs")
STILL_RUNS = SinkResult(Outcome.FAILED, "an earlier try still runs in its thread", certainty=Certainty.UNKNOWN)
"""The result of a change whose earlier call has not ended. Another call might hang too, until no thread is left for
other keys."""


class FunctionSink:
    """A plain sink: keywise does not know the function's effects, so a retry may repeat them."""

    grade = Grade.PLAIN
    forgets_deletions = False

    def __init__(self, handler: Callable[..., Any], *, threads: int) -> None:
        self._handler = handler
        self._signature = signature_of(handler)
        self.batch_max = BATCH_MAX if self._signature.is_batch else 1
        self._counting = threading.Lock()
        self._running = Counter[str]()
        """Keys whose handler runs in a thread. A call goes on after its claim has ended, because a thread cannot be
        stopped."""
        self._running_alone = Counter[str]()
        """The same, only for calls with a single key."""
        self._threads_max = self._free = threads
        """Threads that run no handler. A handler that hangs keeps its thread, even after its claim has ended."""

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(self._threads_max, thread_name_prefix="keywise-handler")
        return self

    async def __aexit__(self, *error: object) -> None:
        # Do not wait: a thread cannot be cancelled, and a handler that hangs would block the shutdown.
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        """Call the handler with the whole batch; if it raises, with each half, until the bad change is alone."""
        if self._running and (running := self._still_running(changes)):
            return await self._apply_others(changes, claims, running)
        if not self._signature.is_async and self._free == 0:
            return [NO_THREAD] * len(changes)
        try:
            await _wait_for(self._called(changes, claims))
        except Snooze as snooze:
            return [SinkResult(Outcome.BUSY, str(snooze), wait_s=snooze.delay_s)] * len(changes)
        except Exception as error:
            if len(changes) == 1 or certainty_of(error) is Certainty.UNKNOWN:
                return [_failed(error)] * len(changes)
            middle = len(changes) // 2
            first = await self.apply(changes[:middle], claims[:middle])
            return [*first, *await self.apply(changes[middle:], claims[middle:])]
        return [APPLIED] * len(changes)

    def _still_running(self, changes: Sequence[Change[Any]]) -> set[str]:
        """Return the keys that must not be called now, because an earlier call for them still runs.

        A batch may hang because of one of its keys, so each key of a hanging batch may still be called alone.
        """
        with self._counting:
            still_runs = self._running_alone if len(changes) == 1 else self._running
            return {change.key for change in changes if still_runs[change.key]}

    async def _apply_others(
        self, changes: Sequence[Change[Any]], claims: Sequence[Claim], running: set[str]
    ) -> Sequence[SinkResult]:
        others = [pair for pair in zip(changes, claims, strict=True) if pair[0].key not in running]
        results = iter(await self.apply([one for one, _ in others], [claim for _, claim in others]) if others else ())
        return [STILL_RUNS if change.key in running else next(results) for change in changes]

    def _called(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Awaitable[object]:
        """Call the handler, or let a thread call it; return what to wait for."""
        signature = self._signature
        arguments: list[Any] = [list(changes) if signature.is_batch else changes[0]]
        if signature.wants_claim:
            arguments.append(list(claims) if signature.is_batch else claims[0])
        if signature.is_async:
            called: Awaitable[object] = self._handler(*arguments)
            return called
        return asyncio.get_running_loop().run_in_executor(self._threads, self._run, changes, arguments)

    def _run(self, changes: Sequence[Change[Any]], arguments: list[Any]) -> object:
        """Call the handler, in a thread; the thread counts as free only when the handler has returned."""
        keys = Counter(change.key for change in changes)
        alone = keys if len(keys) == 1 else Counter[str]()
        with self._counting:
            self._free -= 1
            self._running += keys
            self._running_alone += alone
        try:
            return self._handler(*arguments)
        finally:
            with self._counting:
                self._free += 1
                self._running -= keys
                self._running_alone -= alone


class TransactedFunctionSink:
    """An atomic sink: the function writes inside the ledger's transaction."""

    grade = Grade.ATOMIC
    runs_user_code = True

    def __init__(self, handler: Callable[..., Any], database: object) -> None:
        self.database = database
        self._handler = handler
        self._signature = signature_of(handler)
        if isinstance(database, AsyncDatabase) and database.is_async and not self._signature.is_async:
            raise SettingsError(
                f"{_name(handler)} is no coroutine, and the connection of its transaction has to be awaited; "
                f"write async def {_name(handler)}"
            )
        self.batch_max = BATCH_MAX if self._signature.is_batch else 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def write(self, transaction: Transaction, changes: Sequence[Change[Any]]) -> None:
        try:
            await self._call(list(changes) if self._signature.is_batch else changes[0], transaction)
        except UnavailableError as error:
            # The handler could not reach some other service. As `UnavailableError`, the flow would take it for an
            # outage of the ledger.
            raise TransientError(str(error)) from error

    async def _call(self, argument: Any, transaction: Transaction) -> None:
        if self._signature.is_async:
            await _wait_for(self._handler(argument, transaction))
            return
        running = asyncio.ensure_future(asyncio.to_thread(self._handler, argument, transaction))
        try:
            await _wait_for(asyncio.shield(running))
        finally:
            # A thread cannot be stopped. The transaction must not end before the handler does: later writes would go
            # into another transaction on the same connection.
            await asyncio.wait([running])


async def _wait_for(running: Awaitable[object]) -> None:
    """Wait for a handler. If it is cancelled but the worker's task is not, it cancelled itself, which is a failure."""
    try:
        result = await running
        # A plain callable may return an awaitable, as some decorators do; the handler has not run yet.
        if result is not None and inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise OutcomeUnknownError("the handler was cancelled from within") from error
    if isinstance(result, Snooze):
        raise result


def _failed(error: Exception) -> SinkResult:
    return SinkResult(
        Outcome.FAILED,
        cause_of_error(error),
        is_permanent(error),
        certainty_of(error),
        traceback=traceback_of(error),
    )


def certainty_of(error: Exception) -> Certainty:
    """Return what is known about a handler's effect after it raised."""
    if isinstance(error, PermanentError | TransientError | msgspec.ValidationError):
        return Certainty.CLEAN
    if isinstance(error, OutcomeUnknownError | OSError):
        # A call that timed out or lost its connection may still land.
        return Certainty.UNKNOWN
    return Certainty.ENDED


def _name(handler: Callable[..., Any]) -> str:
    return getattr(handler, "__name__", repr(handler))
