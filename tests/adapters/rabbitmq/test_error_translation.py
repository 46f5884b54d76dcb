"""Errors of RabbitMQ's client library: a refusal that a person has to end, or something that passes."""

import pytest
from pika.exceptions import (
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    StreamLostError,
)

from keywise.adapters.rabbitmq.broker import translated
from keywise.core.errors import DatabaseError, UnavailableError


@pytest.mark.parametrize("kind", [ProbableAuthenticationError, ProbableAccessDeniedError])
def test_a_connection_that_is_lost_at_the_login_is_no_refusal(kind):
    """The library wraps it as it wraps a refusal, with the real cause as text."""
    lost, refused = StreamLostError("reset by peer"), ConnectionClosedByBroker(403, "ACCESS_REFUSED")
    assert isinstance(translated(kind(repr(lost)), "amqp://host"), UnavailableError)
    assert isinstance(translated(kind(repr(refused)), "amqp://host"), DatabaseError)
