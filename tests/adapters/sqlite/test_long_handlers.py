"""A handler that writes in a transaction of a SQLite file may run for longer than its lease."""

import asyncio
from collections import Counter
from pathlib import Path

import keywise
from keywise.core import events
from running import run, scaled

LEASE_S = 1.0
LOOK_S = 0.02


def test_a_handler_that_outlasts_its_lease_is_committed_once(tmp_path: Path):
    """Nobody can write to the file while its transaction is open: neither renew the claim, nor take it over."""
    seen: list[events.Event] = []
    calls: Counter[str] = Counter()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        app = keywise.App(f"sqlite:///{tmp_path}/shop.db", observers=[seen.append])
        pipeline = app.pipeline("shop", key="key", version="v", lease=LEASE_S, margin="200ms", attempts_max=1)
        pipeline.source(f"sqlite:///{tmp_path}/queue.db?visibility=60s")

        @pipeline.apply
        async def handle(change: keywise.Change[dict], transaction: keywise.Transaction) -> None:
            calls[change.key] += 1
            await asyncio.wait([loop.create_future()], timeout=2 * LEASE_S)
            transaction.connection.execute("create table if not exists done (key text)")
            transaction.connection.execute("insert into done values (?)", (change.key,))

        async with app:
            await app.send("shop", {"key": "a", "v": 1})
            running = asyncio.create_task(app.run(handle_signals=False))
            async with asyncio.timeout(scaled(20)):
                while not any(isinstance(event, events.Settled) for event in seen):
                    await asyncio.wait([loop.create_future()], timeout=LOOK_S)
            app.stop()
            await running

    run(main(), limit_s=60)
    unexpected = [one for one in seen if isinstance(one, events.Failed | events.DeadLettered | events.TookOver)]
    assert (calls["a"], unexpected) == (1, [])
