"""A thousand calls of one process at once, on a merge queue in memory."""

import asyncio
import itertools
import json
from collections import Counter

import keywise
from keywise import Claim
from keywise.core.clock import boot_time
from running import awaited

CALLS, KEYS, CAPACITY, SHARED = 1000, 20, 30, 10


@awaited
async def test_a_thousand_calls_on_twenty_keys_run_one_at_a_time():
    """No overlap on a key, first come first served, every answer is stored, capacity is kept, an id runs once."""
    async with keywise.App("memory://", observers=[]) as app:
        runs: list[tuple[str, str, float, float]] = []
        taken = Counter[str]()

        @app.serial("accept", key=lambda request: request["key"], timeout="60s")
        async def accept(claim: Claim, request: dict) -> dict:
            began, before = boot_time(), taken[claim.key]
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])
            is_feasible = before < CAPACITY
            taken[claim.key] = before + is_feasible
            runs.append((claim.key, request["id"], began, boot_time()))
            return {"accepted": is_feasible, "before": before}

        # Every tenth is asked for twice, with the same id.
        ids = [str(number - 1) if number % SHARED == 1 else str(number) for number in range(CALLS)]
        asked = [{"id": id, "key": f"k{int(id) % KEYS}"} for id in ids]
        answers = await asyncio.gather(*(accept(one, id=one["id"]) for one in asked))
        records = await accept._turns.operator.history(None, 10 * CALLS)

    told = dict(zip(ids, answers, strict=True))
    assert all(told[id] == answer for id, answer in zip(ids, answers, strict=True)), "one id had two answers"
    assert told == {one.request.id: json.loads(one.reply.body) for one in records}
    assert Counter(id for _, id, _, _ in runs) == Counter(list(told)), "an id ran twice, or never"
    places = {one.request.id: one.place for one in records}
    for _, of_key in itertools.groupby(sorted(runs, key=lambda run: (run[0], run[2])), lambda run: run[0]):
        line = list(of_key)
        assert all(before[3] <= after[2] for before, after in itertools.pairwise(line)), "two ran at once"
        assert [places[id] for _, id, _, _ in line] == sorted(places[id] for _, id, _, _ in line)
    assert max(taken.values()) == CAPACITY
    accepted = Counter(f"k{int(id) % KEYS}" for id, answer in told.items() if answer["accepted"])
    assert accepted == taken
