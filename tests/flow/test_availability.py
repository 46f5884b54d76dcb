"""A sink, source or ledger that is away is reported once when it goes, and once when it is back, with a count."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from flow.leased.test_sink_unavailable import AWAY_S, AwayStore
from flow.rig import LEASED, LEDGER_TRANSACTION, QUEUE_TRANSACTION, Rig, Running, Store
from flow.test_consumer import page
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Change, Delivery, Outcome
from keywise.core.entry import Claim
from keywise.core.errors import UnavailableError
from keywise.core.events import Available, LedgerBack, Unavailable
from keywise.core.sink import Grade, SinkResult
from keywise.flow.availability import QUIET_S, Availability
from keywise.observe.log import Log


class Lines:
    """The lines about availability in a log, each with its level."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="keywise")
        self._caplog = caplog

    def of(self, what: str) -> list[tuple[str, int]]:
        records = [record for record in self._caplog.records if record.event in ("unavailable", "available")]
        return [(record.event, record.levelno) for record in records if record.what == what]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(caplog)


ONCE = [("unavailable", logging.WARNING), ("available", logging.INFO)]


def observed(rig: Rig) -> Rig:
    rig.more["observers"] = [rig.events.append, rig.figures, Log()]
    return rig


async def until_back(rig: Rig, *sent: dict[str, Any]) -> None:
    await rig.send(*sent)
    async with Running(rig):
        await rig.until(lambda: rig.of(Available), AWAY_S + 60.0)
        await rig.until(lambda: not rig.queue)


def test_a_sink_that_is_away_has_two_lines_in_the_log(lines):
    rig = observed(Rig(concurrency=4))
    rig.sink = AwayStore(Grade.PLAIN, rig.loop.time)
    rig.play(until_back(rig, *(page(f"k{number}", 1) for number in range(20))))
    assert lines.of("sink") == ONCE
    [back] = rig.of(Available)
    refused = rig.of(Unavailable)
    assert back.calls == len(refused) == len(rig.sink.calls) - 20 > 20, "the observers of events still see each call"
    assert [event.calls for event in refused] == list(range(1, len(refused) + 1))
    assert AWAY_S - 1 <= back.seconds <= AWAY_S + 10


class FlappingStore(Store):
    """A store that refuses every second call for a while."""

    batch_max = 1

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        if self._clock() < 30.0 and len(self.calls) % 2 == 0:
            self.calls.append(len(changes))
            return [SinkResult(Outcome.BUSY, "429")] * len(changes)
        return await super().apply(changes, claims)


def test_a_sink_that_refuses_some_calls_and_takes_others_is_not_reported_back_and_forth(lines):
    rig = observed(Rig(concurrency=1, backoff_s=0.2, backoff_max_s=0.2))
    rig.sink = FlappingStore(Grade.PLAIN, rig.loop.time)

    async def story() -> None:
        async with Running(rig):
            version = 0
            while rig.loop.time() < 30.0:
                version += 1
                await rig.send(page("a", version))
                await rig.pass_s(0.3)
            await rig.until(lambda: rig.of(Available), 60.0)

    rig.play(story())
    assert len(rig.of(Unavailable)) > 10
    assert lines.of("sink") == ONCE


class AwayQueue(MemorySource):
    """A queue that cannot be reached until a moment."""

    back_at = 60.0

    async def receive(self, limit: int, wait_s: float) -> Sequence[Delivery]:
        self._check()
        return await super().receive(limit, wait_s)

    async def arrived(self, wait_s: float) -> bool:
        self._check()
        return await super().arrived(wait_s)

    def _check(self) -> None:
        if self.database.clock() < self.back_at:
            raise UnavailableError("no route to the queue")


@pytest.mark.parametrize(
    ("way", "what"), [(LEASED, "queue"), (LEDGER_TRANSACTION, "queue"), (QUEUE_TRANSACTION, "database")]
)
def test_a_source_that_is_away_has_two_lines_in_the_log(lines, way, what):
    rig = observed(Rig(way, backoff_s=0.2, backoff_max_s=1.0))
    rig.source = AwayQueue(rig.source.database, "queue", visibility_s=60.0)
    rig.play(until_back(rig, page("a", 1)))
    assert lines.of(what) == ONCE
    assert rig.of(Available)[0].calls > 20


class AwayLedger(MemoryLedger):
    """A ledger whose claims are not answered until a moment."""

    back_at = 3.0

    async def claim(self, headers: Any, terms: Any) -> Any:
        if self.database.clock() < self.back_at:
            raise UnavailableError("no route to the ledger")
        return await super().claim(headers, terms)


def test_a_ledger_that_is_away_for_less_than_its_grace_has_two_lines(lines):
    rig = observed(Rig(ledger_grace_s=10.0, backoff_s=0.1))
    rig.ledger = AwayLedger(rig.database, "test", rig.policy)
    rig.play(until_back(rig, page("a", 1)))
    assert lines.of("ledger") == ONCE
    assert rig.of(LedgerBack) == []


def test_an_outage_of_the_ledger_ends_with_one_line():
    rig = Rig(ledger_grace_s=1.0, backoff_s=0.1)
    rig.ledger = AwayLedger(rig.database, "test", rig.policy)

    async def story() -> None:
        await rig.send(page("a", 1))
        async with Running(rig):
            await rig.until(lambda: rig.of(LedgerBack))
            await rig.pass_s(2 * QUIET_S + 2.0)

    rig.play(story())
    assert rig.of(Available) == [], "LedgerBack has said it"


def test_what_answers_again_is_back_after_a_while_without_a_failure():
    availability = Availability()
    assert [availability.failed("sink", 10.0), availability.failed("sink", 11.0)] == [1, 2]
    availability.answered("sink", 12.0)
    assert availability.restored(12.0 + QUIET_S - 0.1) == []
    assert availability.failed("sink", 13.0) == 3
    availability.answered("sink", 14.0)
    availability.answered("sink", 15.0)
    [back] = availability.restored(14.0 + QUIET_S)
    assert (back.what, back.seconds, back.calls) == ("sink", 4.0, 3)
    assert availability.restored(100.0) == []
    assert availability.failed("sink", 200.0) == 1


def test_what_never_failed_is_never_back():
    availability = Availability()
    availability.answered("sink", 1.0)
    assert availability.restored(100.0) == []
