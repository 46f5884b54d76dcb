"""The source on SQS keeps the promises of its protocol, on a real ElasticMQ."""

import pytest

from adapters.sqs.benches import SOURCES
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES
from running import run

pytestmark = [pytest.mark.server("elasticmq"), pytest.mark.server("faketime")]


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in SOURCES["sqs.source"].items()
        for promise in (*SOURCE_PROMISES, *VISIBILITY_PROMISES)
    ],
)
def test_a_source_keeps_its_promises(make, promise):
    run(promise(make))
