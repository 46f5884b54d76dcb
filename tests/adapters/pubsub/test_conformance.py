"""The source on Pub/Sub keeps the promises of its protocol, on Google's own fake of the service."""

import pytest

from adapters.pubsub.benches import pubsub_source
from keywise.testing.conformance.promise import UncheckedError
from keywise.testing.conformance.sources import (
    SOURCE_PROMISES,
    VISIBILITY_PROMISES,
    an_extension_returns_what_another_consumer_holds,
)
from running import run

pytestmark = pytest.mark.server("pubsub")


UNCHECKED = an_extension_returns_what_another_consumer_holds
"""Needs exactly-once delivery, which the fake does not know; `test_source.py` answers as the service does."""


@pytest.mark.parametrize("promise", [*SOURCE_PROMISES, *VISIBILITY_PROMISES], ids=repr)
def test_a_source_keeps_its_promises(promise):
    if promise is UNCHECKED:
        with pytest.raises(UncheckedError, match="does not say"):
            run(promise(pubsub_source))
    else:
        run(promise(pubsub_source))
