"""Figures and stories tell what an operator has set, what limits a key, and what happened to it."""

from typing import Any

from msgspec.structs import replace

from keywise import App, Rate
from keywise.core.change import VERSION_MAX
from keywise.core.controls import EVERYTHING, Move, Pause
from keywise.core.entry import Entry
from keywise.core.history import HistoryRecord
from keywise.operate.inspect import ALARM_S, KeyReport, Limit, PipelineFigures, figures_of, key_report_of
from running import run

WALL = 1_700_000_000.0
NOW = 10_000.0
"""By the clock of the store."""


class Scene:
    """A plain pipeline in memory, as a test arranges it."""

    def __init__(self, **options: Any) -> None:
        self.app = App("memory://")
        self.app.pipeline("pages", key="id", version="v", **options).source("memory://").sink("memory://?grade=plain")
        self.entry: Entry | None = None
        self.pauses: list[Pause] = []
        self.eras = 0
        self.move: Move | None = None
        self.lines: list[HistoryRecord] = []

    def story(self, key: str = "a", **options: Any) -> KeyReport | None:
        return run(self._ask(lambda pipeline: key_report_of(pipeline, key, WALL, **options)))

    def told(self, key: str = "a", **options: Any) -> KeyReport:
        story = self.story(key, **options)
        assert story is not None
        return story

    def figures(self) -> PipelineFigures:
        return run(self._ask(lambda pipeline: figures_of(pipeline, WALL)))

    async def _ask(self, question: Any) -> Any:
        async with self.app.open("pages", work=False) as pipeline:
            ledger: Any = pipeline.ledger
            ledger.database.clock = lambda: NOW
            for pause in self.pauses:
                await pipeline.control_store.pause(pause)
            for _ in range(self.eras):
                await pipeline.control_store.raise_era()
            if self.move is not None:
                before = await pipeline.control_store.controls()
                assert await pipeline.control_store.replace_controls(before, replace(before, move=self.move))
            await pipeline.history_store.record(self.lines)
            if self.entry is not None:
                ledger.database.scope("pages").entries["a"] = self.entry
            return await question(pipeline)


def answers(story: KeyReport) -> list[tuple[int | None, int | None, str]]:
    return [(forecast_range.lowest, forecast_range.highest, forecast_range.answer) for forecast_range in story.next]


def test_a_paused_key_tells_by_whom_and_why_and_waits():
    scene = Scene()
    scene.entry = Entry((0, 7, 0))
    scene.pauses = [Pause("b"), Pause("a", at=NOW - 60.0, by="ann", why="hot"), Pause("[ab]", is_pattern=True, at=NOW)]
    story = scene.told()
    assert [(pause.keys, pause.by, pause.why, pause.at) for pause in story.pauses] == [
        ("a", "ann", "hot", WALL - 60.0),
        ("[ab]", "", "", WALL),
    ]
    assert answers(story) == [(None, 6, "stale"), (7, 7, "duplicate"), (8, None, "paused")]


def test_a_key_that_is_only_paused_has_a_story_if_it_was_named():
    scene = Scene()
    scene.pauses = [Pause("a"), Pause(EVERYTHING, is_pattern=True)]
    assert scene.told("a").mark is None
    assert scene.story("b") is None, "a pattern says nothing about keys that nobody has seen"


def test_a_limited_key_tells_when_the_next_dispatch_is_allowed():
    scene = Scene(rate=Rate(3, per="30s"))
    scene.entry = Entry((0, 7, 0), updated_at=NOW - 10.0, rate_at=NOW + 25.0)
    story = scene.told()
    assert story.limit == Limit(3, 30.0, WALL + 5.0)
    assert answers(story)[-1] == (8, None, "limited")
    assert story.next[-1].wait_s == 5.0
    assert story.mark is not None and story.mark.at == WALL - 10.0, "a charge does not hide when it was committed"


def test_a_key_within_its_rate_is_dispatched_now():
    scene = Scene(rate=Rate(3, per="30s"))
    scene.entry = Entry((0, 7, 0), rate_at=NOW + 15.0)
    assert scene.told().limit == Limit(3, 30.0, None)
    assert answers(scene.told())[-1] == (8, None, "granted")


def test_without_a_rate_there_is_no_limit():
    scene = Scene()
    scene.entry = Entry((0, 7, 0))
    assert scene.told().limit is None


def test_in_a_new_era_any_version_is_granted():
    scene = Scene()
    scene.entry, scene.eras = Entry((0, VERSION_MAX, 0)), 2
    story = scene.told()
    assert (story.era, story.mark and story.mark.era) == (2, 0)
    assert answers(story) == [(None, None, "granted")]


def test_a_reset_is_not_taken_for_the_moment_of_the_commit():
    scene = Scene()
    scene.entry = Entry((0, 7, 0), updated_at=NOW - 10.0, era=1)
    mark = scene.told().mark
    assert mark is not None and mark.at is None, "only the moment of the reset is remembered"


def test_within_an_era_the_newest_wins():
    scene = Scene()
    scene.entry = Entry((3, 7, 0))
    story = scene.told()
    assert story.era == 3
    assert answers(story) == [(None, 6, "stale"), (7, 7, "duplicate"), (8, None, "granted")]


def test_a_story_tells_the_newest_lines_of_its_key():
    scene = Scene()
    scene.lines = [HistoryRecord(float(at), "stale", "ab"[at % 2], at, "", "w1") for at in range(60)]
    story = scene.told()
    assert [line.version for line in story.history] == list(range(58, 18, -2))
    assert story.history[0].at == WALL - NOW + 58.0
    assert [line.version for line in scene.told(lines=2).history] == [58, 56]
    assert scene.told(lines=0).history == []


def test_a_key_that_only_the_history_knows_has_a_story():
    scene = Scene()
    scene.lines = [HistoryRecord(1.0, "dead letter", "a", 3, "bad", "w1")]
    assert scene.told().mark is None
    assert scene.story("b") is None


def test_figures_tell_era_and_pauses():
    scene = Scene()
    scene.eras, scene.pauses = 2, [Pause(EVERYTHING, is_pattern=True, at=NOW - 60.0, by="ann"), Pause("a", at=NOW)]
    found = scene.figures()
    assert found.era == 2
    assert [(pause.keys, pause.at) for pause in found.pauses] == [("*", WALL - 60.0), ("a", WALL)]


def test_figures_and_stories_name_the_target_to_which_the_sink_moves():
    scene = Scene()
    scene.entry = Entry((0, 7, 0))
    assert (scene.figures().moves_to, scene.told().moves_to) == (None, None)
    scene.move = Move("pages-6", "pages-7", 99)
    assert (scene.figures().moves_to, scene.told().moves_to) == ("pages-7", "pages-7")
    assert answers(scene.told()) == [(None, 6, "stale"), (7, 7, "duplicate"), (8, None, "paused")]


def test_figures_tell_an_alarm_of_the_last_hour_that_is_not_over():
    scene = Scene()
    scene.lines = [HistoryRecord(NOW - 50.0, "alarm", "", None, "act", "w1"), HistoryRecord(NOW, "stale", "a")]
    assert [(alarm.detail, alarm.at) for alarm in scene.figures().alarms] == [("act", WALL - 50.0)]
    scene.lines.append(HistoryRecord(NOW, "alarm over"))
    assert scene.figures().alarms == []
    scene.lines = [HistoryRecord(NOW - ALARM_S - 1.0, "alarm")]
    assert scene.figures().alarms == []
