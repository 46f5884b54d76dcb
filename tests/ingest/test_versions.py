"""Versions of objects: they grow as the store's own order does, fit 63 bits, and never mix two scales."""

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise.core.change import VERSION_MAX, order_of
from keywise.core.errors import VersionError
from keywise.ingest.versions import (
    OrderPromise,
    VersionScale,
    clock_version,
    counter_version,
    event_time_version,
    generation_version,
    scale_conflict,
    sequencer_version,
)


def seconds(year: int, month: int = 1, day: int = 1) -> int:
    return int(datetime(year, month, day, tzinfo=UTC).timestamp())


FIRST_S, END_S = seconds(2014, 11, 13), 0x54000000 + 2**31
"""When S3 began to send notifications, and when their versions end."""
MOMENTS = st.tuples(st.integers(FIRST_S, END_S - 1), st.integers(0, 2**32 - 1))
"""Seconds, and a fraction of one in units of 2**-32."""


def sequencer(moment: tuple[int, int], *, leading: bool = True, trimmed: bool = False) -> str:
    digits = f"{moment[0]:08X}{moment[1]:08X}"
    return ("00" if leading else "") + (digits.rstrip("0") if trimmed else digits)


def test_a_sequencer_is_a_time_so_it_grows_by_two_to_the_32nd_a_second():
    earlier, later = sequencer_version("0055AED6DCD90281E5"), sequencer_version("005E64A65DF093B26D")
    assert (later - earlier) / 2**32 == pytest.approx(0x5E64A65D - 0x55AED6DC, abs=1)
    assert earlier == (0x55AED6DC - 0x54000000 << 32) + 0xD90281E5


@given(st.lists(MOMENTS, min_size=2, max_size=10, unique=True).map(sorted), st.data())
def test_versions_of_sequencers_grow_with_time_however_they_are_written(
    moments: list[tuple[int, int]], data: st.DataObject
):
    written = [sequencer(at, leading=data.draw(st.booleans()), trimmed=data.draw(st.booleans())) for at in moments]
    versions = [sequencer_version(text) for text in written]
    assert all(earlier < later for earlier, later in pairwise(versions))


@given(MOMENTS)
def test_versions_of_sequencers_are_those_that_a_search_engine_accepts_until_2082(moment: tuple[int, int]):
    assert seconds(2082, 9, 16) < END_S
    assert 0 <= sequencer_version(sequencer(moment)) <= VERSION_MAX


def test_upper_and_lower_case_and_the_leading_zeros_make_no_difference():
    assert sequencer_version("617f08299329d189") == sequencer_version("00617F08299329D189")
    assert sequencer_version("00667DFD00") == sequencer_version("667dfd0000000000")


@pytest.mark.parametrize(
    "text",
    [
        "0A1B2C3D4E5F678901",  # The sample event of the Lambda console.
        "806426F0F6480F8EE8",
        f"{END_S:08X}00000000",
        "00FFFFFFFFFFFFFFFF",
        "01" + "0" * 16,
        "0" * 20,
        "1" * 5000,
    ],
)
def test_a_sequencer_that_does_not_fit_is_refused_with_what_to_do(text: str):
    with pytest.raises(VersionError, match=r"function: dialect=…|check the service"):
        sequencer_version(text)


@pytest.mark.parametrize("text", ["", "x", "0x55", "-1", "+1", "1_0", " 12", "12\n", "٣", "0" * 65])
def test_a_sequencer_that_is_no_number_is_refused(text: str):
    for read in (sequencer_version, counter_version):
        with pytest.raises(VersionError, match="no hexadecimal number"):
            read(text)
    with pytest.raises(VersionError, match="no hexadecimal number"):
        clock_version(text, deleted=False)


@given(st.lists(st.integers(0, VERSION_MAX), min_size=2, unique=True).map(sorted))
def test_a_counter_is_compared_as_a_number(counts: list[int]):
    assert [counter_version(f"{count:X}") for count in counts] == counts


def test_what_is_too_large_for_a_counter_a_clock_or_a_generation_is_refused():
    with pytest.raises(VersionError, match="does not fit into 64 bits"):
        counter_version(f"{VERSION_MAX + 1:X}")
    with pytest.raises(VersionError, match="does not fit into 64 bits"):
        clock_version(f"{2**62:X}", deleted=False)
    with pytest.raises(VersionError, match="does not fit into 64 bits"):
        generation_version(str(2**62), deleted=False)


def test_clocks_and_generations_last_until_2100():
    last_s = seconds(2100)
    assert clock_version(f"{last_s * 10**9:X}", deleted=True) <= VERSION_MAX
    assert generation_version(str(last_s * 10**6), deleted=True) <= VERSION_MAX


@given(st.integers(0, 2**62 - 2))
def test_a_deletion_comes_after_its_generation_and_before_the_next_one(generation: int):
    created, deleted = (generation_version(str(generation), deleted=gone) for gone in (False, True))
    assert created < deleted < generation_version(str(generation + 1), deleted=False)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e3", "0x1", "٣", "1" * 65])
def test_a_generation_that_is_no_number_is_refused(text: str):
    with pytest.raises(VersionError, match="no whole number"):
        generation_version(text, deleted=False)


def test_the_time_of_an_event_is_microseconds_and_a_deletion_in_the_same_millisecond_comes_after():
    moment = "2024-06-27T14:14:44.372Z"
    assert event_time_version(moment, deleted=False) == 1719497684372000
    assert event_time_version(moment, deleted=True) == 1719497684372001


@pytest.mark.parametrize("moment", ["", "yesterday", "2024-06-27T14:14:44.372"])
def test_a_time_that_hosts_would_read_differently_is_refused(moment: str):
    with pytest.raises(VersionError):
        event_time_version(moment, deleted=False)


def test_the_first_event_fixes_the_scale_and_others_are_refused_by_both_names():
    assert scale_conflict(None, VersionScale.EVENT_TIME) is None
    for fixed in VersionScale:
        for found in VersionScale:
            cause = scale_conflict(fixed, found)
            assert (cause is None) == (fixed is found)
            assert cause is None or (f"({fixed})" in cause and f"({found})" in cause and "pipeline of its own" in cause)


def test_a_stored_scale_is_read_back():
    assert [VersionScale(scale.value) for scale in VersionScale] == [*VersionScale]


def test_clocks_promise_less_than_counters():
    assert VersionScale.S3_SEQUENCER.promise is OrderPromise.NEWEST_WINS
    assert VersionScale.GCS_GENERATION.promise is OrderPromise.NEWEST_WINS
    assert VersionScale.EVENT_TIME.promise is OrderPromise.CONVERGES
    assert VersionScale.MINIO_CLOCK.promise is OrderPromise.CONVERGES
    assert VersionScale.UNVERSIONED.promise is OrderPromise.ONCE
    assert order_of(None) < order_of(0)
