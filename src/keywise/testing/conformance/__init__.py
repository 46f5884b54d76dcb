"""Conformance suites: check your source, ledger, sink or origin against the promises that the built-in adapters keep.

Write a function that makes a fresh fixture for each promise, and run the suite in a test:

    def test_my_queue_keeps_its_promises():
        asyncio.run(check_source(make_my_queue))

A suite takes a URL too, if an adapter is registered for its scheme.
It checks all promises, and returns a `Conformance` with the verdict on each.
If a promise is broken, it raises `BrokenPromiseError` instead, with the same value as `report`.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from keywise.core.errors import AdminError
from keywise.core.serial.contract import TurnPolicy
from keywise.core.sink import Grade
from keywise.core.source import ParkingSource
from keywise.testing.conformance.claim_endings import ENDING_PROMISES
from keywise.testing.conformance.claims import CLAIM_PROMISES, SAFE, LedgerBench, MakeLedger
from keywise.testing.conformance.controls import (
    CONTROL_STORE_PROMISES,
    GOVERNED_TRANSACTION_PROMISES,
    HISTORY_PROMISES,
)
from keywise.testing.conformance.dumps import TRANSFER_PROMISES
from keywise.testing.conformance.moves import MOVE_PROMISES, MOVE_TRANSACTION_PROMISES
from keywise.testing.conformance.origins import (
    CONSISTENT_PROMISES,
    ORIGIN_PROMISES,
    KeyKind,
    MakeOrigin,
    OriginBench,
    RowWriter,
)
from keywise.testing.conformance.positions import POSITION_PROMISES, POSITION_TRANSACTION_PROMISES
from keywise.testing.conformance.promise import BrokenPromiseError, Promise, UncheckedError
from keywise.testing.conformance.random_histories import RANDOM_HISTORY_PROMISES
from keywise.testing.conformance.report import Checked, Conformance, NotConformingError, Verdict, hold
from keywise.testing.conformance.serial.deadlocks import TURN_CIRCLE_PROMISES
from keywise.testing.conformance.serial.endings import TURN_ENDING_PROMISES, TURN_TRANSACTION_PROMISES
from keywise.testing.conformance.serial.modes import TURN_MODE_PROMISES, TURN_OPERATOR_PROMISES
from keywise.testing.conformance.serial.ordering import TURN_PROMISES, MakeTurns, TurnsBench
from keywise.testing.conformance.serial.random_histories import TURN_HISTORY_PROMISES
from keywise.testing.conformance.sinks import (
    APPLY_PROMISES,
    ATOMIC_PROMISES,
    CONDITIONAL_PROMISES,
    READING_PROMISES,
    MakeSink,
    SinkBench,
)
from keywise.testing.conformance.sources import (
    PARKING_PROMISES,
    SOURCE_PROMISES,
    VISIBILITY_PROMISES,
    MakeSource,
    SourceBench,
)
from keywise.testing.conformance.suspects import SUSPECT_PROMISES
from keywise.testing.conformance.targets import ALIAS_PROMISES, RENAMING_PROMISES, TARGET_PROMISES
from keywise.testing.conformance.transactional_queues import TRANSACTIONAL_QUEUE_PROMISES
from keywise.testing.conformance.transactions import TRANSACTION_PROMISES
from keywise.testing.conformance.urls import Playground

__all__ = [
    "BrokenPromiseError",
    "Checked",
    "Conformance",
    "KeyKind",
    "LedgerBench",
    "MakeLedger",
    "MakeOrigin",
    "MakeSink",
    "MakeSource",
    "MakeTurns",
    "NotConformingError",
    "OriginBench",
    "Playground",
    "Promise",
    "RowWriter",
    "SinkBench",
    "SourceBench",
    "TurnsBench",
    "UncheckedError",
    "Verdict",
    "check_ledger",
    "check_origin",
    "check_sink",
    "check_source",
    "check_turns",
    "ledger_promises",
    "origin_promises",
    "promises_of_ledger",
    "promises_of_turns",
    "sink_promises",
    "source_promises",
    "turns_promises",
]


async def check_source(
    connect: MakeSource | str, *, on_checked: Callable[[Checked], None] | None = None
) -> Conformance:
    """Check all promises of a source; raise `BrokenPromiseError` at the end if one is broken."""
    if isinstance(connect, str):
        async with _played("sources", connect) as playground:
            return await check_source(playground.source, on_checked=on_checked)
    return await hold("source", await source_promises(connect), connect, on_checked)


async def check_ledger(
    connect: MakeLedger | str, *, on_checked: Callable[[Checked], None] | None = None
) -> Conformance:
    """Check all promises of a ledger; raise `BrokenPromiseError` at the end if one is broken."""
    if isinstance(connect, str):
        async with _played("ledgers", connect) as playground:
            return await check_ledger(playground.ledger, on_checked=on_checked)
    return await hold("ledger", await promises_of_ledger(connect), connect, on_checked)


async def check_sink(connect: MakeSink | str, *, on_checked: Callable[[Checked], None] | None = None) -> Conformance:
    """Check the promises of the grade of a sink; raise `BrokenPromiseError` at the end if one is broken."""
    if isinstance(connect, str):
        async with _played("sinks", connect) as playground:
            return await check_sink(playground.sink, on_checked=on_checked)
    return await hold("sink", await sink_promises(connect), connect, on_checked)


async def check_origin(
    connect: MakeOrigin | str, *, on_checked: Callable[[Checked], None] | None = None
) -> Conformance:
    """Check all promises of an origin; raise `BrokenPromiseError` at the end if one is broken."""
    if isinstance(connect, str):
        async with _played("origins", connect) as playground:
            return await check_origin(playground.origin, on_checked=on_checked)
    return await hold("origin", await origin_promises(connect), connect, on_checked)


async def check_turns(connect: MakeTurns | str, *, on_checked: Callable[[Checked], None] | None = None) -> Conformance:
    """Hold a backend of turns to all its promises; raise `BrokenPromiseError` in the end if one is broken."""
    if isinstance(connect, str):
        async with _played("turns", connect) as playground:
            return await check_turns(playground.turns, on_checked=on_checked)
    return await hold("turns", await promises_of_turns(connect), connect, on_checked)


async def promises_of_turns(make: MakeTurns) -> list[Promise[TurnsBench]]:
    """What this backend of turns promises: more if functions can write in a transaction of its store."""
    async with make(TurnPolicy()) as bench:
        return turns_promises(transactions=bench.turns.database is not None)


def turns_promises(*, transactions: bool = True) -> list[Promise[TurnsBench]]:
    """What every backend of turns promises, perhaps without what is about transactions."""
    return [
        *TURN_PROMISES,
        *TURN_ENDING_PROMISES,
        *TURN_CIRCLE_PROMISES,
        *(TURN_TRANSACTION_PROMISES if transactions else ()),
        *TURN_MODE_PROMISES,
        *TURN_OPERATOR_PROMISES,
        *TURN_HISTORY_PROMISES,
    ]


async def source_promises(make: MakeSource) -> list[Promise[SourceBench]]:
    """Return the promises of this source; a visibility timeout adds some, and so do a database and parking."""
    async with make() as bench:
        comes_back, is_transactional = bench.source.visibility_s is not None, bench.source.database is not None
        parks = isinstance(bench.source, ParkingSource)
    return [
        *SOURCE_PROMISES,
        *(VISIBILITY_PROMISES if comes_back else ()),
        *(PARKING_PROMISES if parks else ()),
        *(TRANSACTIONAL_QUEUE_PROMISES if is_transactional else ()),
    ]


async def promises_of_ledger(make: MakeLedger) -> list[Promise[LedgerBench]]:
    """Return the promises of this ledger; transactions of its database add some."""
    async with make(SAFE) as bench:
        has_transactions = bench.has_transactions
    return ledger_promises(transactions=has_transactions)


def ledger_promises(*, transactions: bool = True) -> list[Promise[LedgerBench]]:
    """Return the promises of every ledger; `transactions=False` leaves out those about transactions."""
    return [
        *CLAIM_PROMISES,
        *ENDING_PROMISES,
        *SUSPECT_PROMISES,
        *(TRANSACTION_PROMISES if transactions else ()),
        *POSITION_PROMISES,
        *(POSITION_TRANSACTION_PROMISES if transactions else ()),
        *CONTROL_STORE_PROMISES,
        *(GOVERNED_TRANSACTION_PROMISES if transactions else ()),
        *MOVE_PROMISES,
        *(MOVE_TRANSACTION_PROMISES if transactions else ()),
        *HISTORY_PROMISES,
        *TRANSFER_PROMISES,
        *RANDOM_HISTORY_PROMISES,
    ]


async def origin_promises(make: MakeOrigin) -> list[Promise[OriginBench]]:
    """Return the promises of this origin; one that reads consistently has more."""
    async with make(KeyKind.TEXT) as bench:
        is_consistent = bench.origin.is_consistent
    return [*ORIGIN_PROMISES, *(CONSISTENT_PROMISES if is_consistent else ())]


async def sink_promises(make: MakeSink) -> list[Promise[SinkBench]]:
    """Return the promises of a sink of this grade; one that can be read, or whose name can move, has more."""
    async with make() as bench:
        reading = READING_PROMISES if hasattr(bench.sink, "read") else ()
        moving = TARGET_PROMISES if await _is_movable(bench) else ()
        if bench.transaction is not None:
            return [*ATOMIC_PROMISES, *reading, *moving, *(RENAMING_PROMISES if moving else ())]
        is_conditional = bench.sink.grade is Grade.CONDITIONAL
    conditional = CONDITIONAL_PROMISES if is_conditional else ()
    return [*APPLY_PROMISES, *conditional, *reading, *moving, *(ALIAS_PROMISES if moving else ())]


async def _is_movable(bench: SinkBench) -> bool:
    """Whether the name of this sink can move. That of some sinks cannot, although others of the class can."""
    if not hasattr(bench.sink, "current_target"):
        return False
    try:
        await bench.sink.current_target()
    except AdminError:
        return False
    return True


@asynccontextmanager
async def _played(role: str, url: str) -> AsyncIterator[Playground]:
    playground = Playground(role, url)
    try:
        yield playground
    finally:
        await playground.clean()
