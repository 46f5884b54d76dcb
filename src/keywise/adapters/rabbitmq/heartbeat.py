"""AMQP heartbeats from a thread, so that a handler that blocks the event loop does not lose the connection."""

import ssl
import threading
import time
from typing import Any

FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"
"""A heartbeat frame."""
CHECKS_PER_INTERVAL = 4
"""How often the thread checks in one heartbeat interval."""
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BrokerHeartbeat:
    """Writes a heartbeat whenever the event loop has written nothing for half of the agreed interval.

    The client library sends heartbeats too, from the event loop. If the loop has written nothing for `hung_after_s`
    plus one interval, the process counts as hung: the thread stops writing, so that the broker closes the connection
    and redelivers the messages. If the loop writes again before that, the thread goes on too.
    """

    def __init__(self, hung_after_s: float) -> None:
        self._hung_after_s = hung_after_s
        self._lock = threading.Lock()
        self._socket: Any = None
        self._is_mid_frame = False
        """Whether the loop has written a part of its data, or has to repeat a write: a heartbeat in between would
        corrupt the stream."""
        self._rest = b""
        """The part of a heartbeat that the socket has not accepted yet; it has to be sent before anything else."""
        self._written_at = self._loop_wrote_at = time.monotonic()
        self._ended = threading.Event()

    def guard(self, transport: Any) -> None:
        """Replace the write function of a transport, so that the loop and the thread never write at the same time."""
        self._socket = transport._sock
        transport._sigint_safe_send = self._send
        if isinstance(self._socket, ssl.SSLSocket):
            # OpenSSL allows only one call at a time on a connection; a plain socket can be read while it is written.
            transport._sigint_safe_recv = self._receive

    def start(self, heartbeat_s: float) -> None:
        if heartbeat_s > 0:
            name = "keywise RabbitMQ heartbeat"
            threading.Thread(target=self._beat, args=(heartbeat_s,), name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop writing; the caller may close the socket after this."""
        with self._lock:
            self._ended.set()

    def _beat(self, heartbeat_s: float) -> None:
        while not self._ended.wait(heartbeat_s / CHECKS_PER_INTERVAL):
            now = time.monotonic()
            if now - self._loop_wrote_at > self._hung_after_s + heartbeat_s:
                continue
            with self._lock:
                if now - self._written_at >= heartbeat_s / 2 and not (self._is_mid_frame or self._ended.is_set()):
                    self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        self._rest = self._rest or FRAME
        try:
            self._send_rest()
        except WOULD_BLOCK:
            if not isinstance(self._socket, ssl.SSLSocket) and self._rest == FRAME:
                self._rest = b""  # Nothing of it was written. Only OpenSSL requires that a failed write is repeated.
        except OSError:
            # The loop meets the same error at its next read or write, and handles it.
            self._rest = b""

    def _send(self, sock: Any, data: bytes) -> int:
        """Write for the event loop, as the transport's own function would, after the rest of a heartbeat."""
        with self._lock:
            self._loop_wrote_at = time.monotonic()
            self._is_mid_frame = True
            self._send_rest()
            sent: int = sock.send(data)
            self._is_mid_frame = sent < len(data)
            self._written_at = self._loop_wrote_at
            return sent

    def _send_rest(self) -> None:
        while self._rest:
            self._rest = self._rest[self._socket.send(self._rest) :]
            self._written_at = time.monotonic()

    def _receive(self, sock: Any, size: int) -> bytes:
        with self._lock:
            received: bytes = sock.recv(size)
            return received
