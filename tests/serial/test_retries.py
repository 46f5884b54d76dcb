"""What did not run is asked for again while there is time; what may have happened is not, and never without end."""

import asyncio

import pytest

from keywise import Claim, Transaction
from keywise.adapters.memory.database import MemoryDatabase
from keywise.core.errors import ExpiredError, LostError, OutcomeUnknownError
from keywise.core.serial.contract import Ending
from keywise.serial.pending import AGAIN_MAX
from running import awaited
from serial.faulty_store import serial, until


@awaited
async def test_an_unknown_outcome_in_a_transaction_is_lost_and_not_tried_again():
    """The transaction is undone, and what was done outside is not."""
    runs = []

    async def charge(claim: Claim, request: dict, transaction: Transaction) -> int:
        runs.append(request["k"])
        transaction.connection.set(transaction.connection.table("rows"), request["k"], True)
        if request["k"] != "a":
            return 1
        raise OutcomeUnknownError("the card may have been charged")

    f = serial(charge)
    answers = await asyncio.gather(*(f({"k": key}, id=key) for key in "bac"), return_exceptions=True)
    assert isinstance(answers[1], LostError) and [answers[0], answers[2]] == [1, 1]
    with pytest.raises(LostError, match="the card may have been charged"):
        await f({"k": "a"}, id="a")
    assert sorted(runs) == ["a", "b", "c"]
    assert set(f._turns.database.table("rows")) == {"b", "c"}
    await f.close()


@awaited
async def test_what_is_broken_off_at_its_deadline_in_a_transaction_is_not_asked_for_again():
    runs = []

    async def hang(claim: Claim, request: dict, transaction: Transaction) -> None:
        runs.append(request)
        await asyncio.Event().wait()

    f = serial(hang)
    with pytest.raises(ExpiredError, match=r"deadline.*nothing of it happened"):
        await f({"k": "a"}, timeout="500ms")
    assert len(runs) == 1 and len(await f._turns.operator.history("a", 100)) == 1
    await f.close()


@awaited
async def test_what_others_let_expire_is_asked_for_again_with_pauses_and_not_for_ever():
    database, begun, go_on = MemoryDatabase(), [], asyncio.Event()

    async def waiting(claim: Claim, request: dict) -> int:
        begun.append(request)
        await go_on.wait()
        return 1

    async def take_out(name, arguments):
        # As somebody in another process does who has joined, and gives up.
        if name == "answer" and any(request.id == "x" for request in arguments[3]):
            asked.append(asyncio.get_running_loop().time())
            await g._turns.withdraw(["x"], Ending.EXPIRED, "its caller gave up")

    asked: list[float] = []
    f, g = serial(waiting, database), serial(waiting, database)
    holder = asyncio.ensure_future(g({"k": "a"}))
    await until(lambda: begun)
    assert await f._opened()
    f._turns.after = take_out
    with pytest.raises(ExpiredError):
        await f({"k": "a"}, id="x", timeout="60s")
    assert len(asked) == AGAIN_MAX + 1
    assert asked[-1] - asked[0] > 0.5
    go_on.set()
    await holder
    await f.close()
    await g.close()


@awaited
async def test_an_unknown_outcome_stays_so_though_its_turn_was_lost_in_the_middle():
    """What is broken off is asked for again if nothing of it happened; of this one nobody knows."""
    runs = []

    async def charge(claim: Claim, request: dict, transaction: Transaction) -> int:
        runs.append(request)
        f._merge._held.lose([claim.token])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OutcomeUnknownError("the card may have been charged") from None
        return 1

    f = serial(charge)
    with pytest.raises(LostError, match="the card may have been charged"):
        await f({"k": "a"})
    assert len(runs) == 1
    await f.close()
