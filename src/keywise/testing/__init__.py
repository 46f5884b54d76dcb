"""For tests: your handler under faults, your adapter held to its promises, and the simulator of keywise itself.

`__all__` is the promise.
"""

from keywise.testing.conformance import (
    BrokenPromiseError,
    Checked,
    Conformance,
    KeyKind,
    LedgerBench,
    OriginBench,
    RowWriter,
    SinkBench,
    SourceBench,
    TurnsBench,
    UncheckedError,
    Verdict,
    check_ledger,
    check_origin,
    check_sink,
    check_source,
    check_turns,
)
from keywise.testing.handlers.report import Finding, SimulationReport, StateDifference
from keywise.testing.handlers.simulate import simulate
from keywise.testing.simulator.faults import Faults
from keywise.testing.simulator.seeds import Run, Tally, run_seed, run_seeds
from keywise.testing.simulator.world import World
from keywise.testing.virtual_loop import Process, VirtualLoop

__all__ = [
    "BrokenPromiseError",
    "Checked",
    "Conformance",
    "Faults",
    "Finding",
    "KeyKind",
    "LedgerBench",
    "OriginBench",
    "Process",
    "RowWriter",
    "Run",
    "SimulationReport",
    "SinkBench",
    "SourceBench",
    "StateDifference",
    "Tally",
    "TurnsBench",
    "UncheckedError",
    "Verdict",
    "VirtualLoop",
    "World",
    "check_ledger",
    "check_origin",
    "check_sink",
    "check_source",
    "check_turns",
    "run_seed",
    "run_seeds",
    "simulate",
]
