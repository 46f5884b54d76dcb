"""Where an exception of user code comes from: the line in the cause, and the whole traceback in the dead letter."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from keywise.core.errors import PermanentError, SettingsError, UnavailableError
from keywise.core.failures import cause_of_error, storable
from keywise.core.tracebacks import TRACEBACK_MAX, traceback_of
from keywise.core.url import Address
from keywise.flow.intake import FunctionRoute


def raised(act: Callable[[], object], ours: int = 1) -> Exception:
    """What an act raises, with a traceback that begins after so many calls of this file."""
    try:
        act()
    except Exception as error:
        for _ in range(ours):
            error.__traceback__ = error.__traceback__.tb_next
        return error
    raise AssertionError("it was expected to raise")


def look_up() -> object:
    return json.loads("{")


def test_the_cause_names_the_innermost_line_of_the_users_own_code():
    """Not the line of the library that raised: the user has to change a line of his own."""
    line = look_up.__code__.co_firstlineno + 1
    assert cause_of_error(raised(look_up)).endswith(
        f" ({Path(__file__).relative_to(Path.cwd())}, line {line}, in look_up)"
    )


def test_an_error_that_no_code_of_the_users_raised_names_no_line():
    async def read(body: dict) -> None: ...

    error = raised(lambda: FunctionRoute(read), ours=2)
    assert isinstance(error, SettingsError)
    assert ", line " not in cause_of_error(error)


def installed(tmp_path: Path, place: str) -> Callable[[], object]:
    """A function of a package that was installed."""
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text("def act(value=None):\n    raise ValueError('no such page')\n")
    spec = importlib.util.spec_from_file_location("installed_act", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.act


def test_an_app_that_is_installed_as_a_package_has_lines_too(tmp_path):
    act = installed(tmp_path, "site-packages/shop/pages.py")
    read = FunctionRoute(act)
    error = raised(lambda: read(b"{}"))
    assert "pages.py, line 2, in act" in str(error)


def test_a_client_library_is_not_the_users_code(tmp_path):
    act = installed(tmp_path, "site-packages/client/client.py")
    error = raised(lambda: Address("memory://", "shop", {}).shared(act), ours=2)
    assert cause_of_error(error) == "ValueError: no such page"


def test_a_long_message_does_not_push_the_line_out_of_the_cause():
    def shout() -> None:
        raise ValueError("x" * 10_000)

    assert storable(cause_of_error(raised(shout))).endswith("in shout)")


def test_a_traceback_is_whole_with_all_causes_and_begins_at_the_users_code():
    def index() -> None:
        try:
            look_up()
        except ValueError as error:
            raise PermanentError("no such page") from error

    text = traceback_of(raised(index))
    assert text.startswith("Traceback (most recent call last):\n")
    assert "JSONDecodeError" in text and "in look_up" in text and "in index" in text and "direct cause" in text
    assert text.endswith("PermanentError: no such page")


def test_a_long_traceback_keeps_its_beginning_and_its_end():
    def shout() -> None:
        raise ValueError("a" + "x" * 2 * TRACEBACK_MAX + "z")

    text = traceback_of(raised(shout))
    assert len(text) <= TRACEBACK_MAX
    assert text.startswith("Traceback") and text.endswith("xz") and "characters left out" in text


def test_a_traceback_that_no_store_takes_is_made_harmless():
    def shout() -> None:
        raise ValueError("a\0b \ud800")

    assert "a\\x00b \\ud800" in traceback_of(raised(shout))


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("cannot reach amqp://shop:s3cret@host/x", "cannot reach amqp://shop:***@host/x"),
        ("https://host/a?api_key=s3cret&page=2 says no", "https://host/a?api_key=***&page=2 says no"),
        ("'postgresql://shop:s3/c@re#t@host/db'", "'postgresql://shop:***@host/db'"),
        ("http://host:80/a mail me@host", "http://host:80/a mail me@host"),
    ],
)
def test_secrets_in_urls_stay_out_of_causes_and_tracebacks(said: str, kept: str):
    error = raised(lambda: int(said))
    assert kept in cause_of_error(ValueError(said)) and kept in traceback_of(error)
    assert "s3" not in cause_of_error(error)


def test_an_error_whose_text_cannot_be_made_has_a_traceback_all_the_same():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def shout() -> None:
        raise Mute

    assert "in shout" in traceback_of(raised(shout))


def test_a_server_that_is_away_has_no_traceback():
    """It says itself what is away, and the lines that noticed it are of no use to an operator."""
    assert traceback_of(UnavailableError("host:80: refused")) == ""
