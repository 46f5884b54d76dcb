"""JSON becomes attributes and back without a loss, and conditions say what may replace what."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise.adapters.dynamodb.items import (
    AttributeNames,
    ConditionalPut,
    HeldItem,
    attributes_of,
    fields_of,
    held_of,
    result_of_refusal,
    row_of,
    write_of,
)
from keywise.core.change import VERSION_MAX, VERSION_MIN, Change, Outcome, order_of
from keywise.core.entry import Claim
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult

PLAIN = AttributeNames(version="version", tombstone="gone")
WITH_GENERATION = AttributeNames(version="version", generation="reindexVersion", tombstone="gone")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.text()
    | st.integers(-(10**38) + 1, 10**38 - 1)
    | st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=8,
)


def text_of(value) -> str:
    """A JSON value with all digits of its decimals."""
    match value:
        case Decimal():
            return str(value)
        case list():
            return f"[{','.join(map(text_of, value))}]"
        case dict():
            parts = [f"{json.dumps(name)}:{text_of(one)}" for name, one in value.items()]
            return "{" + ",".join(parts) + "}"
        case _:
            return json.dumps(value)


@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=4))
def test_a_body_comes_back_with_all_digits(fields):
    row = row_of(attributes_of(text_of(fields).encode()))
    assert json.loads(row, parse_float=Decimal, parse_int=Decimal) == json.loads(
        text_of(fields), parse_float=Decimal, parse_int=Decimal
    )


def test_numbers_keep_their_digits():
    item = attributes_of(b'{"a":0.1,"b":12345678901234567890123456789012345678,"c":100,"d":-0.0,"e":1.50}')
    assert {name: value["N"] for name, value in item.items()} == {
        "a": "0.1",
        "b": "12345678901234567890123456789012345678",
        "c": "1E+2",
        "d": "0",
        "e": "1.5",
    }
    assert fields_of(item) == {"a": 0.1, "b": 12345678901234567890123456789012345678, "c": 100, "d": 0, "e": 1.5}


@pytest.mark.parametrize(
    "number", ["1" * 39, "1.2345678901234567890123456789012345678901", "1e126", "1e-131", "1e9999999"]
)
def test_a_number_that_does_not_fit_is_refused_by_name(number):
    with pytest.raises(ValueError, match=r"price\.net is a number that DynamoDB cannot hold.*send it as text"):
        attributes_of(b'{"price":{"net":%b}}' % number.encode())


@pytest.mark.parametrize("body", [b"", b"5", b"[]", b"null", b"{", b'{"a":NaN}', b"\xff", b'{"a":' + b"[" * 100_000])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(ValueError, match="no JSON object"):
        attributes_of(body)


def test_types_that_json_has_not_become_lists_and_base64():
    item = {
        "tags": {"SS": ["b", "a"]},
        "sizes": {"NS": ["10", "9.5"]},
        "raw": {"B": b"\xff"},
        "all": {"BS": [b"b", b"a"]},
    }
    assert json.loads(row_of(item)) == {"tags": ["a", "b"], "sizes": [9.5, 10], "raw": "/w==", "all": ["YQ==", "Yg=="]}


def change_of(order, *, deleted=False, body=b'{"a":1}') -> Change:
    return Change("k", order, deleted, body=body)


def write(change: Change, names: AttributeNames = PLAIN, *, is_repair: bool = False) -> ConditionalPut:
    found = write_of(change, Claim("k", None if is_repair else change.order, change.deleted, 1), "id", names)
    assert isinstance(found, ConditionalPut), found
    return found


def cause(change: Change) -> str:
    result = write_of(change, Claim("k", change.order, change.deleted, 1), "id", PLAIN)
    assert isinstance(result, SinkResult) and result.permanent
    return result.cause


def test_an_item_has_key_version_and_body():
    assert write(change_of(order_of(7), body=b'{"id":"x","version":"old","a":1}')).item == {
        "id": {"S": "k"},
        "version": {"N": "7"},
        "a": {"N": "1"},
    }
    assert write(change_of((0, 7, 2)), WITH_GENERATION).item["reindexVersion"] == {"N": "2"}


def test_a_tombstone_has_no_body():
    assert write(change_of(order_of(VERSION_MAX), deleted=True)).item == {
        "id": {"S": "k"},
        "version": {"N": str(VERSION_MAX)},
        "gone": {"BOOL": True},
    }


def test_what_can_never_be_written_says_why():
    assert "era 1" in cause(change_of((1, 7, 0)))
    assert "no JSON object" in cause(change_of(order_of(1), body=b"[]"))
    assert "tombstone=" in cause(change_of(order_of(1), body=b'{"gone":false}'))


@pytest.mark.parametrize("names", [PLAIN, WITH_GENERATION], ids=["versions", "generations"])
def test_only_a_newer_version_replaces_an_item(names):
    one = write(change_of(order_of(VERSION_MIN + 1)), names)
    assert one.condition == "attribute_not_exists(#version) OR #version < :version"
    assert (one.names, one.values) == ({"#version": "version"}, {":version": {"N": str(VERSION_MIN + 1)}})


def test_an_equal_version_passes_for_a_generation_and_for_a_repair():
    not_older = "attribute_not_exists(#version) OR #version <= :version"
    assert write(change_of((0, 7, 1))).condition == not_older
    assert write(change_of((0, 7, 0)), is_repair=True).condition == not_older
    assert write(change_of((0, 7, 0)), WITH_GENERATION, is_repair=True).condition == not_older
    newer = "attribute_not_exists(#version) OR #version < :version OR (#version = :version AND ({}))"
    of_generation = "attribute_not_exists(#generation) OR #generation < :generation"
    one = write(change_of((0, 7, 1)), WITH_GENERATION)
    assert one.condition == newer.format(of_generation)
    assert (one.names["#generation"], one.values[":generation"]) == ("reindexVersion", {"N": "1"})


@pytest.mark.parametrize(
    ("held", "order", "deleted", "result"),
    [
        (HeldItem(8, 0, False), (0, 7, 0), False, SUPERSEDED),
        (HeldItem(7, 0, False), (0, 7, 0), False, APPLIED),
        (HeldItem(7, 3, False), (0, 7, 2), False, SUPERSEDED),
        (HeldItem(7, 2, False), (0, 7, 2), False, APPLIED),
        (HeldItem(7, 0, True), (0, 7, 0), True, APPLIED),
        (HeldItem(7, 0, True), (0, 7, 0), False, SUPERSEDED),
        (HeldItem(8, 0, True), (0, 7, 9), False, SUPERSEDED),
    ],
)
def test_a_refused_condition_is_judged_by_what_the_table_holds(held, order, deleted, result):
    names = WITH_GENERATION
    assert result_of_refusal(write(change_of(order, deleted=deleted), names), held, names) == result


def test_a_refusal_that_makes_no_sense_is_tried_again_and_one_without_a_version_is_not():
    one = write(change_of(order_of(7)))
    assert result_of_refusal(one, None, PLAIN).outcome is Outcome.BUSY
    assert result_of_refusal(one, HeldItem(6, 0, False), PLAIN).outcome is Outcome.BUSY
    assert result_of_refusal(one, HeldItem(None, 0, False), PLAIN).permanent


def test_what_is_held_is_read_from_an_item():
    item = {"version": {"N": "7"}, "reindexVersion": {"N": "2"}, "gone": {"BOOL": True}}
    assert held_of(item, WITH_GENERATION) == HeldItem(7, 2, True)
    assert held_of(item, PLAIN) == HeldItem(7, 0, True)
    assert (
        held_of({"version": {"S": "7"}}, PLAIN) == held_of({"version": {"N": "7.5"}}, PLAIN) == HeldItem(None, 0, False)
    )
