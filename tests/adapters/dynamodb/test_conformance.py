"""The sink and the origin on DynamoDB keep their promises, on a real DynamoDB Local."""

from contextlib import suppress

import pytest

from adapters.dynamodb.benches import ORIGINS, SINKS
from keywise.testing.conformance import UncheckedError
from keywise.testing.conformance.origins import CONSISTENT_PROMISES, ORIGIN_PROMISES
from keywise.testing.conformance.sinks import APPLY_PROMISES, CONDITIONAL_PROMISES, READING_PROMISES
from running import run

pytestmark = pytest.mark.server("dynamodb")

# Said here and not asked from the sink, so that nothing is started while tests are collected.
PROMISES = [*APPLY_PROMISES, *CONDITIONAL_PROMISES, *READING_PROMISES]


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in SINKS["dynamodb.sink"].items()
        for promise in PROMISES
    ],
)
def test_a_sink_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in ORIGINS["dynamodb.origin"].items()
        for promise in [*ORIGIN_PROMISES, *CONSISTENT_PROMISES]
    ],
)
def test_an_origin_keeps_its_promises(make, promise):
    # A table with other keys than texts is refused (`test_errors.py`), so some promises cannot be checked.
    with suppress(UncheckedError):
        run(promise(make))
