"""The figures of a pipeline and the story of a key say what the ledger remembers, and what would happen next."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise import App, Change, Grade
from keywise.cli.commands.why import _about_mark
from keywise.core.change import VERSION_MAX, VERSION_MIN, ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Commit, Entry, LeaseTerms, LedgerPolicy
from keywise.core.history import HistoryRecord
from keywise.core.rules import decide
from keywise.operate.inspect import (
    ForecastRange,
    JournalSummary,
    KeyReport,
    PipelineFigures,
    SourceFigures,
    _with_commit,
    figures_of,
    forecast,
    key_report_of,
)
from running import run

WALL = 1_700_000_000.0
TERMS = LeaseTerms("somebody", 30.0)
POLICY = LedgerPolicy(intents=True, redelivery_s=100.0)


def tell(
    entry: Entry | None, *, letters: tuple[DeadLetter, ...] = (), refetch: bool = False, **settings: Any
) -> KeyReport | None:
    """The story of the key `a` of a plain pipeline; the entry's moments are seconds from now."""
    app = App("memory://")
    definition = app.pipeline("pages", key="id", version="v", **settings).source("memory://")
    definition.sink("memory://?grade=plain")
    if refetch:
        definition.refetch(lambda key: None)

    async def act() -> KeyReport | None:
        async with app.open("pages", work=False) as pipeline:
            await pipeline.ledger.dead_letter([DeadLetterRequest(letter) for letter in letters])
            if entry is not None:
                ledger: Any = pipeline.ledger
                ledger.database.clock = lambda: 0.0
                ledger.database.scope("pages").entries["a"] = entry
            return await key_report_of(pipeline, "a", WALL)

    return run(act())


def told(entry: Entry | None, **more: Any) -> KeyReport:
    story = tell(entry, **more)
    assert story is not None
    return story


def answers(found: list[ForecastRange]) -> list[tuple[int | None, int | None, str]]:
    return [(forecast_range.lowest, forecast_range.highest, forecast_range.answer) for forecast_range in found]


def test_a_fresh_pipeline_has_only_a_grade_and_a_way():
    async def act() -> PipelineFigures:
        app = App("memory://")
        app.pipeline("pages", key="id", version="v").source("memory://").sink("memory://")
        async with app.open("pages", work=False) as pipeline:
            return await figures_of(pipeline, WALL)

    source = SourceFigures("memory://", "queue_transaction", 0)
    expected = PipelineFigures("pages", Grade.ATOMIC, [source], keys=0, tombstones=0, claims=0, suspects=0, dead=0)
    assert run(act()) == expected


def test_figures_count_what_is_queued_remembered_and_set_aside():
    async def act() -> PipelineFigures:
        app = App("memory://")
        pages = app.pipeline("pages", key="id", version="v")
        pages.source("memory://").source("memory://?queue=bulk")

        @pages.apply
        def write(change: Change[Any]) -> None: ...

        await app.send("pages", {"id": "a", "v": 1}, {"id": "b", "v": 1})
        async with app.open("pages", work=False) as pipeline:
            headers = [
                ChangeHeader("a", order_of(1)),
                ChangeHeader("b", order_of(1), deleted=True),
                ChangeHeader("c", order_of(1)),
            ]
            results = await pipeline.ledger.claim(headers, TERMS)
            await pipeline.ledger.commit([Commit(claim) for claim in results.granted[:2]])
            await pipeline.ledger.dead_letter([DeadLetterRequest(DeadLetter("broken", b""))])
            return await figures_of(pipeline, WALL)

    found = run(act())
    assert [source.depth for source in found.sources] == [2, 0]
    assert found.grade is Grade.PLAIN
    assert (found.keys, found.tombstones, found.claims, found.suspects, found.dead) == (2, 1, 1, 0, 1)


def test_a_key_that_nobody_knows_has_no_story():
    assert tell(None, letters=(DeadLetter("broken", b"", key="other"),)) is None


def test_an_idle_key_tells_when_it_was_committed_and_is_kept_for_ever():
    story = told(Entry((0, 7, 0), updated_at=-60.0))
    assert story.mark is not None
    assert (story.mark.version, story.mark.deleted) == (7, False)
    assert (story.mark.at, story.mark.kept_until) == (WALL - 60.0, None)
    assert (story.holder, story.unknown, story.tries, story.suspicion, story.letters) == (None, None, None, None, [])


def test_below_the_mark_is_stale_at_it_a_duplicate_and_above_it_granted():
    story = told(Entry((0, 7, 0)))
    assert answers(story.next) == [(None, 6, "stale"), (7, 7, "duplicate"), (8, None, "granted")]


def test_a_tombstone_with_a_retention_says_until_when_it_is_kept():
    story = told(Entry((0, 7, 0), deleted=True, updated_at=-60.0), retention="2h", redelivery="1h")
    assert story.mark is not None and story.mark.deleted
    assert story.mark.kept_until == WALL - 60.0 + 3 * 3600.0


def test_a_held_key_tells_who_holds_it_until_when_and_for_what():
    entry = Entry((0, 7, 0), updated_at=-5.0, token=99, owner="w1", lease_until=25.0, intent=(0, 9, 0))
    story = told(entry)
    holder = story.holder
    assert holder is not None
    assert (holder.owner, holder.token, holder.intent, holder.is_over) == ("w1", 99, 9, False)
    assert (holder.since, holder.until) == (WALL - 5.0, WALL + 25.0)
    assert story.mark is not None and story.mark.at is None, "the moment is that of the claim"
    assert answers(story.next)[-1] == (8, None, "busy")
    assert story.next[-1].wait_s == 25.0


def test_the_key_of_a_dead_holder_is_worked_on_alone():
    story = told(Entry(token=99, owner="w1", lease_until=-1.0, tried=(0, 9, 0), intent=(0, 9, 0)))
    assert story.holder is not None and story.holder.is_over
    assert answers(story.next) == [(None, 8, "deferred"), (9, None, "probation")]


def test_older_changes_wait_for_a_write_whose_outcome_is_unknown():
    story = told(Entry((0, 3, 0), unknown=(0, 9, 0), unknown_until=50.0))
    assert story.unknown is not None
    assert (story.unknown.version, story.unknown.until) == (9, WALL + 50.0)
    assert answers(story.next) == [
        (None, 2, "stale"),
        (3, 3, "duplicate"),
        (4, 8, "deferred"),
        (9, None, "granted"),
    ]


def test_failed_tries_are_told_with_their_limits_and_the_next_try():
    story = told(Entry(tried=(0, 4, 0), attempts=2, crashes=1, not_before=30.0))
    tries = story.tries
    assert tries is not None
    assert (tries.version, tries.attempts, tries.crashes, tries.next_at) == (4, 2, 1, WALL + 30.0)
    assert (tries.attempts_max, tries.crashes_max) == (5, 3)
    assert answers(story.next) == [(None, 4, "busy"), (5, None, "granted")]


def test_a_try_that_waits_in_the_queue_has_no_moment():
    story = told(Entry(tried=(0, 4, 0), attempts=2))
    assert story.tries is not None and story.tries.next_at is None


def test_a_suspect_is_repaired_after_the_horizon_if_there_is_a_refetch():
    entry = Entry((0, 7, 0), suspicions=2, suspected_at=-10.0)
    given_one, given_none = told(entry, refetch=True, horizon="1m"), told(entry)
    assert given_one.suspicion is not None and given_none.suspicion is not None
    assert (given_one.suspicion.count, given_one.suspicion.since) == (2, WALL - 10.0)
    assert given_one.suspicion.repair_at == WALL + 50.0
    assert given_none.suspicion.repair_at is None


def test_only_the_dead_letters_of_the_key_are_told():
    letters = (DeadLetter("bad", b"1", key="a", version=4), DeadLetter("worse", b"2", key="b"))
    story = told(None, letters=letters)
    assert [(letter.version, letter.cause) for letter in story.letters] == [(4, "bad")]
    assert story.letters_are_all
    assert answers(story.next) == [(None, None, "granted")]


def test_a_key_without_version_is_applied_once_and_mixes_with_no_version():
    story = told(Entry(order_of(None)))
    assert story.mark is not None and story.mark.version is None
    assert [(forecast_range.versioned, forecast_range.answer) for forecast_range in story.next] == [
        (False, "duplicate"),
        (True, "mixed"),
    ]


def test_batches_without_claims_are_asked_without_terms():
    async def act() -> KeyReport | None:
        app = App("memory://")
        app.pipeline("pages", key="id", version="v").source("memory://").sink("memory://")
        async with app.open("pages", work=False) as pipeline:
            async with pipeline.ledger.transaction() as transaction:
                await transaction.mark([ChangeHeader("a", order_of(7))])
            return await key_report_of(pipeline, "a", WALL)

    story = run(act())
    assert story is not None and story.grade is Grade.ATOMIC
    assert answers(story.next) == [(None, 6, "stale"), (7, 7, "duplicate"), (8, None, "granted")]


@pytest.mark.parametrize("edge", [VERSION_MIN, VERSION_MAX])
def test_no_version_beyond_the_64_bits_is_named(edge):
    found = forecast(Entry((0, edge, 0)), 0.0, POLICY, TERMS)
    named = [
        version
        for forecast_range in found
        for version in (forecast_range.lowest, forecast_range.highest)
        if version is not None
    ]
    assert all(VERSION_MIN <= version <= VERSION_MAX for version in named)


orders = st.none() | st.tuples(st.just(0), st.integers(-6, 6), st.just(0))
moments = st.floats(-50.0, 50.0).map(round)
entries = st.builds(
    Entry,
    mark=orders,
    token=st.sampled_from([0, 1]),
    owner=st.just("w1"),
    lease_until=moments,
    abandoned=st.booleans(),
    intent=orders,
    unknown=orders,
    unknown_until=moments,
    tried=orders,
    not_before=moments,
)


@given(entry=entries, version=st.integers(-9, 9), terms=st.sampled_from([None, TERMS]))
def test_what_a_change_would_meet_is_what_the_rules_decide(entry, version, terms):
    found = forecast(entry, 0.0, POLICY, terms)
    [forecast_range] = [
        one
        for one in found
        if (one.lowest is None or one.lowest <= version) and (one.highest is None or version <= one.highest)
    ]
    refusal = decide(entry, ChangeHeader("a", order_of(version)), 0.0, POLICY, terms)
    assert forecast_range.answer == ("granted" if refusal is None else refusal.reason.value)
    assert forecast_range.wait_s == (0.0 if refusal is None else refusal.wait_s)


def test_figures_tell_what_is_noted_here_and_that_a_resync_is_due(tmp_path):
    text = '{"since": 5.0, "begun": [["a", [0, 1, 0], false]]}\n{"full": true}\n'
    (tmp_path / "pages@one.journal").write_text(text)
    (tmp_path / "pages@two.journal").write_text(text.replace("5.0", "4.0"))
    (tmp_path / "pages@three.journal").mkdir()
    app = App("memory://")
    app.pipeline("pages", key="id", journal=str(tmp_path)).source("memory://").sink("memory://?grade=plain")

    async def act() -> PipelineFigures:
        async with app.open("pages", work=False) as pipeline:
            await pipeline.admin.mark_suspect([], True)
            return await figures_of(pipeline, WALL)

    figures = run(act())
    assert figures.journal == JournalSummary(
        since=4.0, keys=1, journals=2, resync_due=True, unread=[f"{tmp_path / 'pages@three.journal'}: Is a directory"]
    )
    assert figures.resync_since is not None and abs(figures.resync_since - WALL) < 60


def test_the_history_has_the_commit_of_the_current_mark():
    """Without it, a story had only what was refused, and nobody saw by what."""
    story = told(Entry(order_of(7), updated_at=-60.0))
    assert [(one.what, one.version, one.at, one.detail) for one in story.history] == [
        ("applied", 7, WALL - 60.0, "the current mark")
    ]
    gone = told(Entry(order_of(8), deleted=True, updated_at=-5.0))
    assert [one.detail for one in gone.history] == ["a deletion; the current mark"]


def test_the_commit_of_a_suspect_key_has_its_time_if_it_came_after_the_suspicion():
    """A dead letter of unknown outcome makes its key suspect; the replay that is applied later is the news."""
    story = told(Entry(order_of(7), updated_at=-60.0, suspicions=1, suspected_at=-90.0))
    assert story.mark is not None and story.mark.at == WALL - 60.0
    assert [(one.what, one.version, one.at) for one in story.history] == [("applied", 7, WALL - 60.0)]


@pytest.mark.parametrize(
    "entry",
    [
        Entry(order_of(7), updated_at=-1.0, token=5, lease_until=10.0),
        Entry(order_of(7), updated_at=-1.0, suspicions=1, suspected_at=-1.0),
        Entry(order_of(7), updated_at=-1.0, tried=order_of(8), attempts=1),
    ],
    ids=["a claim", "a suspicion", "an attempt"],
)
def test_a_commit_whose_time_is_not_known_is_not_made_up(entry: Entry):
    """The entry has one time: that of what touched it last."""
    story = told(entry)
    assert story.history == []
    assert dict(_about_mark(story))["mark"] == "version 7, committed at a time that is not stored"


@pytest.mark.parametrize(
    ("what", "at", "expected"),
    [
        ("stale", WALL - 60.4, ["stale", "applied"]),
        ("failed", WALL - 60.4, ["applied", "failed"]),
        ("stale", WALL - 61.5, ["applied", "stale"]),
        ("failed", WALL - 59.0, ["failed", "applied"]),
    ],
)
def test_the_commit_stands_below_what_it_refused_although_its_time_has_whole_seconds(what, at, expected):
    mark = told(Entry(order_of(7), updated_at=-60.0)).mark
    assert [one.what for one in _with_commit([HistoryRecord(at, what, "a", 6)], "a", mark)] == expected
