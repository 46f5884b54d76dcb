"""The turns in Redis keep the promises of their protocol, on a real server."""

import pytest

from adapters.redis.serial.benches import TURNS
from keywise.testing.conformance import turns_promises
from running import run

pytestmark = pytest.mark.server("redis")


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for makes in TURNS.values()
        for name, make in makes.items()
        for promise in turns_promises(transactions=False)
    ],
)
def test_turns_keep_their_promises(make, promise):
    run(promise(make), limit_s=110)
