"""From the queue to the store and back, each way of a batch: the newest is applied, and nothing is lost or silent."""

import pytest

from causes import said
from flow.rig import CLAIMED_TRANSACTION, LEASED, LEASED_CONDITIONAL, LEDGER_TRANSACTION, QUEUE_TRANSACTION, WAYS, Rig
from keywise.core import events
from keywise.core.change import Change, Ignore, Put, order_of
from keywise.core.errors import PermanentError, TransientError
from keywise.flow.intake import FunctionRoute, MessageReader

every_way = pytest.mark.parametrize("way", WAYS)


def page(key: str, version: int | None, **more: object) -> dict[str, object]:
    return {"id": key, "v": version, **more}


@every_way
def test_the_way_and_the_grade_are_told_at_the_start(way: str):
    rig = Rig(way)
    rig.run()
    [started] = rig.of(events.Started)
    grade = {LEASED: "plain", LEASED_CONDITIONAL: "conditional"}.get(way, "atomic")
    told = LEASED if way == LEASED_CONDITIONAL else way
    assert (started.strategy, started.grade, started.source) == (told, grade, "queue")
    assert isinstance(rig.events[-1], events.Stopped)
    assert len(rig.of(events.Draining)) == 1


@every_way
def test_the_newest_change_of_a_key_is_applied_and_its_followers_end_with_it(way: str):
    """Rules 2 and 4."""
    rig = Rig(way)
    rig.run(page("a", 1), page("a", 3), page("b", 1), page("a", 2), page("a", 3))
    assert sorted(rig.written) == [("a", 3), ("b", 1)]
    assert rig.outcomes == {"applied": 2, "superseded": 2, "duplicate": 1}
    assert rig.entry("a").mark == order_of(3)
    assert (rig.queue, rig.letters) == ({}, [])


@every_way
def test_what_is_older_or_the_same_is_acked_and_not_written(way: str):
    """Rules 3 and 12."""
    rig = Rig(way)
    rig.run(page("a", 3))
    rig.run(page("a", 2))
    rig.run(page("a", 3))
    assert rig.written == [("a", 3)]
    assert rig.outcomes == {"applied": 1, "stale": 1, "duplicate": 1}


@every_way
def test_followers_of_a_stale_change_end_with_it(way: str):
    """Nothing was committed while they waited, so they are stale as well, and not superseded."""
    rig = Rig(way)
    rig.run(page("a", 9))
    rig.run(page("a", 2), page("a", 4), page("a", 3))
    assert rig.written == [("a", 9)]
    assert rig.outcomes == {"applied": 1, "stale": 3}
    assert rig.queue == {}


@every_way
def test_what_comes_again_with_its_duplicate_is_stale(way: str):
    rig = Rig(way)
    rig.run(page("a", 9))
    rig.run(page("a", 2), page("a", 9), page("a", 9), page("a", 3))
    assert rig.written == [("a", 9)]
    assert rig.outcomes == {"applied": 1, "duplicate": 2, "stale": 2}


@every_way
def test_a_deletion_of_an_unknown_key_leaves_a_tombstone(way: str):
    """Rule 11."""
    rig = Rig(way)
    rig.run(page("a", 5, gone=True))
    rig.run(page("a", 4))
    assert (rig.entry("a").deleted, rig.entry("a").mark, rig.stored) == (True, order_of(5), {})
    assert rig.outcomes == {"applied": 1, "stale": 1}


@every_way
def test_a_malformed_message_becomes_a_dead_letter_and_harms_nobody(way: str):
    """Rules 13 and 17: with its body, its source and its cause."""
    rig = Rig(way)
    rig.run(page("a", 1), b"{broken", page("b", 1))
    [letter] = rig.letters
    assert (letter.body, letter.source, letter.key, letter.version) == (b"{broken", "queue", "", None)
    assert "malformed" in letter.cause
    assert (rig.stored, rig.outcomes) == ({"a": 1, "b": 1}, {"applied": 2, "dead": 1})
    assert [event.cause for event in rig.of(events.DeadLettered)] == [letter.cause]


@every_way
def test_a_read_function_that_raises_leaves_its_traceback_in_letter_and_event(way: str):
    """Rule 17: as a handler does."""
    rig = Rig(way)

    def read(body: dict) -> Put:
        raise ValueError(body["id"])

    rig.reader = MessageReader(FunctionRoute(read), body_max_bytes=1000)
    rig.run(page("a", 1))
    [letter], [event] = rig.letters, rig.of(events.DeadLettered)
    assert letter.traceback.startswith("Traceback (most recent call last):") and "in read" in letter.traceback
    assert letter.traceback.endswith("ValueError: a")
    assert "intake.py" not in letter.traceback, "it begins with the user's function"
    assert event.traceback == letter.traceback


@every_way
def test_a_message_that_says_nothing_is_acked_and_counted(way: str):
    rig = Rig(way)
    read = FunctionRoute(lambda body: Put(body["id"], body["v"]) if body["v"] else Ignore("locale"))
    rig.reader = MessageReader(read, body_max_bytes=1000)
    rig.run(page("a", 0), page("b", 0), page("c", 1))
    assert [(event.reason, event.changes) for event in rig.of(events.Ignored)] == [("locale", 2)]
    assert (rig.stored, rig.outcomes, rig.letters, rig.queue) == ({"c": 1}, {"applied": 1}, [], {})


@every_way
def test_a_poisoned_change_becomes_a_dead_letter_and_the_next_newest_has_its_turn(way: str):
    """Rule 4: its followers are not acked with it."""
    rig = Rig(way)

    def refuse(change: Change) -> None:
        if change.version == 3:
            raise PermanentError("no such template")

    rig.sink.behaviour = refuse
    rig.run(page("a", 1), page("a", 3), page("a", 2))
    [letter] = rig.letters
    assert (letter.key, letter.version, said(letter.cause)) == ("a", 3, "PermanentError: no such template")
    assert (rig.written, rig.outcomes) == ([("a", 2)], {"dead": 1, "applied": 1, "superseded": 1})
    assert rig.of(events.Failed) == [], "what cannot help is not tried again"


@every_way
def test_a_passing_error_is_tried_again_after_a_growing_pause(way: str):
    """Rule 10: attempts are counted in the ledger."""
    rig = Rig(way, backoff_s=4.0, backoff_max_s=60.0)
    failures = iter([TransientError("busy"), TransientError("still busy")])

    def fail_twice(change: Change) -> None:
        for error in failures:
            raise error

    rig.sink.behaviour = fail_twice
    rig.run(page("a", 1))
    assert (rig.stored, rig.letters, rig.outcomes) == ({"a": 1}, [], {"applied": 1})
    told = [(event.key, event.attempts, said(event.cause)) for event in rig.of(events.Failed)]
    assert told in (
        [("a", 1, "TransientError: busy"), ("a", 2, "TransientError: still busy")],
        [("a", 1, "TransientError: still busy")],  # A transaction tries a second time at once, carefully.
    )
    times = [at for at, _, _ in rig.sink.tries]
    assert times[-1] - times[-2] >= 2.0
    assert rig.entry("a").attempts == 0


@every_way
def test_a_change_that_always_fails_becomes_a_dead_letter_after_the_last_attempt(way: str):
    """Rule 13: never a plain ack, never a silent discard."""
    rig = Rig(way, attempts_max=3)

    def fail(change: Change) -> None:
        raise TransientError("never")

    rig.sink.behaviour = fail
    rig.run(page("a", 1))
    assert [(letter.key, said(letter.cause)) for letter in rig.letters] == [("a", "TransientError: never")]
    assert [event.attempts for event in rig.of(events.Failed)] == [1, 2]
    assert (rig.stored, rig.outcomes) == ({}, {"dead": 1})
    assert rig.entry("a") is None


@every_way
def test_one_bad_change_of_a_batch_does_not_take_the_others_with_it(way: str):
    """Rule 17: the others are applied at once, and it alone is tried again."""
    rig = Rig(way, attempts_max=3)

    def fail_one(change: Change) -> None:
        if change.key == "k5":
            raise ValueError("bad page")

    rig.sink.behaviour = fail_one
    rig.run(*(page(f"k{number}", 1) for number in range(16)))
    assert [letter.key for letter in rig.letters] == ["k5"]
    assert sorted(rig.stored) == sorted(f"k{number}" for number in range(16) if number != 5)
    assert rig.outcomes == {"applied": 15, "dead": 1}
    assert len(rig.written) == 15, "each effect once"
    assert {event.key for event in rig.of(events.Failed)} == {"k5"}


@every_way
def test_versioned_and_unversioned_changes_of_a_key_end_as_a_dead_letter(way: str):
    """Rule 21."""
    rig = Rig(way)
    rig.reader = MessageReader(FunctionRoute(lambda body: Put(body["id"], body["v"])), body_max_bytes=1000)
    rig.run(page("a", 1), page("b", None))
    rig.run(page("a", None), page("b", 1))
    assert sorted(letter.key for letter in rig.letters) == ["a", "b"]
    assert all("they have no common order" in letter.cause for letter in rig.letters)
    assert rig.outcomes == {"applied": 2, "dead": 2}


@every_way
def test_versioned_and_unversioned_changes_do_not_mix_within_one_batch_either(way: str):
    """Rule 21: none is acked as superseded by the other."""
    rig = Rig(way)
    rig.reader = MessageReader(FunctionRoute(lambda body: Put(body["id"], body["v"])), body_max_bytes=1000)
    rig.run(page("a", 1), page("a", None))
    assert rig.outcomes == {"applied": 1, "dead": 1}
    assert [letter.key for letter in rig.letters] == ["a"]


@every_way
def test_a_late_message_of_a_forgotten_key_ends_as_a_dead_letter(way: str):
    """Rule 14: nobody can tell whether it is stale."""
    rig = Rig(way, retention_s=300.0)

    async def story() -> None:
        await rig.work(page("known", 1))
        await rig.send(page("known", 2), page("new", 2))
        await rig.pass_s(301.0)
        await rig.work()

    rig.play(story())
    assert [letter.key for letter in rig.letters] == ["new"]
    assert "sent longer ago than the retention" in rig.letters[0].cause
    assert rig.stored == {"known": 2}


@every_way
def test_every_batch_that_is_opened_is_closed(way: str):
    rig = Rig(way, attempts_max=2)

    def fail_some(change: Change) -> None:
        if change.key in {"k1", "k2"}:
            raise TransientError("no") if change.key == "k1" else PermanentError("no")

    rig.sink.behaviour = fail_some
    rig.run(*(page(f"k{number}", 1) for number in range(6)), b"broken")
    assert rig.of(events.BatchOpened)
    assert rig.open_changes == 0


@every_way
def test_more_messages_than_fit_into_one_batch_are_all_applied(way: str):
    rig = Rig(way, batch_max=5, prefetch=10)
    rig.run(*(page(f"k{number % 40}", number) for number in range(100)))
    assert len(rig.stored) == 40
    assert all(version >= 60 for version in rig.stored.values())
    assert sum(rig.outcomes.values()) == 100
    assert max(rig.sink.calls) <= 5


@pytest.mark.parametrize("way", [QUEUE_TRANSACTION, LEDGER_TRANSACTION, CLAIMED_TRANSACTION])
def test_effect_and_mark_are_one_transaction(way: str):
    """Grade atomic: each effect once, even if the first try was rolled back after a part of it."""
    rig = Rig(way)
    failures = iter([RuntimeError("the machine hiccups")])

    def fail_once_at_the_end(change: Change) -> None:
        for error in failures if change.key == "c" else ():
            raise error

    rig.sink.behaviour = fail_once_at_the_end
    rig.run(page("a", 1), page("b", 1), page("c", 1))
    assert sorted(rig.written) == [("a", 1), ("b", 1), ("c", 1)]
