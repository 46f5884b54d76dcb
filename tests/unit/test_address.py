"""What is shown of a URL: no password, and nothing that came from the environment."""

import pytest

from keywise import adapters
from keywise.address import Address, Filled, shown
from keywise.errors import AddressError, SettingsError

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite:///shop.db?queue=a", "sqlite:///shop.db?queue=a"),
        ("amqp://host:5672/q", "amqp://host:5672/q"),
        ("amqp://user@host/q", "amqp://user@host/q"),
        ("amqp://user:s3cret@host:5672/q", "amqp://user:***@host:5672/q"),
        ("redis://:s3cret@host", "redis://:***@host"),
        ("amqp://user:s3cret/x@host/q", "amqp://user:***@host/q"),
        ("amqp://user:s3cret@x#?y@host/q", "amqp://user:***@host/q"),
        ("amqp://user:s3cret\n@host/q", "amqp://user:***@host/q"),
        ("amqp://user:[s3cret@host/q", "amqp://user:***@host/q"),
        ("amqp://user:s3cret@host:port/q", "amqp://user:***@host:port/q"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, told: str):
    assert shown(url) == told


def test_a_url_from_the_environment_is_shown_as_it_was_written():
    url = Filled(f"amqp://host/{SECRET}", "amqp://host/${QUEUE}", [SECRET])
    assert (shown(url), f"{url!r}") == ("amqp://host/${QUEUE}", "'amqp://host/${QUEUE}'")
    with pytest.raises(AddressError, match=r"^amqp://host/\$\{QUEUE\} has two .* write amqp:///host/\$\{QUEUE\}$"):
        Address(url, "shop", {}).file()
    assert (url, str(url)) == (f"amqp://host/{SECRET}", f"amqp://host/{SECRET}")
    assert shown(Filled("amqp://u:x@host", "amqp://u:${PASSWORD}@host", ["x"])) == "amqp://u:***@host"


@pytest.mark.parametrize("url", ["amqp://user:[s3cret@host/q", "amqp://[s3cret", "http://[::1/q"])
def test_what_cannot_be_parsed_is_refused_as_any_other(url: str):
    with pytest.raises(AddressError, match="is no URL; write for example") as error:
        Address(url, "shop", {})
    assert error.value.__cause__ is None


WRITTEN = {
    "as a whole": ("${URL}", "sqlite:///shop.db?visibility=s3cret"),
    "as an option": ("sqlite:///shop.db?visibility=${X}", "sqlite:///shop.db?visibility=s3cret"),
    "as a name": ("sqlite:///shop.db?${X}=1", "sqlite:///shop.db?s3cret=1"),
    "with an &": ("sqlite:///shop.db?queue=${X}", "sqlite:///shop.db?queue=a&s3cret=b"),
    "with percent signs": ("sqlite:///shop.db?visibility=${X}", "sqlite:///shop.db?visibility=%733cret"),
    "as a host": ("sqlite://${X}", "sqlite://s3cret"),
    "with no scheme": ("amqp://${X}", "amqp://s3cret"),
}


@pytest.mark.parametrize(("written", "url"), WRITTEN.values(), ids=WRITTEN.keys())
def test_an_adapter_that_refuses_a_url_tells_nothing_from_the_environment(written: str, url: str):
    value = url.removeprefix(written.partition("${")[0])
    with pytest.raises(SettingsError) as error:
        adapters.connect("sources", Address(Filled(url, written, [value]), "shop", {}))
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None
    with pytest.raises(SettingsError):
        adapters.connect("sources", Address(url, "shop", {}))


def test_words_of_the_url_itself_and_short_values_are_not_hidden():
    written = "sqlite:///shop.db?visble=${X}"
    with pytest.raises(SettingsError, match="unknown option 'visble'; did you mean visibility"):
        adapters.connect("sources", Address(Filled(written.replace("${X}", "y"), written, ["y"]), "shop", {}))


def test_options_that_name_a_secret_are_shown_without_it():
    assert shown("amqp://h/q?token=abc&queue=x") == "amqp://h/q?token=***&queue=x"
    assert shown("sqlite:///a.db?table=t&db_password=hunter2#x") == "sqlite:///a.db?table=t&db_password=***#x"
    assert shown("sqlite:///a.db?key=id&version=v") == "sqlite:///a.db?key=id&version=v"
