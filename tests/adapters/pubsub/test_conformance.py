"""The source on Pub/Sub keeps the promises of its protocol, on Google's own fake of the service."""

import pytest

from adapters.pubsub.benches import pubsub_source
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES
from running import run

pytestmark = pytest.mark.server("pubsub")


@pytest.mark.parametrize("promise", [*SOURCE_PROMISES, *VISIBILITY_PROMISES], ids=repr)
def test_a_source_keeps_its_promises(promise):
    run(promise(pubsub_source))
