"""Every file in the plug folders keeps the promises of its protocol; one without a factory is reported by name."""

from pathlib import Path

import pytest

import keywise
from conformance.benches import LEDGERS, SINKS, SOURCES
from keywise.testing.conformance import (
    BrokenPromiseError,
    SourceBench,
    check_sink,
    check_source,
    ledger_promises,
    sink_promises,
    source_promises,
)
from running import run

FACTORIES = {"sources": SOURCES, "ledgers": LEDGERS, "sinks": SINKS}


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


def test_a_broken_promise_is_told_with_what_was_seen():
    """The error names the promise first, so that an adapter's author knows what to read in the protocol."""

    class Forgetful:
        """A queue that drops every second message."""

        visibility_s = None
        database = None

        def __init__(self) -> None:
            self.bodies: list[bytes] = []

        async def send(self, bodies, *, delay_s: float = 0.0) -> None:
            self.bodies += bodies[::2]

        async def receive(self, limit: int, wait_s: float):
            return [keywise.change.Delivery(number, 0, body, 0.0) for number, body in enumerate(self.bodies)]

    class Factory:
        async def __aenter__(self) -> SourceBench:
            return SourceBench(source=Forgetful(), another=Forgetful(), advance=lambda seconds: None)

        async def __aexit__(self, *error: object) -> None:
            pass

    with pytest.raises(BrokenPromiseError, match=r"^A body is any bytes.* But the set of bodies was \[") as error:
        run(check_source(Factory))
    assert len(str(error.value)) < 2000


def test_the_whole_suite_tells_how_many_promises_were_kept():
    assert run(check_sink(SINKS["memory.py"]["memory conditional"])) == 12
