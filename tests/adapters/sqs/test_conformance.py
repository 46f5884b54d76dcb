"""The source on SQS keeps the promises of its protocol, on a real ElasticMQ."""

import pytest

from adapters.sqs.benches import ENDINGS, sqs_source
from keywise.testing.conformance.promise import UncheckedError
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES
from running import run

pytestmark = [pytest.mark.server("elasticmq"), pytest.mark.server("faketime")]


@pytest.mark.parametrize(
    ("ending", "promise"),
    [
        pytest.param(ending, promise, id=f"{name}-{promise.name}")
        for name, ending in ENDINGS.items()
        for promise in (*SOURCE_PROMISES, *VISIBILITY_PROMISES)
    ],
)
def test_a_source_keeps_its_promises(ending, promise):
    try:
        run(promise(sqs_source(ending, is_moved=False)))
    except UncheckedError:
        run(promise(sqs_source(ending, is_moved=True)))
