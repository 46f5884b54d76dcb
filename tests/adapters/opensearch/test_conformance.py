"""The sink on OpenSearch keeps the promises of its grade, on a real engine."""

import pytest

from adapters.opensearch.benches import SINKS
from keywise.testing.conformance.sinks import APPLY_PROMISES, CONDITIONAL_PROMISES, READING_PROMISES
from keywise.testing.conformance.targets import ALIAS_PROMISES, TARGET_PROMISES
from running import run

pytestmark = pytest.mark.server("opensearch")

# Said here and not asked from the sink, so that nothing is started while tests are collected.
PROMISES = [*APPLY_PROMISES, *CONDITIONAL_PROMISES, *READING_PROMISES, *TARGET_PROMISES, *ALIAS_PROMISES]


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in SINKS["opensearch.sink"].items()
        for promise in PROMISES
    ],
)
def test_a_sink_keeps_its_promises(make, promise):
    run(promise(make))
