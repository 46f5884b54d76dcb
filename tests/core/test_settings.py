"""Every limit and duration is checked once, and each refusal says what to do."""

import dataclasses

import pytest

from keywise.core.errors import KeywiseError, SettingsError
from keywise.core.settings import Settings, public_name, seconds

WORDS = ("history", "on_ledger_down", "journal")
NAMES = [field.name for field in dataclasses.fields(Settings) if field.name not in WORDS]


def test_the_defaults_work_together():
    settings = Settings()
    assert settings.retention_s is None, "nothing is forgotten by default"
    assert settings.margin_s < settings.lease_s <= settings.runtime_max_s
    assert settings.batch_max <= settings.prefetch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_nothing_may_be_zero_or_below(name: str, value: float):
    with pytest.raises(SettingsError, match=rf"{public_name(name)}={value} must be (above zero|a whole number)"):
        Settings(**{name: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [True, "5", [5]])
def test_everything_must_be_a_number(name: str, value: object):
    with pytest.raises(SettingsError, match=f"{public_name(name)}=.* must be a (whole )?number"):
        Settings(**{name: value})


@pytest.mark.parametrize("name", ["batch_max", "prefetch", "concurrency", "attempts_max", "crashes_max"])
def test_what_is_counted_must_be_a_whole_number(name: str):
    with pytest.raises(SettingsError, match=f"{name}=2.5 must be a whole number"):
        Settings(**{name: 2.5})


def test_only_the_retention_may_be_left_out():
    assert Settings(retention_s=None).retention_s is None
    with pytest.raises(SettingsError, match="lease=None must be a number"):
        Settings(lease_s=None)
    with pytest.raises(SettingsError, match="drain=inf must be above zero, and finite"):
        Settings(drain_s=float("inf"))


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().lease_s = 5.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"lease_s": 4.0, "margin_s": 2.0}, "the margin has to be below half of the lease"),
        ({"lease_s": 3.0}, 'write margin="0.75s" as well, or a lease above 4s'),
        ({"lease_s": 700.0}, "runtime_max=600.0 is below lease=700.0; raise it"),
        ({"retention_s": 60.0}, "raise retention, or lower redelivery if no message waits so long"),
        ({"prefetch": 10, "batch_max": 20}, "prefetch=10 is below batch_max=20: no batch could fill; raise prefetch"),
    ],
)
def test_settings_that_cannot_work_together_are_refused_with_what_to_do(given: dict[str, float], advice: str):
    with pytest.raises(SettingsError) as refused:
        Settings(**given)
    assert advice in str(refused.value)


def test_limits_that_just_fit_are_accepted():
    Settings(lease_s=4.0, margin_s=1.9, runtime_max_s=4.0)
    Settings(retention_s=3600.0, redelivery_s=3600.0)
    Settings(prefetch=20, batch_max=20)


def test_a_source_whose_messages_come_back_during_the_lease_is_refused():
    settings = Settings(lease_s=30.0)
    with pytest.raises(SettingsError) as refused:
        settings.check_visibility(20.0, "orders")
    assert "lease=30 is longer than the visibility of orders (20 s)" in str(refused.value)
    assert "set visibility=60s on the source, or a shorter lease" in str(refused.value)
    settings.check_visibility(30.0, "orders")
    settings.check_visibility(None, "orders")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500ms", 0.5),
        ("5s", 5.0),
        ("1.5s", 1.5),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("7d", 604_800.0),
        (" 5 s ", 5.0),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_a_duration_is_a_number_or_a_number_with_a_unit(text: float | str, value: float):
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "5", "s", "5 weeks", "-5s", "1e3s", "5s 3s", "nan", True])
def test_a_duration_that_is_not_understood_is_refused_with_examples(text: str):
    with pytest.raises(SettingsError, match="write for example 500ms, 5s, 10m, 2h or 7d"):
        seconds(text)


def test_a_refusal_is_an_error_of_ours():
    assert issubclass(SettingsError, KeywiseError)


@pytest.mark.parametrize("value", ["some", "", None, True])
def test_the_history_keeps_one_of_three_things(value):
    with pytest.raises(SettingsError, match="write one of events, all, none"):
        Settings(history=value)


@pytest.mark.parametrize("value", ["write anyway", "", None, True])
def test_an_outage_is_met_in_one_of_two_ways(value):
    with pytest.raises(SettingsError, match="write one of wait, write-anyway"):
        Settings(on_ledger_down=value)


@pytest.mark.parametrize("value", ["", 5, True])
def test_a_journal_is_a_folder(value):
    with pytest.raises(SettingsError, match="names no folder"):
        Settings(journal=value)


def test_write_anyway_needs_a_journal():
    with pytest.raises(SettingsError, match="needs a folder for its notes, which outlives the worker"):
        Settings(on_ledger_down="write-anyway")
    assert Settings(on_ledger_down="write-anyway", journal="here").journal == "here"
