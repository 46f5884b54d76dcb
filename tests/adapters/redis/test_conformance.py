"""The ledger in Redis keeps the promises of its protocol, on a real server."""

import pytest

from adapters.redis.benches import LEDGERS
from keywise.testing.conformance import ledger_promises
from keywise.testing.conformance.random_histories import RANDOM_HISTORY_PROMISES
from running import run

pytestmark = pytest.mark.server("redis")


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in LEDGERS["redis.ledger.ledger"].items()
        for promise in ledger_promises(transactions=False)
        # They take their time, and what else is promised shows whether the number of buckets matters.
        if name == "redis" or promise not in RANDOM_HISTORY_PROMISES
    ],
)
def test_a_ledger_keeps_its_promises(make, promise):
    run(promise(make), limit_s=110)
