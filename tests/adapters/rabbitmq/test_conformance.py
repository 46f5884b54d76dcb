"""The source on RabbitMQ keeps the promises of its protocol, on a real broker."""

import pytest

from adapters.rabbitmq.benches import SOURCES
from keywise.testing.conformance.sources import SOURCE_PROMISES
from running import run

pytestmark = pytest.mark.server("rabbitmq")


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for name, make in SOURCES["rabbitmq.source"].items()
        for promise in SOURCE_PROMISES
    ],
)
def test_a_source_keeps_its_promises(make, promise):
    run(promise(make))
