"""Errors of RabbitMQ's client library: a refusal that a person has to end, or something that passes."""

import pytest
from pika.exceptions import (
    ConnectionClosedByBroker,
    ConnectionOpenAborted,
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


def test_a_broker_that_does_not_answer_the_login_is_said_to_be_silent():
    """The library names its own timeout, in a sentence about its states."""
    error = translated(ConnectionOpenAborted("Connection.close() called before: prev_state=PROTOCOL"), "amqp://host")
    assert isinstance(error, UnavailableError)
    assert str(error) == (
        "amqp://host: takes the connection, but does not answer; check that host and port are those of a broker, and "
        "that it is not overloaded"
    )
