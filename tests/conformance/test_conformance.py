"""Every file in the plug folders keeps the promises of its protocol; one without a factory is reported by name."""

from pathlib import Path

import pytest

import keywise
from conformance import postgres_benches
from conformance.benches import LEDGERS, SINKS, SOURCES
from keywise.testing.conformance import ledger_promises, sink_promises, source_promises
from keywise.testing.conformance.inlets import INLET_PROMISES
from keywise.testing.conformance.sinks import ATOMIC_PROMISES, READING_PROMISES
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES
from running import run

FACTORIES = {
    "sources": SOURCES | postgres_benches.SOURCES,
    "ledgers": LEDGERS | postgres_benches.LEDGERS,
    "sinks": SINKS | postgres_benches.SINKS,
}
INLINE_PROMISES = [*SOURCE_PROMISES, *VISIBILITY_PROMISES, *INLET_PROMISES]
TABLE_PROMISES = [*ATOMIC_PROMISES, *READING_PROMISES]


def plug_files(role: str) -> set[str]:
    files = {path.name for path in (Path(keywise.__file__).parent / role).glob("*.py")}
    return files - {"__init__.py"}


def named(files: dict) -> dict:
    return {name: make for makes in files.values() for name, make in makes.items()}


def pairs(files: dict, promises_of, *marks) -> list:
    return [
        pytest.param(make, promise, id=f"{name}-{promise.name}", marks=marks)
        for name, make in named(files).items()
        for promise in promises_of(make)
    ]


@pytest.mark.parametrize("role", FACTORIES)
def test_every_file_in_a_plug_folder_has_a_factory(role):
    missing = plug_files(role) - FACTORIES[role].keys()
    assert not missing, f"{role}: add factories for {sorted(missing)} to tests/conformance/benches.py"
    assert FACTORIES[role].keys() <= plug_files(role)


@pytest.mark.parametrize(("make", "promise"), pairs(SOURCES, lambda make: run(source_promises(make))))
def test_a_source_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(("make", "promise"), pairs(LEDGERS, lambda make: ledger_promises()))
def test_a_ledger_keeps_its_promises(make, promise):
    run(promise(make), limit_s=100)


@pytest.mark.parametrize(("make", "promise"), pairs(SINKS, lambda make: run(sink_promises(make))))
def test_a_sink_keeps_its_promises(make, promise):
    run(promise(make))


# What needs a server says itself what it promises, so that nothing is started while tests are collected.
POSTGRES = pytest.mark.server("postgres")


@pytest.mark.parametrize(("make", "promise"), pairs(postgres_benches.SOURCES, lambda make: INLINE_PROMISES, POSTGRES))
def test_a_source_on_postgres_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(("make", "promise"), pairs(postgres_benches.LEDGERS, lambda make: ledger_promises(), POSTGRES))
def test_a_ledger_on_postgres_keeps_its_promises(make, promise):
    run(promise(make), limit_s=110)


@pytest.mark.parametrize(("make", "promise"), pairs(postgres_benches.SINKS, lambda make: TABLE_PROMISES, POSTGRES))
def test_a_sink_on_postgres_keeps_its_promises(make, promise):
    run(promise(make))
