"""The judge of real runs finds each kind of violation, and lets pass what a grade allows."""

import pytest

from chaos.final_checks import UNSEEN, Evidence, judge_atomic, judge_plain

WRITE, MARK = ("k", 1, "write", 0), ("k", 1, "mark", None)
WRITE_2, MARK_2 = ("k", 2, "write", 0), ("k", 2, "mark", None)
GONE_2, TOMBSTONE_2 = ("k", None, "delete", None), ("k", 2, "tombstone", None)
DELETE_2 = ("k", 2, "delete", 0)


def evidence(*log: tuple, content: int | None = 2, truth: int | None = 2, newest: int = 2, **more) -> Evidence:
    """What is left of one key."""
    shown = {"content": {} if content is None else {"k": content}, "truth": {} if truth is None else {"k": truth}}
    return Evidence(log=list(log), newest={"k": newest}, **shown, **more)


@pytest.mark.parametrize("judge", [judge_atomic, judge_plain])
def test_a_run_as_it_should_be_has_no_faults(judge):
    verdict = judge(evidence(WRITE, MARK, WRITE_2, MARK_2))
    assert (verdict.faults, verdict.writes) == ([], 2)


def test_deletions_leave_tombstones_also_where_nothing_was():
    gone = {"content": None, "truth": None}
    assert judge_atomic(evidence(WRITE, MARK, GONE_2, TOMBSTONE_2, **gone)).faults == []
    assert judge_atomic(evidence(TOMBSTONE_2, **gone)).faults == []
    assert judge_plain(evidence(WRITE, MARK, GONE_2, DELETE_2, TOMBSTONE_2, **gone)).faults == []


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ([WRITE, WRITE, MARK, WRITE_2, MARK_2], "twice"),
        ([WRITE, MARK, WRITE, WRITE_2, MARK_2], "twice"),
        ([WRITE, MARK, WRITE_2, MARK_2, MARK_2], "twice"),
        ([WRITE, MARK, WRITE_2, MARK_2, WRITE_2], "twice"),
        ([WRITE_2, MARK_2, WRITE, MARK], "backwards"),
        ([WRITE, MARK, MARK_2], "lost"),
        ([WRITE, MARK_2], "lost"),
        ([WRITE, MARK, WRITE, TOMBSTONE_2], "lost"),
        ([WRITE, MARK], "lost"),
        ([], "lost"),
    ],
)
def test_what_the_atomic_grade_forbids_is_found(log, kind):
    assert getattr(judge_atomic(evidence(*log)), kind) != []


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ([WRITE_2, MARK_2, WRITE], "backwards"),
        ([WRITE_2, WRITE, MARK, MARK_2], "backwards"),
        ([WRITE, MARK, WRITE_2, MARK_2, MARK_2], "twice"),
        ([WRITE, MARK, WRITE_2, MARK_2, MARK], "backwards"),
        ([WRITE, MARK, MARK_2], "lost"),
        ([WRITE, MARK, WRITE_2], "lost"),
        ([], "lost"),
    ],
)
def test_what_the_plain_grade_forbids_is_found(log, kind):
    assert getattr(judge_plain(evidence(*log)), kind) != []


def test_a_plain_write_may_repeat_and_an_older_one_follows_only_on_a_suspect_key():
    verdict = judge_plain(evidence(WRITE, WRITE, MARK, WRITE_2, MARK_2, ("k", 1, "write", 1), WRITE_2))
    assert (verdict.faults, verdict.repeated) == ([], 2)


@pytest.mark.parametrize("judge", [judge_atomic, judge_plain])
def test_a_store_that_does_not_end_like_the_truth_is_found(judge):
    log = [WRITE, MARK, WRITE_2, MARK_2]
    assert judge(evidence(*log, content=1)).lost == ["k: the store shows 1, the truth is 2"]
    assert judge(evidence(*log, truth=None)).lost == ["k: the store shows 2, the truth is None"]


def test_a_takeover_without_suspicion_is_found():
    log = [WRITE, MARK, WRITE_2, MARK_2]
    assert judge_plain(evidence(*log, takeovers=[("k", 0, 1), ("k", 1, 2)])).faults == []
    assert judge_plain(evidence(*log, takeovers=[("k", 1, 1)])).unsuspected == ["k: taken over, suspect 1 → 1"]


def test_marks_may_be_told_at_the_end_and_nobody_may_have_seen_a_suspicion():
    """As with a ledger elsewhere, which no trigger sees."""
    verdict = judge_plain(evidence(WRITE_2, ("k", 1, "write", UNSEEN), WRITE_2, marks={"k": 2}))
    assert (verdict.faults, verdict.unseen) == ([], 1)
    assert judge_plain(evidence(WRITE_2, marks={"k": 1})).lost == ["k: 2 was sent, 1 is the newest that was marked"]
    assert judge_plain(evidence(WRITE_2, marks={})).lost == ["k: 2 was sent, None is the newest that was marked"]
