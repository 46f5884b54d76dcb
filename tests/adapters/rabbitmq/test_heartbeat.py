"""A broker notices a dead or hung worker within its lease, and one with a blocked event loop keeps its messages."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pika.spec import Connection

import keywise
from adapters.rabbitmq.benches import fresh
from adapters.rabbitmq.queue_owner import bodies_of, owner
from adapters.rabbitmq.recording_proxy import listener
from adapters.rabbitmq.waiting import left_in, opened, received, until
from chaos.fleet import pause
from keywise.adapters.rabbitmq.broker import Broker
from keywise.adapters.rabbitmq.heartbeat import FRAME, BrokerHeartbeat
from keywise.adapters.rabbitmq.source import RabbitSource
from running import awaited, run
from servers import shared

pytestmark = pytest.mark.server("rabbitmq")

LEASES = {"30s": 10, "9s": 3, "4s": 2}
"""The longest interval of heartbeats for each lease."""
BEAT = (("heartbeat", "1s"),)
BLOCKED_S = 5.0
"""Longer than a broker waits for a client that beats once a second."""


@pytest.mark.parametrize("lease", LEASES)
def test_the_heartbeat_follows_the_lease(lease: str, tmp_path: Path):
    async def story() -> None:
        async with owner(shared.rabbitmq().url) as they, listener(shared.rabbitmq().port) as between:
            queue = await they.declare(fresh("beat"))
            for asked in ("", "&heartbeat=1h", "&heartbeat=1s"):
                app = keywise.App("memory://")
                url = f"amqp://guest:guest@127.0.0.1:{between.port}/%2F?queue={queue}{asked}"
                app.pipeline("pages", key="key", lease=lease, margin="100ms").source(url).sink("memory://")
                async with app.open("pages") as pipeline:
                    [(_, source)] = pipeline.sources
                    await source.send([b"a publisher connects too"])
            agreed = [one.heartbeat for one in between.said(Connection.TuneOk)]
        assert agreed == [LEASES[lease]] * 4 + [1, 1]

    run(story())


@awaited
async def test_what_a_hung_worker_holds_comes_again_within_its_lease():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("hung"))
        await they.publish(queue, b"one", b"two")
    program = textwrap.dedent(f"""
        import asyncio
        from keywise.adapters.rabbitmq.broker import Broker
        from keywise.adapters.rabbitmq.source import RabbitSource

        async def main():
            source = RabbitSource(Broker({shared.rabbitmq().url!r}), {queue!r})
            source.follow_lease(6.0, 600.0)
            async with source:
                held = []
                while len(held) < 2:
                    held += await source.receive(2, 5.0)
                print("held", flush=True)
                await asyncio.get_running_loop().create_future()

        asyncio.run(main())
    """)
    worker = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    with worker.stdout:
        assert await asyncio.to_thread(worker.stdout.readline) == b"held\n"
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            async with opened(queue) as source:
                assert bodies_of(await received(source, 2)) == [b"one", b"two"]
        finally:
            worker.kill()
            worker.wait()


@awaited
async def test_a_blocked_event_loop_does_not_cost_the_connection():
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("blocked"))
        await they.publish(queue, b"one", b"two")
    source = RabbitSource(Broker(shared.rabbitmq().url, BEAT), queue)
    source.follow_lease(30.0, 600.0)
    async with source:
        held = await received(source, 2)
        pause(BLOCKED_S)
        await source.ack(held)
        await until(lambda: left_in(queue, 0))
        await source.send([b"three"])
        [again] = await source.receive(1, 5.0)
        assert (again.body, again.count) == (b"three", 1)


@awaited
async def test_a_loop_that_is_blocked_for_too_long_counts_as_hung():
    """Its heartbeats end with the longest time that a handler may take, so others get its messages."""
    async with owner(shared.rabbitmq().url) as they:
        queue = await they.declare(fresh("stuck"))
        await they.publish(queue, b"one")
    is_held, is_over = threading.Event(), threading.Event()

    async def hang() -> None:
        source = RabbitSource(Broker(shared.rabbitmq().url, BEAT), queue)
        source.follow_lease(30.0, 1.0)
        async with source:
            await received(source, 1)
            is_held.set()
            is_over.wait()

    hanging = asyncio.create_task(asyncio.to_thread(asyncio.run, hang()))
    await asyncio.to_thread(is_held.wait)
    try:
        async with opened(queue) as source:
            assert bodies_of(await received(source, 1)) == [b"one"]
    finally:
        is_over.set()
        await hanging


class Socket:
    """Takes so many bytes of each write, or none."""

    def __init__(self) -> None:
        self.written = b""
        self.takes: list[int] = []

    def send(self, data: bytes) -> int:
        taken = self.takes.pop(0) if self.takes else len(data)
        if not taken:
            raise BlockingIOError
        self.written += data[:taken]
        return min(taken, len(data))


class Transport:
    def __init__(self, socket: object) -> None:
        self._sock = socket
        self._sigint_safe_send: Callable[[object, bytes], int]


def guarded() -> tuple[BrokerHeartbeat, Socket, Transport]:
    thread, socket = BrokerHeartbeat(600.0), Socket()
    transport = Transport(socket)
    thread.guard(transport)
    return thread, socket, transport


def test_heartbeats_go_on_when_a_loop_that_counted_as_hung_goes_on():
    """Its connection may be there still, and its next handler may block too."""
    thread, socket, _ = guarded()
    looks = 0

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            """Before each look of the thread, as much time passes as a heartbeat needs."""
            nonlocal looks
            looks += 1
            now = time.monotonic()
            thread._written_at = now - 1.0
            thread._loop_wrote_at = now - (6_000.0 if looks == 1 else 0.5)
            return looks == 3

    thread._ended = Ended()
    thread._beat(1.0)
    assert (looks, socket.written) == (3, FRAME)


def test_a_heartbeat_never_comes_between_two_parts_of_a_frame():
    thread, socket, transport = guarded()
    socket.takes = [3]
    assert transport._sigint_safe_send(socket, b"abcdef") == 3
    assert thread._is_mid_frame
    assert transport._sigint_safe_send(socket, b"def") == 3
    assert not thread._is_mid_frame
    socket.takes = [5, 0]
    thread._write_heartbeat()
    assert socket.written == b"abcdef" + FRAME[:5]
    transport._sigint_safe_send(socket, b"ghi")
    assert socket.written == b"abcdef" + FRAME + b"ghi"


def test_a_heartbeat_that_finds_no_room_is_left_out():
    thread, socket, transport = guarded()
    socket.takes = [0]
    thread._write_heartbeat()
    socket.takes = [0]
    with pytest.raises(BlockingIOError):
        transport._sigint_safe_send(socket, b"abc")
    assert thread._is_mid_frame, "OpenSSL wants the same bytes again"
    transport._sigint_safe_send(socket, b"abc")
    assert socket.written == b"abc"
