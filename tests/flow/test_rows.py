"""Rows of a reindex in a pipeline, each way of a batch: what was removed stays removed, and live changes go on."""

import json
from collections.abc import Sequence
from typing import Any

from flow.degraded.outage_rig import Outage
from flow.rig import LEASED, Rig, Running
from flow.test_consumer import every_way, page
from flow.tickets import endings, ticket
from keywise.core import events
from keywise.core.change import Change, Delivery, Outcome
from keywise.flow.coalesce import coalesce
from keywise.flow.intake import Intake, ReadBatch
from keywise.flow.lanes import Lanes, Ticket


class RowReader:
    """Reads a message with a generation as a row of a reindex."""

    def __init__(self, reader: Intake) -> None:
        self._reader = reader

    def read(self, deliveries: Sequence[Delivery], source: int, now: float) -> ReadBatch:
        read_batch = self._reader.read(deliveries, source, now)
        for one in read_batch.tickets:
            if generation := json.loads(one.change.body).get("g"):
                one.change.order = (*one.change.order[:2], generation)
                one.change.is_row = True
        return read_batch

    def read_one(self, body: bytes, delivery: Delivery | None = None) -> Change[Any]:
        return self._reader.read_one(body, delivery)


def rig_of(way: str) -> Rig:
    rig = Rig(way)
    rig.reader = RowReader(rig.reader)
    return rig


def row_ticket(version: int, generation: int) -> Ticket:
    one = ticket("a", version, number=1000 * version + generation)
    one.change.order, one.change.is_row = (0, version, generation), True
    return one


@every_way
def test_a_row_of_a_removed_key_ends_as_removed(way):
    rig = rig_of(way)
    rig.run(page("a", 5, gone=True))
    rig.run(page("a", 5, g=1), page("b", 2, g=1))
    assert (rig.stored, rig.letters) == ({"b": 2}, [])
    assert rig.outcomes == {"applied": 2, "removed": 1}
    assert rig.entry("a").mark == (0, 5, 0) and rig.entry("b").mark == (0, 2, 1)
    [settled] = [event for event in rig.of(events.Settled) if event.outcome is Outcome.REMOVED]
    assert [header.key for header in settled.headers] == ["a"]


@every_way
def test_live_changes_beside_a_removed_row_end_by_themselves(way):
    rig = rig_of(way)
    rig.run(page("a", 5, gone=True))
    rig.run(page("a", 5), page("a", 5, g=1), page("a", 4), page("a", 5, g=2), page("a", 5, g=1))
    assert (rig.stored, rig.letters) == ({}, [])
    assert rig.outcomes == {"applied": 1, "removed": 3, "duplicate": 1, "stale": 1}


@every_way
def test_a_newer_live_change_is_written_before_or_behind_a_removed_row(way):
    for newer_first in (True, False):
        rig = rig_of(way)
        rig.run(page("a", 5, gone=True))
        bodies = [page("a", 6), page("a", 5, g=1)]
        rig.run(*(bodies if newer_first else reversed(bodies)))
        assert (rig.stored, rig.letters) == ({"a": 6}, [])
        assert rig.entry("a").mark == (0, 6, 0)
        assert rig.outcomes["applied"] == 2


def test_followers_of_a_removed_row_are_ended_only_up_to_the_mark():
    """In a lane: what is above the mark is decided by itself."""
    lanes = Lanes(10)
    lanes.add([ticket("a", 5), ticket("a", 4), row_ticket(5, 2), row_ticket(5, 3)])
    [newest] = lanes.take(10, 0.0)
    settled = lanes.finish(newest, Outcome.REMOVED, (0, 5, 0))
    assert endings(settled) == [("a", 5, "removed"), ("a", 5, "duplicate"), ("a", 4, "stale")]
    [other] = lanes.take(10, 0.0)
    assert other.change.order == (0, 5, 2)


def test_a_row_follows_a_newer_live_change_and_survives_a_live_change_of_its_version():
    coalesced = coalesce([row_ticket(5, 2), ticket("a", 6)])
    assert [one.change.order for one in coalesced.survivors] == [(0, 6, 0)]
    assert coalesced.followed(()) == {Outcome.SUPERSEDED: coalesced.followers["a"]}
    coalesced = coalesce([ticket("a", 5), row_ticket(5, 2)])
    assert [one.change.order for one in coalesced.survivors] == [(0, 5, 2)]


def test_a_row_waits_for_the_ledger_and_a_newer_live_change_does_not():
    """Only the ledger knows what was removed, so degraded mode writes no rows."""
    outage = Outage(way=LEASED)
    rig = outage.rig
    rig.reader = RowReader(rig.reader)

    async def story() -> None:
        async with Running(rig):
            await rig.send(page("a", 5, gone=True))
            await rig.until(lambda: not rig.queue)
            await outage.goes_down()
            await rig.send(page("a", 5, g=1), page("b", 1), page("c", 2, g=1))
            await rig.until(lambda: ("b", 1) in rig.written)
            await rig.send(page("c", 3))
            await rig.until(lambda: ("c", 3) in rig.written)
            await rig.pass_s(100.0)
            assert rig.stored == {"b": 1, "c": 3}
            outage.truth |= {key: json.dumps(page(key, version)).encode() for key, version in (("b", 1), ("c", 3))}
            outage.comes_back()
            await rig.until(lambda: not rig.queue and not outage.suspicions("b") and not outage.suspicions("c"))

    rig.play(story())
    assert (rig.stored, rig.letters) == ({"b": 1, "c": 3}, [])
    assert rig.outcomes["removed"] == 1
