"""What the engine is told of a change, and what its answers mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.opensearch.stub_engine import lines_of
from keywise.adapters.http.client import HttpResponse
from keywise.adapters.opensearch.documents import (
    REMEMBERED,
    Action,
    Conflict,
    Item,
    Reason,
    action_of,
    cause_of,
    first_batch,
    index_of,
    line_of,
    refused,
    result_of,
    result_of_conflict,
)
from keywise.core.change import VERSION_MAX, VERSION_MIN, Change, Outcome, order_of
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AddressError
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult

BODIES = st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.text(), st.lists), max_size=5)


def change_of(order, *, deleted=False, body=b'{"a":1}') -> Change:
    return Change("k", order, deleted, body=body)


def told(change: Change, order=None, held=None) -> list:
    """What the lines of a change say; the claim has its order, unless another is given."""
    action = action_of(change, Claim("k", order or change.order, change.deleted, 1), held or {})
    assert isinstance(action, Action), action
    return list(lines_of(action.lines))


def cause(change: Change, order=None) -> str:
    """Why a change is not even sent."""
    result = action_of(change, Claim("k", order or change.order, change.deleted, 1), {})
    assert isinstance(result, SinkResult) and result.permanent and result.certainty is Certainty.CLEAN
    return result.cause


def test_a_put_is_its_version_and_its_body_as_it_is():
    body = '{"title" : "ünï \\n", "n":1e2}'.encode()
    action = action_of(change_of(order_of(7), body=body), Claim("k", order_of(7), False, 1), {})
    assert isinstance(action, Action)
    assert action.lines == b'{"index":{"_id":"k","version":7,"version_type":"external"}}\n' + body + b"\n"


def test_a_deletion_has_no_body():
    assert told(change_of(order_of(VERSION_MAX), deleted=True)) == [
        {"delete": {"_id": "k", "version": VERSION_MAX, "version_type": "external"}}
    ]


@given(st.text(min_size=1), BODIES, st.sampled_from([None, 2]))
def test_any_key_and_any_object_are_two_lines(key, fields, indent):
    body = json.dumps(fields, indent=indent).encode()
    action = action_of(Change(key, order_of(1), body=body), Claim(key, order_of(1), False, 1), {})
    assert isinstance(action, Action)
    head, document = lines_of(action.lines)
    assert head["index"]["_id"] == key and document == fields
    assert action.lines.count(b"\n") == 2


@pytest.mark.parametrize("body", [b"", b"5", b'"text"', b"[]", b"null", b"{", b'{"a":1}{}', b'{"a":tru}', b"\xff"])
def test_what_is_no_object_is_not_sent(body):
    assert "no JSON object" in cause(change_of(order_of(1), body=body))


def test_an_object_without_line_breaks_is_not_touched():
    assert line_of(body := b'{ "a" : [1, 2] }') is body
    assert line_of(b'{\n "a": "b\\nc"\r\n}') == b'{"a":"b\\nc"}'


def test_an_equal_version_passes_only_for_a_generation_and_a_repair():
    def rule(order, claimed) -> str:
        action = action_of(change_of(order), Claim("k", claimed, False, 1), {})
        assert isinstance(action, Action)
        return lines_of(action.lines)[0]["index"]["version_type"]

    assert rule((0, 5, 0), (0, 5, 0)) == "external"
    assert rule((0, 0, -1), (0, 0, -1)) == "external", "a change without a version"
    assert rule((0, 5, 1), (0, 5, 1)) == "external_gte"
    assert rule((0, 5, 0), None) == "external_gte", "a repair"


def test_an_era_needs_a_fresh_index():
    assert "fresh index" in cause(change_of((0, 5, 0)), order=(1, 5, 0))


def test_a_version_below_zero_is_refused():
    assert "version -1 is below 0" in cause(change_of(order_of(-1)))
    assert "below 0" in cause(change_of(order_of(-1), deleted=True))


def test_a_removal_of_a_key_without_a_version_goes_by_what_is_there():
    removal = change_of(order_of(VERSION_MIN), deleted=True)
    assert told(removal, held={"k": 9}) == [{"delete": {"_id": "k", "version": 9, "version_type": "external_gte"}}]
    assert action_of(removal, Claim("k", removal.order, True, 1), {}) is APPLIED


def test_a_request_holds_as_much_as_fits():
    actions = [Action(str(number), False, 1, b"x" * 10) for number in range(5)]
    assert len(first_batch(actions, 3, 1000)) == 3
    assert len(first_batch(actions, 9, 25)) == 2
    assert len(first_batch(actions, 9, 5)) == 1, "what is too large goes alone"


PUT, DELETE = Action("k", False, 5, b""), Action("k", True, 5, b"")


def conflict(current: int, action: Action = PUT) -> SinkResult | Conflict:
    words = f"[k]: version conflict, current version [{current}] is higher or equal to the one provided [5]"
    return result_of(action, Item(409, Reason("version_conflict_engine_exception", words)))


def test_a_conflict_with_something_newer_is_no_error():
    assert conflict(6) is SUPERSEDED
    assert conflict(6, DELETE) is SUPERSEDED
    assert (
        result_of(PUT, Item(409, Reason("x", "current version [6] is higher than the one provided [5]"))) is SUPERSEDED
    )


def test_a_conflict_at_the_same_version_was_applied():
    assert conflict(5, DELETE) is APPLIED
    assert conflict(5) is Conflict.EQUAL
    assert result_of_conflict(PUT, Conflict.EQUAL, 5) is APPLIED
    assert result_of_conflict(PUT, Conflict.EQUAL, 6) is SUPERSEDED
    assert result_of_conflict(PUT, Conflict.EQUAL, None) is REMEMBERED, "an operator removed it at this version"


def test_a_conflict_in_other_words_is_looked_into():
    key = "current version [9] is higher or equal to the one provided [9]"
    assert result_of(PUT, Item(409, Reason("x", f"[{key}]: conflict"))) is Conflict.UNCLEAR
    assert result_of(PUT, Item(409, Reason("x", None))) is Conflict.UNCLEAR
    assert result_of_conflict(PUT, Conflict.UNCLEAR, None) is REMEMBERED
    assert result_of_conflict(DELETE, Conflict.UNCLEAR, None) is APPLIED
    assert result_of_conflict(DELETE, Conflict.UNCLEAR, 5) is APPLIED
    assert result_of_conflict(DELETE, Conflict.UNCLEAR, 7) is SUPERSEDED


@pytest.mark.parametrize(
    ("status", "kind", "outcome", "permanent", "certainty"),
    [
        (400, "mapper_parsing_exception", Outcome.FAILED, True, Certainty.CLEAN),
        (429, "rejected_execution_exception", Outcome.BUSY, False, Certainty.CLEAN),
        (503, "unavailable_shards_exception", Outcome.BUSY, False, Certainty.CLEAN),
        (403, "cluster_block_exception", Outcome.BUSY, False, Certainty.CLEAN),
        (404, "index_not_found_exception", Outcome.BUSY, False, Certainty.CLEAN),
        (500, "exception", Outcome.FAILED, False, Certainty.ENDED),
    ],
)
def test_an_item_is_to_blame_or_not(status, kind, outcome, permanent, certainty):
    result = result_of(PUT, Item(status, Reason(kind, "why", Reason("deeper", "number"))))
    assert result == SinkResult(outcome, f"{kind}: why: number", permanent, certainty)


def test_an_item_without_an_error_was_applied():
    assert result_of(PUT, Item(201)) is APPLIED
    assert result_of(DELETE, Item(404)) is APPLIED


@pytest.mark.parametrize(
    ("status", "outcome", "permanent", "certainty"),
    [
        (400, Outcome.FAILED, True, Certainty.CLEAN),
        (413, Outcome.FAILED, True, Certainty.CLEAN),
        (301, Outcome.BUSY, False, Certainty.CLEAN),
        (401, Outcome.BUSY, False, Certainty.CLEAN),
        (404, Outcome.BUSY, False, Certainty.CLEAN),
        (429, Outcome.BUSY, False, Certainty.CLEAN),
        (500, Outcome.FAILED, False, Certainty.UNKNOWN),
        (502, Outcome.BUSY, False, Certainty.UNKNOWN),
        (503, Outcome.BUSY, False, Certainty.UNKNOWN),
        (504, Outcome.BUSY, False, Certainty.UNKNOWN),
        (524, Outcome.BUSY, False, Certainty.UNKNOWN),
    ],
)
def test_a_whole_request_that_is_refused_blames_its_changes_only_for_what_they_are(
    status, outcome, permanent, certainty
):
    assert refused(HttpResponse(status, {}, b""), "why") == SinkResult(outcome, "why", permanent, certainty)


@pytest.mark.parametrize(
    ("status", "body", "outcome", "certainty"),
    [
        (503, b'{"error":{"type":"cluster_block_exception"},"status":503}', Outcome.BUSY, Certainty.CLEAN),
        (500, b'{"error":{"type":"x_exception"},"status":500}', Outcome.FAILED, Certainty.ENDED),
        (504, b'{"error":{"type":"timeout_exception"},"status":504}', Outcome.FAILED, Certainty.UNKNOWN),
        (503, b'{"error":{"type":"cluster_block_exception"},"status":500}', Outcome.BUSY, Certainty.UNKNOWN),
        (503, b'{"error":{"type":"cluster_block_exception"}}', Outcome.BUSY, Certainty.UNKNOWN),
        (503, b'{"error":"Service Unavailable","status":503}', Outcome.BUSY, Certainty.UNKNOWN),
        (503, b'{"error":{"reason":"away"},"status":503}', Outcome.BUSY, Certainty.UNKNOWN),
        (503, b"<html>", Outcome.BUSY, Certainty.UNKNOWN),
    ],
)
def test_only_the_engine_itself_knows_that_nothing_was_written(status, body, outcome, certainty):
    """Its errors have a type and their status; whatever else answers does not know what the engine is at."""
    assert refused(HttpResponse(status, {}, body), "why") == SinkResult(outcome, "why", certainty=certainty)


def test_a_refusal_is_told_in_the_words_of_the_engine():
    told = b'{"error":{"type":"security_exception","reason":"no rights"},"status":403}'
    assert cause_of(HttpResponse(403, {}, told), str) == "status 403, security_exception: no rights"
    assert cause_of(HttpResponse(405, {}, b'{"error":"not allowed"}'), str) == "status 405, not allowed"
    assert cause_of(HttpResponse(502, {}, b"<html>"), str.upper) == "status 502, <HTML>"
    assert cause_of(HttpResponse(413, {}, b""), str) == "status 413"


@pytest.mark.parametrize(
    "path", ["", "/", "/a/b", "/Pages", "/_all", "/-a", "/a*", "/a,b", "/<a>", "/a b", "/" + "a" * 256]
)
def test_a_url_names_one_index(path):
    with pytest.raises(AddressError, match=r"write for example opensearch://x/pages"):
        index_of(path, "opensearch://x/pages")


def test_names_of_indexes_may_have_signs_and_other_letters():
    assert index_of("/pages-v2.1+é", "") == "pages-v2.1+é"
