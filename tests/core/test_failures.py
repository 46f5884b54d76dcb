"""Why something failed or has to wait: the words an operator reads, and when to look again."""

import random

import msgspec
import pytest

from keywise.core.entry import Refusal, RefusalReason
from keywise.core.errors import PermanentError, TransientError
from keywise.core.failures import (
    BUSY_LOOK_S,
    CAUSE_MAX,
    cause_of_error,
    cause_of_refusal,
    is_permanent,
    look_again_s,
    storable,
)


def test_a_refusal_that_buries_says_what_to_do():
    assert "send all of them with a version, or none" in cause_of_refusal(Refusal(RefusalReason.MIXED))
    assert "replay it with --older if nothing newer was applied" in cause_of_refusal(Refusal(RefusalReason.FORGOTTEN))


def test_an_error_is_told_with_its_kind():
    assert cause_of_error(ValueError("no such page")) == "ValueError: no such page"


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (PermanentError("no"), True),
        (msgspec.ValidationError("no"), True),
        (TransientError("no"), False),
        (ValueError("no"), False),
        (TimeoutError(), False),
    ],
)
def test_only_what_cannot_change_is_permanent(error: Exception, permanent: bool):
    assert permanent is is_permanent(error)


@pytest.mark.parametrize("cause", ["plain", "", "ümlaut", "日本", "a\nb"])
def test_an_ordinary_cause_is_kept_as_it_is(cause: str):
    assert cause == storable(cause)


def test_a_cause_that_no_store_takes_is_made_harmless():
    assert storable("a\0b") == "a\\x00b"
    assert storable("half \ud800 a character") == "half \\ud800 a character"


def test_a_long_cause_is_cut():
    assert len(storable("x" * (CAUSE_MAX + 1))) == CAUSE_MAX


def test_a_held_key_is_looked_at_long_before_its_lease_ends():
    waits = {look_again_s(Refusal(RefusalReason.BUSY, 30.0), random.Random(seed)) for seed in range(50)}
    assert len(waits) == 50, "with jitter"
    assert all(BUSY_LOOK_S / 2 <= wait_s <= BUSY_LOOK_S * 1.5 for wait_s in waits)


def test_a_reason_that_ends_sooner_is_not_waited_for_longer():
    assert look_again_s(Refusal(RefusalReason.BUSY, 0.01), random.Random(1)) == 0.01


def test_a_reason_without_an_end_is_not_asked_for_without_pause():
    assert 0 < look_again_s(Refusal(RefusalReason.PROBATION), random.Random(1)) < BUSY_LOOK_S


def test_an_error_whose_text_cannot_be_made_is_told_by_its_name():
    """It comes from user code, and must not end the worker that tells it."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert cause_of_error(Mute()) == "Mute"
