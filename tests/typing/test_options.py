"""The typed options of a pipeline are its settings, and a misspelt one is refused with what to write."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest

import keywise
from keywise.core.errors import SettingsError
from keywise.core.settings import Settings
from keywise.options import PIPELINE_WORDS, PipelineOptions


def option_of(name: str, kind: object) -> tuple[str, object]:
    """A setting as people give it: a duration is a number of seconds or text, and its name has no unit."""
    if not name.endswith("_s"):
        return name, kind
    return name.removesuffix("_s"), {float: float | str, float | None: float | str | None}[kind]


def test_the_options_are_the_settings_with_their_types():
    settings = get_type_hints(Settings)
    expected = dict(option_of(field.name, settings[field.name]) for field in fields(Settings))
    assert get_type_hints(PipelineOptions) == expected
    assert not PipelineOptions.__required_keys__


def test_the_other_words_are_the_parameters():
    parameters = inspect.signature(keywise.App.pipeline).parameters.values()
    assert tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY) == PIPELINE_WORDS


@pytest.mark.parametrize("word", [*PIPELINE_WORDS, "lease", "batch_max", "on_ledger_down"])
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(word: str):
    misspelt = f"{word[:-1]}x{word[-1]}" if len(word) > 3 else f"{word}s"
    with pytest.raises(SettingsError, match=f"unknown setting '{misspelt}'; did you mean {word}\\?"):
        keywise.App("memory://").pipeline("shop", **{"key": "id", misspelt: "v"})


def test_a_duration_has_one_name():
    app = keywise.App("memory://")
    assert app.pipeline("text", key="id", lease="45s").settings.lease_s == 45.0
    assert app.pipeline("number", key="id", lease=45).settings.lease_s == 45.0
    with pytest.raises(SettingsError, match=r"unknown setting 'lease_s'; write lease=$"):
        app.pipeline("unit", key="id", lease_s=45)
    with pytest.raises(SettingsError, match=r"unknown setting 'lease_s'; write lease=$"):
        app.serial("unit", key=str, lease_s=45)(str)


def test_retry_gives_way_to_what_is_said_beside_it():
    retry = keywise.Retry(attempts=7, backoff="2s", max="9s")
    settings = keywise.App("memory://").pipeline("shop", key="id", retry=retry, backoff=3).settings
    assert (settings.attempts_max, settings.backoff_s, settings.backoff_max_s) == (7, 3.0, 9.0)
