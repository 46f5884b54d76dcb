"""A pika connection that parses plain deliveries itself, and survives messages whose headers cannot be decoded."""

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.exceptions import AMQPError
from pika.spec import FRAME_END, FRAME_HEADER

from keywise.adapters.rabbitmq.frames import Unread, delivery_at
from keywise.adapters.rabbitmq.heartbeat import BrokerHeartbeat

UNREADABLE = (AMQPError, ArithmeticError, ValueError, OSError, RecursionError, struct.error, LookupError, TypeError)
"""What the client library raises for headers that it cannot decode, such as dates after year 9999 or deeply nested
tables."""
FRAME_HEAD, CONTENT_HEAD = 7, 12
"""Bytes before the payload of a frame, and before the properties in the payload of a header frame."""

DeliveryHandler: TypeAlias = Callable[[int, bool, bytes, bytes, bytes], None]
"""Called with a message: delivery tag, redelivered, routing key, encoded properties, body."""


class Connection(AsyncioConnection):  # type: ignore[misc]
    """Hands plain deliveries to their handlers; the client library does everything else, frame by frame.

    A message whose headers cannot be decoded does not end the connection: it is delivered without them.
    """

    def __init__(self, *arguments: Any, heartbeat_thread: BrokerHeartbeat | None = None, **options: Any) -> None:
        self.delivery_handlers: dict[tuple[int, bytes], DeliveryHandler] = {}
        """By channel number and consumer tag."""
        self._is_mid_message = False
        """Whether the client library has read a part of a message, so that it has to get the next frames too."""
        self._heartbeat_thread = heartbeat_thread
        super().__init__(*arguments, **options)

    def write(self, frames: bytes) -> None:
        """Send encoded frames in one write."""
        self._output_marshaled_frames([frames])

    def _proto_connection_made(self, transport: Any) -> None:
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.guard(transport)
        super()._proto_connection_made(transport)

    def _on_connection_workflow_done(self, result: Any) -> None:
        """Make an exception of the class that the client library reports for an aborted connect.

        It would take the class itself for an open connection.
        """
        super()._on_connection_workflow_done(result() if isinstance(result, type) else result)

    def _create_heartbeat_checker(self) -> Any:
        """Start the thread here, because both sides have just agreed on the interval."""
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
            if not self._is_mid_message and self.delivery_handlers and self._take() is Unread.PARTIAL:
                return
            consumed, frame = self._read_frame()
            if not frame:
                return
            self._trim_frame_buffer(consumed)
            self._process_frame(frame)
            self._is_mid_message = bool(self.delivery_handlers) and any(
                _has_partial_message(one._content_assembler) for one in self._channels.values()
            )

    def _take(self) -> Unread:
        """Hand over all plain deliveries at the start of the buffer; return what stopped it."""
        buffer, at, delivery_handlers = self._frame_buffer, 0, self.delivery_handlers
        while not isinstance(found := delivery_at(buffer, at, delivery_handlers), Unread):
            take, number, redelivered, routing_key, properties, body, at = found
            take(number, redelivered, routing_key, properties, body)
        self._trim_frame_buffer(at)
        return found

    def _read_frame(self) -> Any:
        try:
            return super()._read_frame()
        except UNREADABLE:
            kind, channel, size = struct.unpack_from(">BHL", self._frame_buffer)
            # A frame with wrong bounds ends the connection: where the next one begins is unknown.
            if kind != FRAME_HEADER or size < CONTENT_HEAD or self._frame_buffer[FRAME_HEAD + size] != FRAME_END:
                raise
            (body_size,) = struct.unpack_from(">Q", self._frame_buffer, FRAME_HEAD + 4)
            return FRAME_HEAD + size + 1, pika.frame.Header(channel, body_size, pika.BasicProperties())


def _has_partial_message(assembler: Any) -> bool:
    return any((assembler._method_frame, assembler._header_frame, assembler._body_fragments))


def decoded(properties: bytes) -> Any:
    """Decode properties; return empty ones if that fails."""
    try:
        return pika.BasicProperties().decode(properties)
    except UNREADABLE:
        return pika.BasicProperties()
