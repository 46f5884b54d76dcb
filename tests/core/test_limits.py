"""Limits on one key: what may be written, and what is said to whoever writes something else."""

import pytest

import keywise
from keywise.core.errors import SettingsError
from keywise.core.limits import Debounce, Rate, Snooze


def test_durations_are_text_or_seconds_and_mean_the_same():
    assert Rate(2, per="500ms") == Rate(2, per=0.5)
    assert Debounce("500ms", max_wait="5s") == Debounce(0.5, max_wait=5)
    assert Snooze("2m").delay_s == Snooze(120).delay_s == 120.0


def test_a_rate_has_an_even_pace_and_a_burst_of_its_number():
    assert (Rate(4, per="2s").interval_s, Rate(4, per="2s").burst_s) == (0.5, 1.5)
    assert (Rate(1, per="1s").interval_s, Rate(1, per="1s").burst_s) == (1.0, 0.0)


def test_a_burst_is_due_when_it_was_quiet_but_not_later_than_the_longest_wait():
    debounce = Debounce(1.0, max_wait=5.0)
    assert debounce.due(first_at=10.0, last_at=10.0) == 11.0
    assert debounce.due(first_at=10.0, last_at=13.5) == 14.5
    assert debounce.due(first_at=10.0, last_at=14.9) == 15.0


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "1", None])
def test_a_rate_of_no_whole_number_is_refused_with_what_to_write(n: object):
    with pytest.raises(SettingsError, match=r'write Rate\(1, per="1s"\)'):
        Rate(n, per="1s")


@pytest.mark.parametrize("duration", [0, -1.0, float("inf"), float("nan"), "soon", "5 parsecs", "", True, None])
def test_a_duration_that_is_none_is_refused_with_what_to_write(duration: object):
    for make in (
        lambda: Rate(1, per=duration),
        lambda: Debounce(duration, max_wait="5s"),
        lambda: Debounce("1s", max_wait=duration),
        lambda: Snooze(duration),
    ):
        with pytest.raises(SettingsError, match="write for example 500ms"):
            make()


def test_a_longest_wait_below_the_quiet_time_is_refused_with_what_to_do():
    with pytest.raises(SettingsError, match=r"max_wait=1.0 is below quiet=2.0; raise it"):
        Debounce("2s", max_wait="1s")


def test_a_limit_of_another_kind_is_refused_with_what_to_write():
    app = keywise.App("memory://")
    with pytest.raises(SettingsError, match=r'write rate=Rate\(1, per="1s"\)'):
        app.pipeline("a", key="id", rate=5)
    with pytest.raises(SettingsError, match=r'write debounce=Debounce\("500ms", max_wait="5s"\)'):
        app.pipeline("b", key="id", debounce="500ms")
    with pytest.raises(SettingsError, match="write one of live, bulk"):
        app.pipeline("c", key="id").source("memory://", lane="slow")
