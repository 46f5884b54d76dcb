"""Frames of RabbitMQ that keywise reads and writes itself: all is as if its client library had done it."""

import asyncio
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika.channel import Channel
from pika.spec import Basic, BasicProperties

from keywise.adapters.rabbitmq.connection import Connection, decoded
from keywise.adapters.rabbitmq.frames import ACK, NACK, Unread, delivery_at, settlement, stamp_of
from keywise.adapters.rabbitmq.messages import HEADER

CHANNELS = (1, 2)
OURS, OTHERS = "keywise-1", "others"
Taken = tuple[str, int, bool, bytes, dict[str, Any], bytes]

texts = st.text(max_size=8)
values = st.recursive(
    st.one_of(texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.none(), st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
headers = st.one_of(
    st.none(),
    st.builds(lambda written: {HEADER: written}, texts),
    st.dictionaries(st.one_of(texts, st.just(HEADER), st.just("x-delivery-count")), values, max_size=3),
)
properties = st.builds(
    BasicProperties,
    headers=headers,
    delivery_mode=st.sampled_from([None, 1, 2]),
    priority=st.none() | st.integers(0, 255),
    timestamp=st.none() | st.integers(0, 2**64 - 1),
    **{
        name: st.none() | texts
        for name in (
            "content_type",
            "content_encoding",
            "correlation_id",
            "reply_to",
            "expiration",
            "message_id",
            "type",
            "user_id",
            "app_id",
            "cluster_id",
        )
    },
)


class Reader:
    """A connection without a server, and what its consumers were handed over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, takes: bool) -> None:
        self.taken: list[Taken] = []
        self.connection = Connection(
            pika.ConnectionParameters(), custom_ioloop=loop, internal_connection_workflow=False
        )
        for number in CHANNELS:
            channel = self.connection._channels[number] = Channel(self.connection, number, lambda _: None)
            for tag in (OURS, OTHERS):
                channel._consumers[tag] = self._take_by_pika
        if takes:
            self.connection.delivery_handlers |= {(number, OURS.encode()): self._take for number in CHANNELS}

    def read(self, chunks: Sequence[bytes]) -> type[BaseException] | None:
        """What is raised in the end."""
        for chunk in chunks:
            try:
                self.connection._on_data_available(chunk)
            except Exception as error:
                return type(error)
        return None

    def _take(self, number: int, redelivered: bool, key: bytes, encoded: bytes, body: bytes) -> None:
        self.taken.append((OURS, number, redelivered, key, vars(decoded(encoded)), body))

    def _take_by_pika(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        tag, key = method.consumer_tag, method.routing_key
        # The client library leaves as bytes what is no UTF-8.
        key = key if isinstance(key, bytes) else key.encode()
        self.taken.append((tag, method.delivery_tag, method.redelivered, key, vars(properties), body))


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def delivery(
    body: bytes = b"body",
    properties: BasicProperties | None = None,
    *,
    channel: int = 1,
    tag: str = OURS,
    number: int = 7,
    redelivered: bool = False,
    names: tuple[str, str] = ("", "queue"),
    cuts: Sequence[int] = (),
    body_size: int | None = None,
) -> list[bytes]:
    """The frames of one, whose body is cut into several."""
    method = pika.frame.Method(channel, Basic.Deliver(tag, number, redelivered, *names))
    size = len(body) if body_size is None else body_size
    header = pika.frame.Header(channel, size, properties or BasicProperties())
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)] if body else [0]
    parts = [body[start:end] for start, end in itertools.pairwise(bounds)]
    return [frame.marshal() for frame in (method, header, *(pika.frame.Body(channel, part) for part in parts))]


usual = st.builds(
    delivery,
    st.binary(max_size=30),
    properties,
    channel=st.sampled_from(CHANNELS),
    number=st.integers(1, 2**64 - 1),
    redelivered=st.booleans(),
    names=st.tuples(texts, texts),
)
unusual = st.builds(
    delivery,
    st.binary(max_size=30),
    properties,
    channel=st.sampled_from((*CHANNELS, 3)),
    tag=st.sampled_from((OURS, OTHERS, "nobody", "")),
    cuts=st.lists(st.integers(0, 30), max_size=2),
    body_size=st.none() | st.integers(0, 40),
)
other = st.sampled_from(
    [
        [pika.frame.Heartbeat().marshal()],
        [pika.frame.Method(0, pika.spec.Connection.Unblocked()).marshal()],
        [pika.frame.Method(1, Basic.Return(404, "no", "", "q")).marshal(), *delivery()[1:]],
        [b"\x01\x00\x01\x00\x00\x00\x02\x00\x3c\xce"],
        [b"\x02\x00\x01\x00\x00\x00\x00\xce"],
        [b"\x02\x00\x01\x00\x00\x00\x0c\x00\x3c" + bytes(10) + b"\xce"],
    ]
)
Streams = st.lists(st.one_of(usual, usual, unusual, other), min_size=1, max_size=6)


def chunks_of(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(bounds)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(Streams, cuts)
def test_messages_are_read_as_the_client_library_reads_them_however_they_are_cut(loop, messages, cuts):
    assert_read_alike(loop, chunks_of(b"".join(frame for frames in messages for frame in frames), cuts))


@given(Streams, cuts, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_frames_are_read_and_refused_as_the_client_library_does(loop, messages, cuts, damages):
    stream = bytearray(b"".join(frame for frames in messages for frame in frames))
    for place, byte in damages:
        stream[place % len(stream)] = byte
    assert_read_alike(loop, chunks_of(bytes(stream), cuts))


@given(st.lists(st.one_of(usual, unusual), min_size=1, max_size=4), st.randoms(use_true_random=False), cuts)
def test_frames_that_are_missing_or_out_of_order_are_read_as_the_client_library_does(loop, messages, rng, cuts):
    frames = [frame for frames in messages for frame in frames if rng.random() < 0.9]
    if rng.random() < 0.5:
        rng.shuffle(frames)
    assert_read_alike(loop, chunks_of(b"".join(frames), cuts))


def assert_read_alike(loop, chunks):
    plain, ours = Reader(loop, takes=False), Reader(loop, takes=True)
    assert ours.read(chunks) == plain.read(chunks)
    assert ours.taken == plain.taken


def test_usual_messages_are_taken_without_the_client_library(loop):
    reader = Reader(loop, takes=True)
    stream = b"".join(b"".join(delivery(b"x" * size, number=size + 1)) for size in range(100))
    assert reader.read([stream[start : start + 97] for start in range(0, len(stream), 97)]) is None
    assert [number for _, number, *_ in reader.taken] == [*range(1, 101)]
    assert reader.connection.frames_received == 0, "it counts the frames that it has read"


def test_what_was_read_counts_for_the_heartbeat_at_once(loop):
    """Else a connection on which only heartbeats come is taken for a dead one."""
    reader, frames = Reader(loop, takes=True), [b"".join(delivery()), pika.frame.Heartbeat().marshal()]
    read = 0
    for frame in [*frames, frames[1], *frames]:
        assert reader.read([frame]) is None
        read += len(frame)
        assert reader.connection.bytes_received == read


def test_a_wrong_end_of_a_frame_ends_the_connection(loop):
    for broken in range(3):
        frames = delivery()
        frames[broken] = frames[broken][:-1] + b"\x00"
        reader = Reader(loop, takes=True)
        assert reader.read([b"".join([*delivery(number=1), *frames])]) is pika.exceptions.InvalidFrameError
        assert [number for _, number, *_ in reader.taken] == [1]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x01\x00\x01\x00\x00\x00\x05\x00\x3c\x00\x3c\x09\xce"],
        [delivery()[0][:7] + delivery()[0][7:].replace(b"\x00\x05queue", b"\x99\x05queue")],
        [delivery()[0], b"\x02\x00\x01\x00\x00\x00\x02\x00\x3c\xce", *delivery()],
        [delivery()[0], b"\x02\x00\x01\x00\x00\x00\x0d\x00\x3c" + bytes(11) + b"\xce", *delivery()],
        [*delivery(cuts=[2])[:3], *delivery()],
        [delivery()[0], *delivery(channel=2)[1:]],
        [*delivery()[:2], *delivery(b"too long")[2:]],
    ],
)
def test_frames_that_a_broker_never_sends_are_refused_as_the_client_library_does(loop, frames):
    assert_read_alike(loop, [b"".join(frames)])
    assert_read_alike(loop, frames)


def test_more_is_waited_for_only_where_it_can_make_a_message():
    whole, delivery_handlers = b"".join(delivery()), {(1, OURS.encode()): "taker"}
    assert delivery_at(whole, 0, delivery_handlers) == ("taker", 7, False, b"queue", b"\x00\x00", b"body", len(whole))
    assert {delivery_at(whole[:size], 0, delivery_handlers) for size in range(12, len(whole))} == {Unread.PARTIAL}
    assert delivery_at(whole[:-1], 0, {}) is Unread.OTHER
    huge = b"".join(delivery(body_size=2**40))
    assert delivery_at(huge, 0, delivery_handlers) is Unread.OTHER


@given(properties)
def test_the_stamp_of_a_message_is_what_the_client_library_reads(given):
    assert_stamped(b"".join(given.encode()))


@given(
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda flags, rest: struct.pack(">H", flags) + rest,
            st.sampled_from([0x2000, 0x3040, 0x0040, 0xFFFC, 0x3041]),
            st.binary(max_size=40),
        ),
    )
)
def test_properties_that_make_no_sense_have_no_stamp_or_the_one_of_the_client_library(encoded):
    assert_stamped(encoded)


@given(properties, st.integers(0, 10_000), st.integers(0, 255))
def test_the_stamp_of_damaged_properties_is_what_the_client_library_reads(given, place, byte):
    encoded = bytearray(b"".join(given.encode()))
    encoded[place % len(encoded)] = byte
    assert_stamped(bytes(encoded))
    assert_stamped(bytes(encoded[: place % len(encoded)]))


def assert_stamped(encoded):
    """All of the time, where it has one header at the most, and that one is ours and a text."""
    stamp, read = stamp_of(encoded), decoded(encoded)
    if stamp is not None:
        written, timestamp = stamp
        assert read.timestamp == timestamp
        assert read.headers == (None if written is None else {HEADER: written})


def test_properties_with_more_flags_than_there_are_properties_have_no_stamp():
    encoded = struct.pack(">HQ", 1 << 6 | 1, 2)
    assert_stamped(encoded)
    assert stamp_of(encoded) is None


@pytest.mark.parametrize("headers", [None, {HEADER: "id 0 1.5 77"}])
def test_what_keywise_sends_has_a_stamp(headers):
    sent = BasicProperties(delivery_mode=2, timestamp=1_700_000_000, headers=headers, content_type="text/plain")
    written = headers and headers[HEADER]
    assert stamp_of(b"".join(sent.encode())) == (written, 1_700_000_000)


@given(st.integers(1, 65_535), st.lists(st.integers(1, 2**64 - 1), max_size=8), st.integers(0, 8))
def test_settlements_are_written_as_the_client_library_writes_them(channel, numbers, together):
    together = min(together, len(numbers))
    for method, word in ((ACK, Basic.Ack), (NACK, Basic.Nack)):
        words = [word(number) for number in numbers[together:]]
        if together:
            words.insert(0, word(numbers[together - 1], multiple=True))
        written = b"".join(pika.frame.Method(channel, one).marshal() for one in words)
        assert settlement(channel, method, numbers, together) == written
