"""The three decisions about a claimed or refused change, as tables."""

import random

import pytest

from keywise.core.change import Outcome, order_of
from keywise.core.entry import Certainty, Claim, Refusal, RefusalReason
from keywise.core.settings import Settings
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult
from keywise.flow.leased.disposition import (
    NOT_STARTED,
    CutOff,
    Disposition,
    OnProbation,
    Ran,
    Reject,
    Skip,
    Wait,
    dispose,
    exhausted,
    on_refusal,
)

SETTINGS = Settings(attempts_max=3, crashes_max=2)
MARK = order_of(7)


def claim(attempts: int = 0, crashes: int = 0) -> Claim:
    return Claim("a", order_of(5), False, token=1, attempts=attempts, crashes=crashes)


def failed(certainty: Certainty = Certainty.CLEAN, *, permanent: bool = False) -> Ran:
    return Ran(SinkResult(Outcome.FAILED, "boom", permanent, certainty))


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_every_reason_of_a_refusal_has_one_reaction(reason):
    kinds = {
        RefusalReason.STALE: Skip,
        RefusalReason.DUPLICATE: Skip,
        RefusalReason.REMOVED: Skip,
        RefusalReason.MIXED: Reject,
        RefusalReason.FORGOTTEN: Reject,
        RefusalReason.PROBATION: OnProbation,
        RefusalReason.BUSY: Wait,
        RefusalReason.DEFERRED: Wait,
        RefusalReason.PAUSED: Wait,
        RefusalReason.LIMITED: Wait,
    }
    assert type(on_refusal(Refusal(reason, 2.0, MARK), random.Random(1))) is kinds[reason]


def test_a_skipped_change_ends_as_the_ledger_says_up_to_the_mark():
    rng = random.Random(1)
    assert on_refusal(Refusal(RefusalReason.STALE, mark=MARK), rng) == Skip(Outcome.STALE, MARK)
    assert on_refusal(Refusal(RefusalReason.DUPLICATE, mark=MARK), rng) == Skip(Outcome.DUPLICATE, MARK)
    assert on_refusal(Refusal(RefusalReason.REMOVED, mark=MARK), rng) == Skip(Outcome.REMOVED, MARK)


@pytest.mark.parametrize(
    ("reason", "blocks_newer"),
    [
        (RefusalReason.BUSY, False),
        (RefusalReason.DEFERRED, False),
        (RefusalReason.PAUSED, True),
        (RefusalReason.LIMITED, True),
    ],
)
def test_newer_changes_wait_only_for_what_concerns_the_whole_key(reason, blocks_newer):
    wait = on_refusal(Refusal(reason, 2.0), random.Random(1))
    assert isinstance(wait, Wait) and wait.blocks_newer is blocks_newer
    assert 0 < wait.seconds <= 2.0


@pytest.mark.parametrize(
    ("execution", "held", "disposition"),
    [
        (NOT_STARTED, claim(), Disposition.RELEASE),
        (NOT_STARTED, claim(attempts=2, crashes=1), Disposition.RELEASE),
        (NOT_STARTED, claim(attempts=3), Disposition.DEAD_LETTER),
        (NOT_STARTED, claim(crashes=2), Disposition.DEAD_LETTER),
        (CutOff("the ledger is away"), claim(), Disposition.INTERRUPTED),
        (CutOff("the ledger is away"), claim(attempts=2), Disposition.INTERRUPTED),
        (Ran(APPLIED), claim(), Disposition.COMMIT),
        (Ran(APPLIED, overdue=True), claim(), Disposition.COMMIT),
        (Ran(SUPERSEDED), claim(), Disposition.COMMIT),
        (Ran(APPLIED, committed=True), claim(), Disposition.ACK_ONLY),
        (Ran(APPLIED, committed=True, overdue=True), claim(), Disposition.ACK_ONLY),
        (Ran(SinkResult(Outcome.BUSY)), claim(), Disposition.BACK_OFF),
        (Ran(SinkResult(Outcome.BUSY, wait_s=0.0)), claim(), Disposition.SNOOZE),
        (Ran(SinkResult(Outcome.BUSY, wait_s=60.0)), claim(attempts=2), Disposition.SNOOZE),
        (failed(), claim(), Disposition.RETRY),
        (failed(), claim(attempts=1), Disposition.RETRY),
        (failed(), claim(attempts=2), Disposition.DEAD_LETTER),
        (failed(Certainty.ENDED), claim(attempts=2), Disposition.DEAD_LETTER),
        (failed(permanent=True), claim(), Disposition.DEAD_LETTER),
        (failed(Certainty.ENDED, permanent=True), claim(), Disposition.DEAD_LETTER),
    ],
)
def test_what_becomes_of_a_claimed_change(execution, held, disposition):
    assert dispose(execution, held, SETTINGS) is disposition


@pytest.mark.parametrize("attempts", range(5))
@pytest.mark.parametrize("permanent", [False, True])
def test_an_unknown_outcome_is_never_dead_lettered(attempts, permanent):
    execution = failed(Certainty.UNKNOWN, permanent=permanent)
    assert dispose(execution, claim(attempts=attempts), SETTINGS) is Disposition.RETRY


def test_why_a_claimed_change_is_not_tried_again():
    assert exhausted(claim(attempts=2, crashes=1), SETTINGS) is None
    assert exhausted(claim(attempts=3), SETTINGS) == "the outcome of the last of 3 attempts is unknown"
    assert exhausted(claim(attempts=3, crashes=2), SETTINGS) == "2 workers died alone with this change"
    assert exhausted(claim(crashes=1), Settings(crashes_max=1)) == "1 worker died alone with this change"
