"""The checker of the benchmarks finds writes that go backwards, overlap, repeat or are out of turn, and wrong ends."""

import json
import uuid

from benchmarks.peers.checker import Rewrite, check, check_calls
from benchmarks.peers.record import Kind, Line, code

A, B = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))


def body(key: str, version: int) -> bytes:
    return json.dumps({"content_id": key, "payload_version": version}).encode()


def wrote(key: str, version: int, began: int, ended: int, kind: Kind = Kind.WROTE) -> Line:
    return Line(kind, code(key), version, began, ended)


def test_a_clean_run_has_nothing_to_tell():
    sent = [body(A, 1), body(A, 2), body(B, 7)]
    lines = [wrote(A, 1, 0, 10), wrote(B, 7, 5, 15), wrote(A, 2, 10, 20)]
    found = check(sent, lines, [], {A: 2, B: 7})
    assert (found.backwards, found.repeats, found.overlaps, found.wrong, found.out_of_turn) == (0, 0, 0, 0, 0)
    assert found.calls == 3


def test_an_older_version_after_a_newer_one_is_an_order_violation_and_an_equal_one_a_repeat():
    sent = [body(A, 2), body(A, 1), body(A, 1)]
    lines = [wrote(A, 2, 0, 1), wrote(A, 1, 2, 3), wrote(A, 1, 4, 5)]
    found = check(sent, lines, [Rewrite(A, 2, 1), Rewrite(A, 1, 1)], {A: 1})
    assert (found.backwards, found.repeats, found.wrong) == (1, 1, 1)
    assert found.out_of_turn == 0, "they were written as they were sent"


def test_two_handlers_of_one_key_at_once_are_an_overlap_also_inside_a_long_call():
    sent = [body(A, 1), body(A, 2), body(A, 3), body(B, 1)]
    lines = [wrote(A, 1, 0, 100), wrote(A, 2, 10, 20), wrote(A, 3, 30, 40), wrote(B, 1, 0, 100)]
    assert check(sent, lines, [], {A: 3, B: 1}).overlaps == 2


def test_a_missing_key_a_strange_key_and_an_old_version_are_wrong():
    sent = [body(A, 1), body(A, 2), body(B, 1)]
    assert check(sent, [], [], {A: 1}).wrong == 2
    assert check(sent, [], [], {A: 2, B: 1, "strange": 1}).wrong == 1


def test_a_key_whose_changes_were_turned_round_is_out_of_turn():
    sent = [body(A, 1), body(A, 2)]
    lines = [wrote(A, 2, 0, 1), wrote(A, 1, 2, 3)]
    assert check(sent, lines, [Rewrite(A, 2, 1)], {A: 1}).out_of_turn == 1


def test_whoever_skips_changes_has_no_turns_to_keep():
    sent = [body(A, 1), body(A, 2)]
    lines = [wrote(A, 2, 0, 1), Line(Kind.SKIPPED, code(A), 1, 2, 2)]
    found = check(sent, lines, [], {A: 2})
    assert (found.out_of_turn, found.overlaps, found.calls) == (None, 0, 1)


def test_without_a_handler_there_are_no_calls_to_overlap():
    found = check([body(A, 1)], [Line(Kind.SETTLED, b"", 1, 0, 0)], [], {A: 1})
    assert (found.overlaps, found.calls) == (None, None)


def test_a_handler_that_does_nothing_is_wrong_where_it_never_gets_the_newest_version():
    sent = [body(A, 1), body(A, 2), body(B, 7)]
    called = [wrote(A, 1, 0, 0, Kind.CALLED), wrote(B, 7, 1, 1, Kind.CALLED)]
    assert check_calls(sent, called).wrong == 1
    assert check_calls(sent, [*called, wrote(A, 2, 2, 2, Kind.CALLED)]).wrong == 0
    skipped = Line(Kind.SKIPPED, code(A), 2, 2, 2)
    assert check_calls(sent, [*called, skipped]).wrong == 1


def test_a_handler_that_does_nothing_is_judged_by_its_calls_alone():
    sent = [body(A, 1), body(A, 2)]
    found = check_calls(sent, [wrote(A, 2, 0, 5), wrote(A, 1, 1, 6)])
    assert (found.backwards, found.repeats, found.overlaps) == (None, None, None)
    assert (found.calls, found.out_of_turn) == (2, 1)
    assert check_calls(sent, [wrote(A, 2, 0, 5)]).out_of_turn is None, "not all were handled"
