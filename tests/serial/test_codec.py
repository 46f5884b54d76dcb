"""Serial functions as they are written: which keys they have, and what is refused at once."""

import datetime

import pytest

import keywise
from keywise.core import errors
from keywise.core.errors import RefusedError, SettingsError
from keywise.serial.codec import key_text


def by_key(case: dict) -> str:
    return case["key"]


def test_keys_are_text_and_tuples_have_slashes():
    assert key_text("a/b") == "a/b"
    assert key_text(("a/b", 7, datetime.date(2026, 1, 2))) == "a%2Fb/7/2026-01-02"
    for wrong in ("", 1.5, True, None, "\0", "k" * 513, ("a", None)):
        with pytest.raises(RefusedError):
            key_text(wrong)


def test_a_function_that_cannot_be_serial_is_refused_at_once():
    app = keywise.App("memory://")
    for wrong in (lambda: None, lambda a, b, c: None):
        with pytest.raises(SettingsError):
            app.serial("f", key=by_key)(wrong)
    with pytest.raises(SettingsError, match="did you mean lease"):
        app.serial("f", key=by_key, leese="3s")(lambda claim, case: None)
    with pytest.raises(SettingsError, match=r'lease=3s .* write margin="0.75s" as well, or a lease above 4s'):
        app.serial("f", key=by_key, lease="3s")(lambda claim, case: None)
    app.serial("short", key=by_key, lease="3s", margin="0.75s")(lambda claim, case: None)
    app.serial("long", key=by_key, lease="4.1s")(lambda claim, case: None)
    with pytest.raises(SettingsError, match="mode 'maybe'"):
        app.serial("f", key=by_key, mode="maybe")(lambda claim, case: None)
    app.serial("f", key=by_key)(lambda claim, case: None)
    with pytest.raises(SettingsError, match="taken"):
        app.serial("f", key=by_key)
    assert issubclass(errors.LostError, errors.OutcomeUnknownError)
