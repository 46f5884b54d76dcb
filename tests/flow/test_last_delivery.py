"""A change that its source cannot deliver again becomes a dead letter before anything can interrupt it."""

import pytest

from flow.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, LEDGER_TRANSACTION, Rig
from flow.unreachable_adapters import Unreachable
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Delivery
from keywise.core.events import DeadLettered

WAYS = [LEDGER_TRANSACTION, CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL]


class RedrivenSource(MemorySource):
    """A queue that hands a message over three times at the most."""

    def last_delivery(self, delivery: Delivery) -> str:
        return "delivered too often" if delivery.count >= 3 else ""


def worn(way: str) -> Rig:
    rig = Rig(way)
    rig.source = RedrivenSource(rig.source.database, "queue", visibility_s=60.0)
    return rig


async def give_back(rig: Rig, times: int) -> None:
    for _ in range(times):
        await rig.source.release(await rig.source.receive(10, 0.0), 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_the_last_delivery_is_a_dead_letter_with_its_key_and_is_not_processed(way: str):
    rig = worn(way)

    async def story() -> None:
        await rig.send({"id": "worn", "v": 2}, b"no json")
        await give_back(rig, 2)
        await rig.work({"id": "fresh", "v": 1})

    rig.play(story())
    assert rig.stored == {"fresh": 1}
    letters = {letter.key: letter for letter in rig.letters}
    assert (letters["worn"].version, letters["worn"].cause) == (2, "delivered too often")
    assert letters["worn"].body == b'{"id": "worn", "v": 2}'
    assert "malformed" in letters[""].cause, "a body that cannot be read keeps its own cause"
    assert rig.outcomes == {"applied": 1, "dead": 2}
    assert {(event.key, event.version) for event in rig.of(DeadLettered)} == {("worn", 2), ("", None)}


def test_an_earlier_delivery_is_processed():
    rig = worn(LEASED)

    async def story() -> None:
        await rig.send({"id": "a", "v": 1})
        await give_back(rig, 1)
        await rig.work()

    rig.play(story())
    assert (rig.stored, rig.letters) == ({"a": 1}, [])


@pytest.mark.parametrize("call", ["dead_letter", "after_dead_letter"])
def test_the_dead_letter_is_stored_once_though_the_ledger_was_away(call: str):
    rig = worn(LEASED)
    ledger = rig.more["ledger"] = Unreachable(rig.ledger, **{call: 3})

    async def story() -> None:
        await rig.send({"id": "worn", "v": 2})
        await give_back(rig, 2)
        await rig.work()

    rig.play(story())
    assert [letter.key for letter in rig.letters] == ["worn"]
    assert ledger.failures[call] == 0
