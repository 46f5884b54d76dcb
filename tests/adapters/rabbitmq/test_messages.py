"""What is read from messages of RabbitMQ, written into copies, and told of errors of the client library."""

import ssl
import zlib
from decimal import Decimal
from types import SimpleNamespace

import pika
import pytest
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, ConnectionClosedByBroker, StreamLostError

from keywise.adapters.rabbitmq.broker import Broker, BrokerLink, broker_at, refusal_code, translated
from keywise.adapters.rabbitmq.connection import Connection
from keywise.adapters.rabbitmq.delay_classes import CLASSES_S, DAY_S, wait_of, waits_of
from keywise.adapters.rabbitmq.messages import (
    HEADER,
    HEADERS_MAX_BYTES,
    KEPT,
    SECONDS_MAX,
    MessageIdentity,
    copied_properties,
    identity_of,
    resent_properties,
    routing_key_of,
    sent_at,
    shown_headers,
    times_before,
)
from keywise.adapters.rabbitmq.publisher import BYTES_IN_FLIGHT_MAX, _batches
from keywise.core.errors import DatabaseError, SettingsError, UnavailableError
from keywise.core.url import Address
from running import run

IDENTITY = MessageIdentity("id", 3, 1.5)


def copied(**properties) -> pika.BasicProperties:
    return copied_properties(pika.BasicProperties(**properties), b"body", IDENTITY)


def test_the_names_of_delay_queues_fit_and_change_with_the_period():
    now = 1_800_000_000.0
    assert wait_of("q", 5.0, now).queue == wait_of("q", 1.5, now).queue != wait_of("q", 5.1, now).queue
    assert wait_of("q", 5.0, now).queue != wait_of("q", 5.0, now + DAY_S).queue
    assert wait_of("q", 1e9, now).delay_s == CLASSES_S[-1]
    assert len(wait_of("日" * 80, 5.0, now).queue.encode()) < 255
    assert wait_of("日" * 80, 5.0, now).queue != wait_of("日" * 79 + "月", 5.0, now).queue


def test_a_delay_queue_outlives_whatever_may_be_put_into_it():
    """A broker deletes it with everything in it, at the earliest so long after it was made."""
    for wait in waits_of("q", 1_800_000_000.0):
        lives_ms = wait.arguments("q")["x-expires"]
        assert (wait.period_s + wait.longest_s) * 1000 < lives_ms < 2**32


@pytest.mark.parametrize("written", ["", "a b", "a b c d", "id 1 1.0 77", "id x 1.0 0", "id 1 x 3638943265", 5, None])
def test_a_header_that_is_not_ours_or_belongs_to_another_body_is_not_believed(written):
    assert identity_of({HEADER: written}, b"body") is None
    ours = MessageIdentity("id", 3, 1.5).encoded(b"body")
    assert identity_of({HEADER: ours}, b"body") == MessageIdentity("id", 3, 1.5)
    assert identity_of({HEADER: ours}, b"another") is None


def test_a_copy_acts_nowhere_else_and_keeps_what_a_reader_needs():
    copy = copied(
        headers={"CC": ["elsewhere"], "x-death": [{"queue": "q"}], "x-first-death-queue": "q", "a": 1},
        user_id="somebody",
        expiration="1000",
        delivery_mode=1,
        content_type="text/plain",
        message_id="m",
    )
    assert (copy.user_id, copy.expiration, copy.delivery_mode) == (None, None, 2)
    assert (copy.content_type, copy.message_id) == ("text/plain", "m")
    assert identity_of(copy.headers, b"body") == MessageIdentity("id", 3, 1.5)
    assert {name for name in copy.headers if name != HEADER} == {"a", "keywise-kept"}
    assert shown_headers(copy.headers) == {"a": "1", "CC": "['elsewhere']", "x-death": "[{'queue': 'q'}]"}


def test_a_copy_of_a_copy_keeps_what_was_put_aside_and_forgets_our_own_delays():
    headers = copied(headers={"CC": ["elsewhere"]}).headers
    headers |= {"x-death": [{"queue": "keywise.delay.q.5s.1"}], "x-delivery-count": 2}
    again = copied(headers=headers)
    assert shown_headers(again.headers) == {"CC": "['elsewhere']"}


@pytest.mark.parametrize("value", [Decimal(10) ** -300, 2**70, object(), [object()]])
def test_a_value_that_cannot_be_written_is_written_as_text(value):
    assert copied(headers={"odd": value}).headers["odd"] == str(value)


def test_headers_that_do_not_fit_into_a_frame_are_left_out():
    assert list(copied(headers={"long": "x" * HEADERS_MAX_BYTES}).headers) == [HEADER]


def test_headers_are_shown_as_text_and_not_without_end():
    shown = shown_headers({b"\xff": b"\xfe", "long": "x" * 5000})
    assert shown == {"\\xff": "\\xfe", "long": "x" * 2000}
    assert shown_headers({HEADER: "ours"}) is None


def test_times_are_read_in_seconds_and_milliseconds_and_counts_only_if_they_are_some():
    assert sent_at(1_700_000_000) == 1_700_000_000.0
    assert sent_at(1_700_000_000_000) == 1_700_000_000.0
    for moment in (0, 2**64 - 1):
        assert 1_700_000_000.0 < sent_at(moment) < SECONDS_MAX
    assert [times_before({"x-delivery-count": n}, True) for n in (0, 4, "7", None)] == [1, 4, 1, 1]
    assert times_before({}, False) == 0


@pytest.mark.parametrize("moment", ["nan", "inf", "-1.0", "1e300"])
def test_a_time_of_sending_that_is_none_is_not_believed(moment: str):
    assert identity_of({HEADER: f"id 1 {moment} {zlib.crc32(b'body')}"}, b"body") is None


def test_a_header_that_was_put_aside_and_cannot_be_written_is_kept_as_text():
    assert copied(headers={KEPT: {"CC": Decimal(2**32)}}).headers[KEPT] == {"CC": str(2**32)}


def test_messages_are_published_in_parts():
    large = (b"x" * BYTES_IN_FLIGHT_MAX, None)
    assert [len(part) for part in _batches([large, large, (b"", None)])] == [1, 1, 1]
    assert [len(part) for part in _batches([(b"", None)] * 2000)] == [1000, 1000]
    assert list(_batches([])) == []


UNTRUSTED = ssl.SSLCertVerificationError("no")
UNTRUSTED.verify_message = "no"


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ConnectionClosedByBroker(403, "ACCESS_REFUSED"), DatabaseError, "check user and password"),
        (ConnectionClosedByBroker(530, "NOT_ALLOWED"), DatabaseError, "check the virtual host"),
        (ConnectionClosedByBroker(320, "CONNECTION_FORCED"), UnavailableError, "CONNECTION_FORCED"),
        (ChannelClosedByBroker(404, "no queue 'q'"), DatabaseError, "declare it first"),
        (ChannelClosedByBroker(404, "queue 'q' has no leader"), UnavailableError, "no leader"),
        (ChannelClosedByBroker(403, "queue 'q' in exclusive use"), UnavailableError, "exclusive use"),
        (ChannelClosedByBroker(405, "RESOURCE_LOCKED"), DatabaseError, "has it for itself"),
        (ChannelClosedByBroker(541, "INTERNAL_ERROR"), UnavailableError, "INTERNAL_ERROR"),
        (AMQPConnectionError(UNTRUSTED), DatabaseError, "is not trusted"),
        (StreamLostError("lost"), UnavailableError, "lost"),
        (TimeoutError(), UnavailableError, "TimeoutError"),
    ],
)
def test_an_error_of_the_client_library_is_told_with_what_to_do(error, kind, told):
    found = translated(error, "amqp://host")
    assert type(found) is kind
    assert told in str(found) and str(found).startswith("amqp://host: ")


def test_errors_of_ours_and_mistakes_of_ours_stay_as_they_are():
    for error in (SettingsError("ours"), KeyError("a mistake")):
        assert translated(error, "amqp://host") is error
    assert refusal_code(DatabaseError("ours")) == 0


@pytest.mark.parametrize(("version", "is_refused"), [("3.9.29", True), ("3.10.8", False), ("4.1.0", False), ("", True)])
def test_a_broker_that_is_too_old_is_refused(version, is_refused):
    class Opened(SimpleNamespace):
        def close(self) -> None:
            self.is_closed = True

    connection = Opened(server_properties={"product": "RabbitMQ", "version": version}, is_closed=False)
    link = BrokerLink(Broker("amqp://host/"), "testing")
    if is_refused:
        with pytest.raises(DatabaseError, match="needs RabbitMQ"):
            link._check(connection)
    else:
        link._check(connection)
    assert connection.is_closed is is_refused


def test_the_parts_of_a_url_reach_the_client_library(tmp_path):
    address = Address("amqp://a%2Fb:p%40ss@host:1234/v%2Fh?heartbeat=20s", "pages", {})
    parameters = broker_at(address, address.take("heartbeat")).parameters("testing")
    assert (parameters.host, parameters.port, parameters.virtual_host) == ("host", 1234, "v/h")
    assert (parameters.credentials.username, parameters.credentials.password) == ("a/b", "p@ss")
    assert parameters.heartbeat == 20
    plain = Broker("amqps://host").parameters("testing")
    assert (plain.port, plain.virtual_host, plain.credentials.username) == (5671, "/", "guest")
    assert plain.ssl_options.context.verify_mode is ssl.CERT_REQUIRED and plain.ssl_options.context.check_hostname


def test_a_link_that_was_never_opened_can_be_closed():
    run(BrokerLink(Broker("amqp://host/"), "testing").close())


def test_only_headers_of_messages_may_be_unreadable():
    """A frame of another kind that makes no sense ends the connection: nobody knows what would follow."""
    connection = Connection.__new__(Connection)
    connection._frame_buffer = b"\x01\x00\x01\x00\x00\x00\x04\xff\xff\xff\xff\xce"
    with pytest.raises(LookupError):
        connection._read_frame()


def test_a_message_that_is_sent_again_has_its_headers_and_acts_nowhere_else():
    sent = resent_properties(b"body", "id", 5.0, {"CC": "['elsewhere']", "version": "7"}, "stock.lamp")
    assert {name for name in sent.headers if name != HEADER} == {"version", "keywise-kept", "keywise-routing-key"}
    assert shown_headers(sent.headers) == {"version": "7", "CC": "['elsewhere']"}
    assert routing_key_of(sent.headers, "queue") == "stock.lamp"


def test_what_a_delay_queue_of_ours_adds_is_not_shown():
    added = {"x-first-death-queue": "keywise.delay.q.5s.1", "x-first-death-reason": "expired", "version": 7}
    assert shown_headers(added) == {"version": "7"}
    assert shown_headers({"x-first-death-queue": "theirs"}) == {"x-first-death-queue": "theirs"}
