"""What becomes of a position: work in parts resumes where the last holder came to, and at no other order."""

import pytest
from msgspec.structs import replace

from core.one_key import LEASE_S, REDELIVERY_S, RETENTION_S, SAFE, OneKey, committed
from keywise.core import rules
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import PLAIN as NO_CONTROLS
from keywise.core.entry import (
    NOTE_MAX_BYTES,
    Advance,
    Certainty,
    Claim,
    CommitResult,
    Entry,
    Level,
    Phase,
    Position,
    RefusalReason,
)
from keywise.core.errors import PositionError

AT_3 = Position(3, b"etag 7")


def advanced(version: int = 5) -> tuple[OneKey, Claim]:
    """A key whose holder has come to place 3."""
    key = OneKey()
    claim = key.take(version)
    assert key.advance(claim, AT_3.place, AT_3.note)
    return key, claim


def test_a_takeover_resumes_at_the_position_under_a_fresh_token():
    key, claim = advanced()
    key.expire()
    again = key.take(5, "w2", level=Level.ALONE)
    assert (again.position, again.took_over) == (AT_3, True)
    assert not key.advance(claim, 4), "the old token advances nothing"
    assert key.advance(again, 4)


@pytest.mark.parametrize("ending", ["release", "clean", "ended", "unknown", "dead letter", "dead letter after a write"])
def test_what_ends_a_claim_without_a_commit_keeps_the_position(ending: str):
    key, claim = advanced()
    match ending:
        case "release":
            key.release(claim)
        case "dead letter":
            key.dead_letter(claim)
        case "dead letter after a write":
            key.dead_letter(claim, Certainty.ENDED)
        case _:
            key.fail(claim, Certainty(ending), retry_s=1.0)
    key.wait(LEASE_S)
    assert key.take(5).position == AT_3


def test_a_newer_order_starts_at_the_beginning():
    key, claim = advanced()
    key.dead_letter(claim)
    other = key.take(6)
    assert other.position is None
    key.release(other)
    assert key.entry.advanced == order_of(6), "an older message continues at the newest order that was begun"
    assert key.entry.position is None, "what the other order has written lies over the parts"


def test_another_generation_is_another_order():
    key, claim = advanced()
    key.release(claim)
    assert key.ask_for(ChangeHeader("a", (0, 5, 1))).position is None


def test_an_older_change_continues_a_newer_one_that_was_begun():
    """Otherwise a stray old message between two parts would cost all the progress."""
    key, claim = advanced()
    key.release(claim)
    header = rules.current(ChangeHeader("a", order_of(4)), key.entry, NO_CONTROLS)
    again = key.ask_for(header, "w2")
    assert (again.order, again.position) == (order_of(5), AT_3)


def test_a_stale_change_does_not_continue_a_newer_one():
    key = OneKey(SAFE)
    key.commit(key.take(4))
    claim = key.take(5)
    assert key.advance(claim, 3)
    key.release(claim)
    for version in (3, 4):
        header = ChangeHeader("a", order_of(version))
        assert rules.current(header, key.entry, NO_CONTROLS).order == header.order


def test_a_place_never_falls():
    key, claim = advanced()
    before = key.entry
    assert not key.advance(claim, 2)
    assert before == key.entry
    assert key.advance(claim, 3, b"another note"), "it may be repeated after a lost answer"
    assert Position(3, b"another note") == key.entry.position


def test_a_part_in_a_transaction_is_not_repeated():
    key, claim = advanced()
    assert not key.advance(claim, 3, once=True), "its effect exists"
    assert key.advance(claim, 4, once=True)


def test_the_first_part_may_be_at_place_zero():
    key = OneKey()
    claim = key.take(5)
    assert key.advance(claim, 0, once=True)
    assert not key.advance(claim, 0, once=True)


def test_an_abandoned_claim_advances_nothing():
    key, claim = advanced()
    key.fail(claim, Certainty.UNKNOWN)
    assert not key.advance(claim, 4)


def test_progress_forgives_attempts_and_touches_the_entry():
    key = OneKey()
    for _ in range(3):
        key.fail(key.take(5), Certainty.CLEAN, retry_s=0)
    claim = key.take(5)
    key.wait(7)
    assert key.advance(claim, 1)
    assert (0, key.now) == (key.entry.attempts, key.entry.updated_at)
    after = Advance(claim, Position(1)).claim_after
    assert (3, 0, Position(1)) == (claim.attempts, after.attempts, after.position)


def test_progress_forgives_crashes_and_ends_isolation():
    """A worker that is killed at every part of a large object must not end in a dead letter."""
    key = OneKey()
    claim = key.climb(5, Level.ALONE)
    key.die(claim)
    claim = key.take(5, "next", level=Level.ALONE)
    assert (claim.crashes, claim.level) == (1, Level.ALONE)
    assert key.advance(claim, 1)
    assert (key.entry.crashes, key.entry.deaths, key.entry.late_deaths) == (0, Level.USUAL, 0)
    after = Advance(claim, Position(1)).claim_after
    assert (after.crashes, after.level) == (0, Level.USUAL)
    key.die(claim)
    claim = key.take(5, "last", level=Level.ALONE)
    assert (claim.crashes, claim.level) == (0, Level.PROBATION)


@pytest.mark.parametrize("place", [0, 2])
def test_a_change_that_kills_its_worker_in_the_next_part_still_becomes_a_dead_letter(place: int):
    """A reservation before the first part, and a repeated advance, are no progress."""
    key = OneKey()
    claim = key.take(5, "first")
    assert key.advance(claim, place)
    for number in range(5):
        key.die(claim)
        claim = key.take(5, f"w{number}", level=Level.ALONE)
        assert key.advance(claim, place)
        assert claim == replace(Advance(claim, Position(place)).claim_after, position=claim.position)
    assert (claim.crashes, claim.level) == (2, Level.ALONE)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_worker_that_dies_at_every_part_is_never_blamed(phase: Phase):
    key = OneKey()
    for part in range(1, 20):
        claim = key.take(5, f"w{part}", level=Level.ALONE)
        assert (claim.crashes, claim.level <= Level.PROBATION) == (0, True)
        assert key.advance(claim, part)
        key.die(claim, phase)


def test_a_commit_drops_the_position():
    key, claim = advanced()
    assert CommitResult.COMMITTED is key.commit(claim)
    assert Entry(order_of(5), updated_at=key.now) == key.entry


def test_a_transaction_without_a_claim_drops_the_position():
    key = OneKey(SAFE)
    claim = key.take(5)
    assert key.advance(claim, 3)
    key.release(claim)
    key.wait(REDELIVERY_S)
    assert key.transact(4) is None
    assert key.entry.position is None


def test_a_reset_drops_the_position():
    key, claim = advanced()
    key.release(claim)
    exclusion = key.exclude()
    raised = rules.reset(key.entry, exclusion, NO_CONTROLS)
    assert exclusion.position is None
    assert (raised.position, raised.advanced) == (None, None)


def test_a_repair_that_has_written_drops_the_position():
    key, claim = advanced()
    key.release(claim)
    key.finish_repair(key.exclude(), None)
    assert key.entry.position == AT_3
    key.finish_repair(key.exclude(), ChangeHeader("a", order_of(4)))
    assert key.entry.position is None


def test_a_write_without_the_ledger_drops_the_position():
    key, claim = advanced()
    key.release(claim)
    key.mark_suspect(4)
    assert key.entry.position is None


def test_a_position_is_forgotten_with_its_key():
    key, claim = advanced()
    key.dead_letter(claim)
    key.wait(RETENTION_S + REDELIVERY_S)
    assert not key.prune(RETENTION_S)
    key.wait(1)
    assert key.prune(RETENTION_S)


def test_a_late_replay_of_an_order_under_way_is_judged():
    """Rule 14: the ledger remembers the key as long as it keeps the position."""
    key, claim = advanced()
    key.dead_letter(claim)
    assert key.take(5, late=True).position == AT_3


def test_an_extent_survives_other_orders_and_falls_only_at_a_commit():
    key = OneKey()
    claim = key.take(5)
    assert key.advance(claim, 1, extent=1000)
    assert key.advance(claim, 2, extent=700)
    key.dead_letter(claim)
    newer = key.take(6)
    assert newer.extent == 1000
    key.commit(newer)
    assert key.entry.extent == 1000, "this commit has deleted nothing"
    shorter = key.take(7)
    key.commit(shorter, extent=300)
    assert key.take(8).extent == 300


def test_a_refused_or_repeated_commit_leaves_the_extent():
    key = OneKey()
    old = key.take(5)
    key.commit(old, extent=10)
    newer = key.take(6)
    assert key.advance(newer, 1, extent=500)
    assert CommitResult.ALREADY is key.commit(old, extent=10)
    assert CommitResult.REFUSED is key.commit(replace(newer, token=0), extent=10)
    assert key.entry.extent == 500


def test_an_extent_survives_a_reset_and_is_not_pruned():
    key = committed(5)
    key.commit(key.take(6), extent=10)
    key.wait(RETENTION_S + REDELIVERY_S + 1)
    assert not key.prune(RETENTION_S), "its records have to be deleted some day"
    exclusion = key.exclude()
    key.entry = rules.reset(key.entry, exclusion, NO_CONTROLS)
    assert key.entry.extent == 10
    key.commit(key.ask_for(ChangeHeader("a", (1, 1, 0), deleted=True)), extent=0)
    key.wait(RETENTION_S + REDELIVERY_S + 1)
    assert key.prune(RETENTION_S)


def test_an_entry_with_a_position_or_an_extent_is_not_idle():
    assert not Entry(order_of(5), position=AT_3, advanced=order_of(6)).is_idle
    assert not Entry(order_of(5), extent=1).is_idle


def test_a_position_has_limits():
    Position(2**63 - 1, b"x" * NOTE_MAX_BYTES)
    with pytest.raises(PositionError, match="place -1 must be from 0"):
        Position(-1)
    with pytest.raises(PositionError, match="place"):
        Position(2**63)
    with pytest.raises(PositionError, match="8193 bytes, the limit is 8192"):
        Position(0, b"x" * (NOTE_MAX_BYTES + 1))


RESTARTED = (0, 5, 1)


def restarted() -> tuple[OneKey, Claim]:
    """A key whose holder has come to place 3, and has started again since."""
    key, claim = advanced()
    assert key.advance(claim, 0, restart=RESTARTED)
    return key, replace(claim, order=RESTARTED, position=Position(0))


def test_a_restart_sets_the_position_back_under_the_same_token():
    key, claim = restarted()
    assert (key.entry.position, key.entry.advanced, key.entry.token) == (Position(0), RESTARTED, claim.token)
    assert (key.entry.tried, key.entry.intent) == (RESTARTED, RESTARTED)


@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_call_from_before_a_restart_arrives_late(place: int):
    key, claim = restarted()
    before = key.entry
    assert not key.advance(replace(claim, order=order_of(5)), place)
    assert key.entry == before


def test_a_restart_keeps_attempts_and_crashes_until_there_is_progress():
    key = OneKey()
    claim = key.take(5)
    key.fail(claim, Certainty.CLEAN, retry_s=0.0)
    again = key.take(5)
    assert key.advance(again, 0, restart=RESTARTED)
    assert key.entry.attempts == 1
    assert key.advance(replace(again, order=RESTARTED), 1)
    assert key.entry.attempts == 0


@pytest.mark.parametrize("ending", ["release", "clean", "expire", "dead letter"])
def test_the_message_of_a_restart_continues_at_its_order(ending: str):
    key, claim = restarted()
    assert key.advance(claim, 2, b"on")
    match ending:
        case "release":
            key.release(claim)
        case "clean":
            key.fail(claim, Certainty.CLEAN, retry_s=0.0)
        case "expire":
            key.expire()
        case "dead letter":
            key.dead_letter(claim)
    header = rules.current(ChangeHeader("a", order_of(5)), key.entry, NO_CONTROLS)
    again = key.ask_for(header, "w2", level=Level.ALONE)
    assert (again.order, again.position) == (RESTARTED, Position(2, b"on"))


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ((0, 5, 0), RESTARTED),
        (RESTARTED, RESTARTED),
        ((0, 5, 2), (0, 5, 2)),
        ((0, 4, 0), RESTARTED),
        ((0, 6, 0), (0, 6, 0)),
        ((0, 0, -1), (0, 0, -1)),
        (None, None),
    ],
)
def test_a_restart_is_continued_by_orders_below_it(order, wanted):
    key, claim = restarted()
    key.release(claim)
    assert rules.current(ChangeHeader("a", order), key.entry, NO_CONTROLS).order == wanted


def test_a_committed_restart_makes_its_message_stale():
    key, claim = restarted()
    assert key.commit(claim) is CommitResult.COMMITTED
    assert key.entry.mark == RESTARTED
    refusal = key.ask(5)
    assert (refusal.reason, refusal.mark) == (RefusalReason.STALE, RESTARTED)


def test_the_note_of_a_commit_stays_until_the_next_one():
    key = OneKey()
    assert key.commit(key.take(4), note=b"etag") is CommitResult.COMMITTED
    claim = key.take(5)
    assert key.advance(claim, 1)
    key.fail(claim, Certainty.CLEAN, retry_s=0.0)
    key.release(key.take(5))
    assert key.entry.note == b"etag"
    assert key.commit(key.take(5)) is CommitResult.COMMITTED
    assert key.entry.note == b""


@pytest.mark.parametrize(("repairs", "grows", "wanted"), [(True, False, 0), (True, True, 2), (False, False, 1)])
def test_a_commit_that_repairs_ends_a_suspicion_that_has_not_grown(repairs: bool, grows: bool, wanted: int):
    key = OneKey()
    key.mark_suspect(3)
    claim = key.take(5)
    if grows:
        key.commit(replace(claim, token=99), overdue=True)
    assert key.commit(claim, repairs=repairs) is CommitResult.COMMITTED
    assert key.entry.suspicions == wanted
