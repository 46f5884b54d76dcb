"""No step of turns on Postgres reads a whole table, however many requests are kept, and however many come at once."""

import re

import pytest

from adapters.postgres.test_plans import EXPLAINED
from keywise.adapters.postgres import database as postgres
from keywise.adapters.postgres.database import PostgresDatabase
from keywise.adapters.postgres.serial.queue_backend import PostgresQueueTurns
from keywise.core.serial.contract import TurnPolicy
from keywise.testing.conformance.serial.ordering import asked, done
from running import run
from servers import shared

pytestmark = pytest.mark.server("postgres")

CROWD = 50_000
BATCHES = (1, 10, 300)
SCAN = re.compile(r"Seq Scan on (keywise_turn_\w+)")
SMALL = {"keywise_turn_owners", "keywise_turn_switches"}
"""One row for each process, or switch."""


async def crowd(turns: PostgresQueueTurns) -> None:
    """Requests that have ended, and that wait or run in other functions."""
    of_other = turns._tables.number + 1
    columns = "place, asked_at, deadline, wait_s, mode, caller, runner, asked_by, function, key, id, body"
    values = (
        "n, 0, 1e12, 1, 'on', '', '', '', {function}, convert_to('k' || n % 1000, 'UTF8'), "
        "convert_to('r' || n, 'UTF8'), ''"
    )
    series = f"generate_series(1, {CROWD}) as n"
    work = values.format(function=of_other)
    completed = values.format(function=turns._tables.number)
    for statement in (
        f"insert into keywise_turn_work ({columns}) select {work} from {series}",
        f"insert into keywise_turn_completed ({columns}, token, started_at, attempts, beside, atomic, owner, "
        f"ended_at, outcome, answer, cause, answer_token) select {completed}, 1, 0, 1, 0, false, '', 0, "
        f"'done', '', '', 1 from {series}",
        f"insert into keywise_turn_keys (function, key) select {of_other}, convert_to('k' || n, 'UTF8') from {series}",
        *(f"analyze keywise_turn_{table}" for table in ("work", "completed", "keys")),
    ):
        await turns.database.write(statement)


async def steps(turns: PostgresQueueTurns) -> None:
    for round in range(8):
        for batch in BATCHES:
            requests = [asked(f"{round}-{batch}-{n}", f"key {n % 50}") for n in range(batch)]
            run_of = await turns.answer([], batch, 5, requests)
            await turns.renew([turn.token for turn in run_of.turns])
            await turns.answer([done(turn) for turn in run_of.turns], 1, 1, [asked(f"{round}-{batch} again", "a")])
            await turns.replies([request.id for request in requests])
            await turns.give_back(await turns.take(3))
            await turns.withdraw([request.id for request in requests])
            await turns.ask(requests)


def test_no_step_scans_a_table(monkeypatch: pytest.MonkeyPatch):
    """With plans that the server is free to choose: else a statement that suits no index would not be noticed."""
    allowed = postgres._SESSION.replace("enable_seqscan = off", "enable_seqscan = on")
    assert allowed != postgres._SESSION
    monkeypatch.setattr(postgres, "_SESSION", allowed)
    nested = {**EXPLAINED, "auto_explain.log_nested_statements": "on"}
    url = shared.postgres().create_database("turn_plans", **nested)

    async def main() -> str:
        async with PostgresQueueTurns(PostgresDatabase(url), "function", "w1", TurnPolicy()) as turns:
            await crowd(turns)
            before = len(shared.postgres().log)
            await steps(turns)
            return shared.postgres().log[before:]

    plans = run(main(), limit_s=110).split("LOG:  duration:")[1:]
    assert len(plans) > 1000, "too few plans were seen to prove anything"
    scans = {plan[:600] for plan in plans for table in SCAN.findall(plan) if table not in SMALL}
    assert scans == set()
