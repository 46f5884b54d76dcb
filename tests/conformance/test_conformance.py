"""Every file in the plug folders keeps the promises of its protocol; one without a factory is reported by name."""

from pathlib import Path

import pytest

import keywise
from conformance import (
    http_benches,
    opensearch_benches,
    postgres_benches,
    postgres_turns_benches,
    rabbitmq_benches,
    redis_benches,
    redis_turns_benches,
)
from conformance.benches import LEDGERS, SINKS, SOURCES
from conformance.turns_benches import TURNS
from keywise.testing.conformance import ledger_promises, sink_promises, source_promises
from running import run

FACTORIES = {
    "sources": SOURCES | postgres_benches.SOURCES | rabbitmq_benches.SOURCES,
    "ledgers": LEDGERS | postgres_benches.LEDGERS | redis_benches.LEDGERS,
    "sinks": SINKS | postgres_benches.SINKS | http_benches.SINKS | opensearch_benches.SINKS,
    "turns": TURNS | postgres_turns_benches.TURNS | redis_turns_benches.TURNS,
}


def plug_files(role: str) -> set[str]:
    files = {path.name for path in (Path(keywise.__file__).parent / role).glob("*.py")}
    return files - {"__init__.py"}


def named(files: dict) -> dict:
    return {name: make for makes in files.values() for name, make in makes.items()}


def pairs(files: dict, promises_of) -> list:
    return [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
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
