"""The HTTP sink keeps the promises of its protocol, on a real service."""

import pytest

from adapters.http.benches import CONDITIONAL, PLAIN, SINKS
from keywise.testing.conformance.sinks import APPLY_PROMISES, CONDITIONAL_PROMISES
from running import run

pytestmark = pytest.mark.server("http")


def pairs(makes: dict, promises: list) -> list:
    return [
        pytest.param(make, promise, id=f"{name}-{promise.name}") for name, make in makes.items() for promise in promises
    ]


@pytest.mark.parametrize(
    ("make", "promise"),
    [*pairs(PLAIN, [*APPLY_PROMISES]), *pairs(CONDITIONAL, [*APPLY_PROMISES, *CONDITIONAL_PROMISES])],
)
def test_a_sink_keeps_its_promises(make, promise):
    run(promise(make))


def test_every_bench_is_held_to_something():
    assert SINKS["http.sink"] == {**PLAIN, **CONDITIONAL}
