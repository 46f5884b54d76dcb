"""Rows give way to live changes that wait for longer than without rows, but never stop."""

from pathlib import Path

import pytest

from keywise.cli.run_text import run_facts
from keywise.core.change import Outcome
from keywise.core.events import Settled
from keywise.core.origin import Shard
from keywise.reindex import row_governor, worker
from keywise.reindex.row_governor import (
    FACTOR,
    FLOOR_S,
    FRESH_S,
    LIVE_S,
    LOOK_S,
    REST_EVERY_S,
    REST_MAX_S,
    REST_S,
    SHARE_MIN,
    SHARE_STEP,
    UNUSUAL_S,
    RowGovernor,
    percentile_99,
    share_after,
)
from reindex.reindex_rig import Catalogue, Works, report_of, row
from running import run

BASE_S = 0.02
LONG_S = FACTOR * BASE_S + 2 * FLOOR_S


@pytest.mark.parametrize(
    ("share", "live_s", "base_s", "expected"),
    [
        (0.5, 0.03, 0.02, 0.55),
        (0.5, 0.033, 0.02, 0.55),
        (0.5, 0.034, 0.02, 0.25),
        (1.0, 0.03, 0.02, 1.0),
        (0.06, 0.1, 0.02, SHARE_MIN),
        (SHARE_MIN, 0.1, 0.02, SHARE_MIN),
        # A base of nothing still allows some milliseconds.
        (0.5, 0.003, 0.0, 0.55),
        (0.5, 0.004, 0.0, 0.25),
        # Without a base, live changes may wait for as long as a rest.
        (0.5, 1.9, None, 0.55),
        (0.5, 2.1, None, 0.25),
    ],
)
def test_the_share_rises_by_steps_and_is_halved(share: float, live_s: float, base_s: float | None, expected: float):
    assert share_after(share, live_s, base_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([], 0.0),
        ([(0.5, 1)], 0.5),
        ([(0.1, 98), (0.2, 1), (0.9, 1)], 0.2),
        ([(0.1, 98), (0.9, 2)], 0.9),
        ([(0.1, 9), (0.9, 1)], 0.9),
        # A few changes were retried, or snoozed.
        ([(0.1, 50), (UNUSUAL_S + 1, 40)], 0.1),
        # The live changes are behind.
        ([(0.1, 40), (UNUSUAL_S + 1, 50)], UNUSUAL_S + 1),
    ],
)
def test_the_longest_wait_of_a_hundred(waits: list[tuple[float, int]], expected: float):
    assert percentile_99(waits) == expected


class Governed:
    """A governor, and the clock by which it works. The clock begins between two rests."""

    def __init__(self, debounce_s: float = 0.0) -> None:
        self.now = 1000 * REST_EVERY_S + REST_S
        self.governor = RowGovernor(lambda: self.now, debounce_s)

    def live(self, wait_s: float, seconds: float, *, per_s: int = 10) -> None:
        """Let live changes be settled for some seconds, each after the same wait."""
        for _ in range(round(seconds * per_s)):
            self.now += 1 / per_s
            sent_at = self.now - wait_s
            self.governor(Settled(pipeline="shop", outcome=Outcome.APPLIED, changes=1, sent_at=sent_at))

    def until_rest(self) -> None:
        self.now += -self.now % REST_EVERY_S

    def share_after(self, wait_s: float, looks: int) -> float:
        """The share after so many looks at live changes with this wait."""
        for _ in range(looks):
            self.live(wait_s, LOOK_S + 0.1)
        return self.governor.share


def test_without_live_changes_rows_go_at_full_speed_and_take_no_rest():
    it = Governed()
    with it.governor.writing():
        it.until_rest()
        assert (it.governor.share, it.governor.pace, it.governor.rest_s(0.1)) == (1.0, None, 0.0)


def test_rows_begin_slowly_beside_live_changes_and_get_faster():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing():
        assert it.governor.share == SHARE_MIN
        assert it.share_after(BASE_S, 3) == pytest.approx(SHARE_MIN + 3 * SHARE_STEP)
        assert it.governor.rest_s(0.1) == pytest.approx(0.1 * (1 / it.governor.share - 1))
        # A rest of a slow page is limited.
        assert it.governor.rest_s(10.0) == REST_MAX_S


def test_rows_give_way_to_long_waits_but_never_stop():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing():
        before = it.share_after(BASE_S, 4)
        assert it.share_after(LONG_S, 1) == before / 2
        assert it.share_after(LONG_S, 3) == SHARE_MIN
        pace = it.governor.pace
        assert pace is not None
        assert (pace.share, pace.live_s, pace.base_s) == (SHARE_MIN, pytest.approx(LONG_S), pytest.approx(BASE_S))
        it.now += LIVE_S
        assert it.governor.share == 1.0, "no live change has come for a while"


def test_one_look_takes_a_hundred_changes_on_a_busy_pipeline():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing():
        it.live(BASE_S, LOOK_S / 2, per_s=400)
        assert it.governor.share == pytest.approx(SHARE_MIN + 4 * SHARE_STEP)


def test_all_processes_rest_at_the_same_time():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing():
        it.until_rest()
        it.live(BASE_S, 0.5)
        assert it.governor.rest_s(0.0) == pytest.approx(REST_S - 0.5)
        # A rest between two pages that would end in the middle of it ends with it.
        it.now -= 1.0
        assert it.governor.rest_s(1.0 / (1 / it.governor.share - 1)) == pytest.approx(REST_S + 0.5)


def test_the_base_follows_what_is_measured_in_rests():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing():
        assert it.share_after(LONG_S, 1) == SHARE_MIN
        it.until_rest()
        it.live(LONG_S, REST_S)
        assert it.share_after(LONG_S, 2) > SHARE_MIN, "live changes wait for as long without rows"


def test_a_base_is_not_measured_while_rows_are_in_hand():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing(), it.governor.page():
        it.until_rest()
        it.live(LONG_S, REST_S)
        assert it.share_after(LONG_S, 2) == SHARE_MIN


def test_the_last_moments_before_rows_belong_to_no_base():
    """Other processes have begun to write rows already."""
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    it.live(LONG_S, REST_S)
    with it.governor.writing():
        assert it.share_after(LONG_S, 2) == SHARE_MIN


def test_live_changes_that_are_behind_make_no_base_and_rows_give_way_to_them():
    """They were sent long before the process began, and those that are sent in a rest are not settled in it."""
    it = Governed()
    it.live(2 * REST_S, REST_S / 2)
    with it.governor.writing():
        assert it.governor.share == 1.0
        assert it.share_after(2 * REST_S, 2) == 0.25
        it.until_rest()
        it.live(2 * REST_S, REST_S)
        assert it.share_after(2 * REST_S, 8) == SHARE_MIN
        pace = it.governor.pace
        assert pace is not None
        assert pace.base_s is None
        # They catch up.
        it.until_rest()
        it.live(BASE_S, REST_S)
        assert it.share_after(BASE_S, 4) > SHARE_MIN


def test_a_process_that_joins_a_run_goes_at_full_speed_until_it_knows_better():
    it = Governed()
    with it.governor.writing():
        assert it.share_after(BASE_S, 2) == 1.0
        it.until_rest()
        it.live(BASE_S, REST_S)
        assert it.share_after(LONG_S, 1) == 0.5


def test_the_time_of_a_debounce_is_no_wait_for_rows():
    it = Governed(debounce_s=10.0)
    with it.governor.writing():
        assert it.share_after(10.0 + BASE_S, 3) == 1.0


def test_dead_letters_are_not_counted():
    it = Governed()
    with it.governor.writing():
        it.now += LOOK_S
        it.governor(Settled(pipeline="shop", outcome=Outcome.DEAD, changes=1, sent_at=it.now - 10 * REST_S))
        assert it.governor.share == 1.0


def test_the_next_stage_of_a_run_goes_on_at_the_same_pace():
    it = Governed()
    it.live(BASE_S, 2 * FRESH_S)
    with it.governor.writing():
        before = it.share_after(BASE_S, 3)
    with it.governor.writing():
        assert it.governor.share == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any wait of a live change is too long, and pages have a few rows."""
    monkeypatch.setattr(row_governor, "REST_S", 0.0)
    monkeypatch.setattr(row_governor, "LOOK_S", 0.0)
    monkeypatch.setattr(worker, "PAGE_ROWS", 8)
    monkeypatch.setattr(worker, "PAGE_ROWS_MIN", 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_live", [True, False])
def test_the_status_says_that_rows_give_way(tmp_path: Path, is_live: bool):
    """Rows are no live changes, so without those a run gives way to nothing."""
    origin = Catalogue(*(row(f"k{number:02d}", 1) for number in range(40)))
    works = Works(tmp_path, origin)

    async def story() -> None:
        await works.start()
        async with works.working() as working:

            async def before_scan(shard: Shard, after: str) -> None:
                if len(origin.scans) == 1 and is_live:
                    await works.app.send("shop", row("live", 1), row("other", 1))
                    await working.until_empty()
                if len(origin.scans) == 2:
                    report = await report_of(working.pipeline)
                    paces.append((report.pace, dict(run_facts("shop", report)).get("pace")))

            origin.before_scan = before_scan
            end = await working.until_ended()
        assert (end.rows_read, end.pace) == (40, None)

    paces: list[tuple[row_governor.Pace | None, str | None]] = []
    run(story(), limit_s=60)
    [(pace, text)] = paces
    sizes = [rows for _, _, rows in origin.scans[:3]]
    if is_live:
        assert pace is not None
        assert text is not None
        assert pace.share < 1.0
        assert text.startswith("rows give way to live changes, and go at ")
        assert text.endswith("without rows not known")
        assert sizes[:2] == [8, 8]
        assert sizes[2] < 8
    else:
        assert (pace, text, sizes) == (None, None, [8, 8, 8])
