"""The source on SQS keeps the promises of its protocol, on a real ElasticMQ."""

import pytest

from adapters.sqs.benches import ENDINGS, short_times_source, sqs_source
from adapters.sqs.short_times import WaitingClock
from keywise.testing.conformance.promise import BrokenPromiseError, UncheckedError
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES
from running import run

pytestmark = pytest.mark.server("elasticmq")


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
        run(promise(sqs_source(ending)))
    except UncheckedError:
        check_in_time(ending, promise)


def check_in_time(ending, promise):
    """Check a promise about time. If the machine was too slow for it, repeat that with times twice as long."""
    clock = WaitingClock()
    while True:
        try:
            return run(promise(short_times_source(ending, clock)), limit_s=300)
        except BrokenPromiseError:
            if not clock.is_late:
                raise
        clock = WaitingClock(2 * clock.second_s)
