"""A connection to RabbitMQ by pika that reads the usual frames of messages itself, and outlives headers of any kind."""

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.exceptions import AMQPError
from pika.spec import FRAME_END, FRAME_HEADER

from keywise.adapters.rabbitmq.frames import Unread, handover_at
from keywise.adapters.rabbitmq.heartbeat import BrokerHeartbeat

UNREADABLE = (AMQPError, ArithmeticError, ValueError, OSError, RecursionError, struct.error, LookupError, TypeError)
"""What the client library raises at headers with times outside of any calendar, or tables in tables in tables."""
FRAME_HEAD, CONTENT_HEAD = 7, 12
"""Bytes before what a frame holds, and before the properties of a message in it."""

Taker: TypeAlias = Callable[[int, bool, bytes, bytes, bytes], None]
"""Gets a message: its number, whether it came before, its routing key, its properties as they came, its body."""


class Connection(AsyncioConnection):  # type: ignore[misc]
    """Hands usual messages to whoever takes them; the client library does everything else, frame by frame.

    It is not lost by one message whose headers cannot be read: that is taken without them.
    """

    def __init__(self, *arguments: Any, heartbeat_thread: BrokerHeartbeat | None = None, **options: Any) -> None:
        self.takers: dict[tuple[int, bytes], Taker] = {}
        """By the number of their channel, and the tag of their consumer."""
        self._is_amid = False
        """Whether the client library has the beginning of a message, so the rest of it is its own."""
        self._heartbeat_thread = heartbeat_thread
        super().__init__(*arguments, **options)

    def write(self, frames: bytes) -> None:
        """Send frames in one go."""
        self._output_marshaled_frames([frames])

    def _proto_connection_made(self, transport: Any) -> None:
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.guard(transport)
        super()._proto_connection_made(transport)

    def _on_connection_workflow_done(self, result: Any) -> None:
        """Of an opening that is broken off, the client library reports a class, which it takes for a connection."""
        super()._on_connection_workflow_done(result() if isinstance(result, type) else result)

    def _create_heartbeat_checker(self) -> Any:
        """Once both sides have agreed on the interval."""
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.start(self.params.heartbeat or 0)
        return super()._create_heartbeat_checker()

    def _proto_connection_lost(self, error: BaseException | None) -> None:
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.stop()
        super()._proto_connection_lost(error)

    def _on_data_available(self, data_in: bytes) -> None:
        self._frame_buffer += data_in
        while self._frame_buffer:
            if not self._is_amid and self.takers and self._take() is Unread.PARTIAL:
                return
            consumed, frame = self._read_frame()
            if not frame:
                return
            self._trim_frame_buffer(consumed)
            self._process_frame(frame)
            self._is_amid = bool(self.takers) and any(
                _is_amid(one._content_assembler) for one in self._channels.values()
            )

    def _take(self) -> Unread:
        """Hand over all messages that are here, up to something else."""
        buffer, at, takers = self._frame_buffer, 0, self.takers
        while not isinstance(found := handover_at(buffer, at, takers), Unread):
            take, number, redelivered, routing_key, properties, body, at = found
            take(number, redelivered, routing_key, properties, body)
        self._trim_frame_buffer(at)
        return found

    def _read_frame(self) -> Any:
        try:
            return super()._read_frame()
        except UNREADABLE:
            kind, channel, size = struct.unpack_from(">BHL", self._frame_buffer)
            # A frame that is itself broken ends the connection: nobody knows what would follow.
            if kind != FRAME_HEADER or size < CONTENT_HEAD or self._frame_buffer[FRAME_HEAD + size] != FRAME_END:
                raise
            (body_size,) = struct.unpack_from(">Q", self._frame_buffer, FRAME_HEAD + 4)
            return FRAME_HEAD + size + 1, pika.frame.Header(channel, body_size, pika.BasicProperties())


def _is_amid(assembler: Any) -> bool:
    return any((assembler._method_frame, assembler._header_frame, assembler._body_fragments))


def decoded(properties: bytes) -> Any:
    """Properties as an object of the client library; none if they cannot be read."""
    try:
        return pika.BasicProperties().decode(properties)
    except UNREADABLE:
        return pika.BasicProperties()
