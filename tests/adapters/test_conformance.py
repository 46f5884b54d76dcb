"""Every adapter keeps the promises of its protocol; one without a factory is reported by name."""

from contextlib import suppress

import pytest

from adapters.benches import LEDGERS, ORIGINS, SINKS, SOURCES
from adapters.dynamodb import benches as dynamodb_benches
from adapters.http import benches as http_benches
from adapters.opensearch import benches as opensearch_benches
from adapters.postgres import benches as postgres_benches
from adapters.postgres.serial import benches as postgres_turns_benches
from adapters.pubsub import benches as pubsub_benches
from adapters.rabbitmq import benches as rabbitmq_benches
from adapters.record_tables import RECORD_SINKS
from adapters.redis import benches as redis_benches
from adapters.redis.serial import benches as redis_turns_benches
from adapters.serial_benches import TURNS
from adapters.sqs import benches as sqs_benches
from keywise.adapters import ADAPTERS
from keywise.testing.conformance import (
    UncheckedError,
    ledger_promises,
    origin_promises,
    sink_promises,
    source_promises,
)
from running import run

FACTORIES = {
    "sources": SOURCES
    | postgres_benches.SOURCES
    | rabbitmq_benches.SOURCES
    | sqs_benches.SOURCES
    | pubsub_benches.SOURCES,
    "ledgers": LEDGERS | postgres_benches.LEDGERS | redis_benches.LEDGERS,
    "sinks": SINKS | postgres_benches.SINKS | http_benches.SINKS | opensearch_benches.SINKS | dynamodb_benches.SINKS,
    "record_sinks": RECORD_SINKS,
    "origins": ORIGINS | postgres_benches.ORIGINS | dynamodb_benches.ORIGINS,
    "turns": TURNS | postgres_turns_benches.TURNS | redis_turns_benches.TURNS,
}


WITHOUT_URL = {"sinks": {"function.sink"}, "origins": {"function.origin"}}


def modules(role: str) -> set[str]:
    """The modules of a role below keywise.adapters. Handlers and objects of the user's have no URL."""
    found = {module.removeprefix("keywise.adapters.") for module in ADAPTERS[role].values()}
    return found | WITHOUT_URL.get(role, set())


def named(files: dict) -> dict:
    return {name: make for makes in files.values() for name, make in makes.items()}


def pairs(files: dict, promises_of) -> list:
    return [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in named(files).items()
        for promise in promises_of(make)
    ]


@pytest.mark.parametrize("role", FACTORIES)
def test_every_adapter_has_a_factory(role):
    missing = modules(role) - FACTORIES[role].keys()
    assert not missing, f"{role}: add factories for {sorted(missing)} to tests/adapters/benches.py"
    assert FACTORIES[role].keys() <= modules(role)


@pytest.mark.parametrize(("make", "promise"), pairs(SOURCES, lambda make: run(source_promises(make))))
def test_a_source_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(("make", "promise"), pairs(LEDGERS, lambda make: ledger_promises()))
def test_a_ledger_keeps_its_promises(make, promise):
    run(promise(make), limit_s=100)


@pytest.mark.parametrize(("make", "promise"), pairs(SINKS, lambda make: run(sink_promises(make))))
def test_a_sink_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(("make", "promise"), pairs(ORIGINS, lambda make: run(origin_promises(make))))
def test_an_origin_keeps_its_promises(make, promise):
    with suppress(UncheckedError):
        run(promise(make))
