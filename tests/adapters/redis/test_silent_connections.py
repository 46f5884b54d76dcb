"""Connections to a ledger in Redis over which nothing comes any more cost no claim and no attempt."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

import keywise
from keywise.core import events
from running import run, scaled
from servers import shared
from servers.fault_proxy import fault_proxy_thread

pytestmark = [pytest.mark.server("redis"), pytest.mark.timeout(240)]

LEASE_S = 9.0
LOOK_S = 0.02


def test_renewals_and_commits_find_a_connection_that_is_not_silent(tmp_path: Path):
    """The handler outlasts its first lease, and every connection of the ledger goes silent meanwhile."""
    seen: list[events.Event] = []
    calls: Counter[str] = Counter()
    may_end = asyncio.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def until(condition) -> None:
            async with asyncio.timeout(scaled(30)):
                while not condition():
                    await asyncio.wait([loop.create_future()], timeout=LOOK_S)

        with fault_proxy_thread(shared.redis().port) as proxy:
            app = keywise.App(f"redis://127.0.0.1:{proxy.port}/0", observers=[seen.append])
            pipeline = app.pipeline("silent", key="key", version="v", lease=LEASE_S, margin="1s", poll="20ms")
            pipeline.source(f"sqlite:///{tmp_path}/queue.db")

            @pipeline.apply
            async def handle(change: keywise.Change[dict]) -> None:
                calls[change.key] += 1
                await may_end.wait()

            async with app:
                await app.send("silent", {"key": "a", "v": 1})
                running = asyncio.create_task(app.run(handle_signals=False))
                await until(lambda: calls["a"])
                proxy.silence()
                silent_at = loop.time()
                await until(lambda: loop.time() > silent_at + LEASE_S or calls["a"] > 1)
                assert (calls["a"], kinds(seen, events.ClaimLost)) == (1, [])
                proxy.silence()
                may_end.set()
                await until(lambda: kinds(seen, events.Settled))
                assert (calls["a"], kinds(seen, events.Failed)) == (1, [])
                app.stop()
                await running

    run(main(), limit_s=120)


def kinds(seen: list[events.Event], kind: type[events.Event]) -> list[events.Event]:
    return [event for event in seen if isinstance(event, kind)]
