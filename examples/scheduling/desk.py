"""The desk: accept a care request if it is feasible, one at a time per market and day.

`keywise serial status`, `history` and the others work on it too: `--app examples/scheduling/desk.py:app`.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.scheduling import schedule
from examples.scheduling.care import CareRequest, Decision, clock_of, market_and_day, place_for, refusal

import keywise
from keywise import Claim, Transaction

FOLDER = Path(__file__).parents[2] / "build" / "scheduling"
STORE_VARIABLE, TURNS_VARIABLE = "SCHEDULING_STORE", "SCHEDULING_TURNS"
THINK_S = 0.003
"""As long as it takes to ask for the way from one patient to the next."""


def file_in(folder: Path) -> str:
    """The URL of the SQLite file that stands in for Postgres."""
    return f"sqlite:///{quote(str(folder.resolve() / 'scheduling.db'))}"


def store_url() -> str:
    """The URL of the schedule, as the environment says."""
    return os.environ.get(STORE_VARIABLE) or file_in(FOLDER)


async def decide(connection: Any, request: CareRequest) -> Decision:
    """Read the schedule, think, and write: right only if nobody else does so for this market and day meanwhile."""
    visits = await schedule.visits_of(connection, request.market, request.day)
    await asyncio.sleep(THINK_S)
    visit = place_for(request, visits)
    if visit is None:
        return Decision(accepted=False, reason=refusal(request, visits))
    await schedule.add(connection, visit)
    return Decision(accepted=True, car=visit.car, starts=clock_of(visit.starts))


def desk_at(store: str, turns: str = "") -> keywise.App:
    """The app with its one serial function; nothing is opened yet."""
    app = keywise.App(store)

    @app.serial("accept", key=market_and_day, timeout="20s", turns=turns, run_here=True)
    async def accept_if_feasible(claim: Claim, request: CareRequest, transaction: Transaction) -> Decision:
        """The visit and the answer are stored in one transaction: both are there, or neither."""
        return await decide(transaction.connection, request)

    return app


app = desk_at(store_url(), os.environ.get(TURNS_VARIABLE, ""))
