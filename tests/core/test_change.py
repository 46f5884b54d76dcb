"""The values that travel: versions from integers and times, orders, and bodies that are decoded when asked for."""

from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise.core.change import VERSION_MAX, VERSION_MIN, Change, ChangeHeader, is_unversioned, order_of, version_of
from keywise.core.errors import VersionError

EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize("version", [VERSION_MIN, -1, 0, 1, VERSION_MAX])
def test_a_whole_number_of_64_bits_is_a_version(version: int):
    assert version == version_of(version)


@pytest.mark.parametrize("version", [VERSION_MIN - 1, VERSION_MAX + 1, 10**30])
def test_a_number_beyond_64_bits_is_refused(version: int):
    with pytest.raises(VersionError, match=f"version {version} does not fit into 64 bits"):
        version_of(version)


@pytest.mark.parametrize("version", [True, False, 1.0, None, b"1", [1], float("nan")])
def test_anything_else_is_refused_with_what_is_expected(version: object):
    with pytest.raises(VersionError, match="must be a whole number or a datetime"):
        version_of(version)


@pytest.mark.parametrize(
    ("moment", "version"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 2, 0, 0, 1, tzinfo=EAST), 1),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), -1),
        (datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC), 1_767_323_045_678_901),
        (datetime.max.replace(tzinfo=UTC), 253_402_300_799_999_999),
    ],
)
def test_a_time_becomes_microseconds_since_1970_exactly(moment: datetime, version: int):
    assert version == version_of(moment) == version_of(moment.isoformat())


def test_a_time_without_a_zone_is_refused():
    naive = datetime(2026, 1, 2)  # noqa: DTZ001
    with pytest.raises(VersionError, match=r"no time zone.*add one"):
        version_of(naive)
    with pytest.raises(VersionError, match=r"no time zone.*add one"):
        version_of(naive.isoformat())


@pytest.mark.parametrize("text", ["", "5", "yesterday", "2026-13-01T00:00:00Z"])
def test_text_that_is_no_time_is_refused(text: str):
    with pytest.raises(VersionError, match="neither a whole number nor an RFC 3339 time"):
        version_of(text)


@given(*[st.datetimes(timezones=st.just(UTC))] * 2)
def test_versions_of_times_are_ordered_like_the_times(first: datetime, second: datetime):
    assert (first < second) == (version_of(first) < version_of(second))


def test_an_order_compares_era_then_version_then_generation():
    """Rules 16 and 20."""
    ascending = [(0, VERSION_MIN, 0), (0, 4, 9), (0, 5, 0), (0, 5, 1), (1, VERSION_MIN, 0)]
    assert ascending == sorted(ascending)
    assert order_of(5) == (0, 5, 0)
    assert order_of(5, era=2) == (2, 5, 0)


def test_an_unversioned_order_is_like_no_versioned_one():
    """Rule 21: not even version 0 is taken for it."""
    assert is_unversioned(order_of(None))
    assert not any(is_unversioned(order_of(version)) for version in (VERSION_MIN, -1, 0, 1, VERSION_MAX))
    assert Change("a", order_of(None)).version is None
    assert Change("a", order_of(0)).version == 0


def test_a_body_is_decoded_as_json_unless_the_pipeline_has_a_type():
    class Page(msgspec.Struct):
        id: str

    body = b'{"id": "a"}'
    assert Change("a", order_of(1), body=body).value == {"id": "a"}
    decode = msgspec.json.Decoder(Page).decode
    assert Page("a") == Change("a", order_of(1), body=body, decode=decode).value


def test_a_want_that_says_nothing_about_its_sending_is_never_late():
    assert ChangeHeader("a", None).sent_at == float("inf")
