"""One suite per plug: put your own source, ledger or sink through the checks that the built-in ones pass.

Write a factory that makes a fresh bench each time, and run the suite in a test of yours:

    async def test_my_queue_keeps_its_promises():
        await check_source(make_my_queue)

A promise that is broken raises `BrokenPromiseError`, which says what was promised and what was seen instead.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from keywise.protocols import Grade
from keywise.testing.conformance.endings import ENDING_PROMISES
from keywise.testing.conformance.governors import GOVERNOR_PROMISES, HISTORIAN_PROMISES
from keywise.testing.conformance.histories import HISTORY_PROMISES
from keywise.testing.conformance.inlets import INLET_PROMISES
from keywise.testing.conformance.ledgers import CLAIM_PROMISES, LedgerBench, MakeLedger
from keywise.testing.conformance.promise import BrokenPromiseError, Promise
from keywise.testing.conformance.sinks import (
    APPLY_PROMISES,
    ATOMIC_PROMISES,
    CONDITIONAL_PROMISES,
    READING_PROMISES,
    MakeSink,
    SinkBench,
)
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES, MakeSource, SourceBench
from keywise.testing.conformance.transactions import TRANSACTION_PROMISES

__all__ = [
    "BrokenPromiseError",
    "LedgerBench",
    "MakeLedger",
    "MakeSink",
    "MakeSource",
    "Promise",
    "SinkBench",
    "SourceBench",
    "check_ledger",
    "check_sink",
    "check_source",
    "ledger_promises",
    "sink_promises",
    "source_promises",
]

Bench = TypeVar("Bench")


async def check_source(make: MakeSource) -> int:
    """Hold a source to all its promises; return how many they are."""
    return await _check(await source_promises(make), make)


async def check_ledger(make: MakeLedger) -> int:
    """Hold a ledger to all its promises; return how many they are."""
    return await _check(ledger_promises(), make)


async def check_sink(make: MakeSink) -> int:
    """Hold a sink to the promises of its grade; return how many they are."""
    return await _check(await sink_promises(make), make)


async def source_promises(make: MakeSource) -> list[Promise[SourceBench]]:
    """What this source promises: more if its deliveries come back after a time, and if it lives in a database."""
    async with make() as bench:
        comes_back, is_inline = bench.source.visibility_s is not None, bench.source.database is not None
    return [
        *SOURCE_PROMISES,
        *(VISIBILITY_PROMISES if comes_back else ()),
        *(INLET_PROMISES if is_inline else ()),
    ]


def ledger_promises() -> list[Promise[LedgerBench]]:
    """What every ledger promises."""
    return [
        *CLAIM_PROMISES,
        *ENDING_PROMISES,
        *TRANSACTION_PROMISES,
        *GOVERNOR_PROMISES,
        *HISTORIAN_PROMISES,
        *HISTORY_PROMISES,
    ]


async def sink_promises(make: MakeSink) -> list[Promise[SinkBench]]:
    """What a sink of this grade promises: more if it can be read."""
    async with make() as bench:
        reading = READING_PROMISES if hasattr(bench.sink, "read") else ()
        if bench.transaction is not None:
            return [*ATOMIC_PROMISES, *reading]
        is_conditional = bench.sink.grade is Grade.CONDITIONAL
    return [*APPLY_PROMISES, *(CONDITIONAL_PROMISES if is_conditional else ()), *reading]


async def _check(promises: list[Promise[Bench]], make: Callable[..., AbstractAsyncContextManager[Bench]]) -> int:
    for promise in promises:
        await promise(make)
    return len(promises)
