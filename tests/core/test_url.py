"""What is shown of a URL: no password, and nothing that came from the environment."""

import pytest

from keywise import adapters
from keywise.core.entry import LedgerPolicy
from keywise.core.errors import AddressError, SettingsError
from keywise.core.url import Address, EnvFilledUrl, redacted

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
    assert redacted(url) == told


def test_a_url_from_the_environment_is_shown_as_it_was_written():
    url = EnvFilledUrl(f"amqp://host/{SECRET}", "amqp://host/${QUEUE}", [SECRET])
    assert (redacted(url), f"{url!r}") == ("amqp://host/${QUEUE}", "'amqp://host/${QUEUE}'")
    with pytest.raises(AddressError, match=r"^amqp://host/\$\{QUEUE\} has two .* write amqp:///host/\$\{QUEUE\}$"):
        Address(url, "shop", {}).file()
    assert (url, str(url)) == (f"amqp://host/{SECRET}", f"amqp://host/{SECRET}")
    assert redacted(EnvFilledUrl("amqp://u:x@host", "amqp://u:${PASSWORD}@host", ["x"])) == "amqp://u:***@host"


@pytest.mark.parametrize("url", ["amqp://user:[s3cret@host/q", "amqp://[s3cret", "http://[::1/q"])
def test_what_cannot_be_parsed_is_refused_as_any_other(url: str):
    with pytest.raises(AddressError, match="is no URL; write for example") as error:
        Address(url, "shop", {})
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://:abc/s3cret==@host:6379/0",
        "redis://u:abc#s3cret@host:6379/0",
        "redis://u:s3cret#abc@host:6379/0",
        "redis://u:abc?s3cret@host:6379/0",
        "redis://u:a?s3cret=x@host:6379/0",
        "redis://u:a/b?buckets=s3cret@host/0",
        "redis://s3cret/abc@host",
        "postgresql://u:abc/s3cret@host/shop",
        "postgresql://u:s3cret#abc@host/shop",
        "postgresql://u:a?s3cret=x@host/shop",
        "amqp://u:a@b/s3cret@host/q",
    ],
)
def test_a_password_that_ends_its_url_too_early_is_refused_and_no_part_of_it_told(url: str):
    for given in (url, EnvFilledUrl(url, "${URL}", [url])):
        with pytest.raises(AddressError, match="%2F for /") as error:
            Address(given, "shop", {})
        assert (SECRET in str(error.value), error.value.__cause__) == (False, None)
    with pytest.raises(AddressError, match=r"^redis://u:\*\*\*@host has an @"):
        Address(EnvFilledUrl("redis://u:a/b@host", "redis://u:${PASSWORD}@host", ["a/b"]), "shop", {})


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
@pytest.mark.parametrize("hosts", ["host:port", "host:70000", "one:5432,other:port", "u:s3cret@host:-1"])
def test_a_port_that_is_no_number_is_refused_as_an_address(scheme: str, hosts: str):
    with pytest.raises(AddressError, match="has an invalid port; write a number") as error:
        adapters.connect_ledger(Address(f"{scheme}://{hosts}/0", "shop", {}), LedgerPolicy())
    assert SECRET not in str(error.value)


def test_several_hosts_with_ports_are_no_mistake():
    adapters.connect_ledger(Address("postgresql://u:p@[::1]:5433,one:5432,other/shop", "shop", {}), LedgerPolicy())


def test_a_file_may_have_an_at_in_its_name():
    assert Address("sqlite:////home/me@work/shop.db", "shop", {}).file() == "/home/me@work/shop.db"


WRITTEN = {
    "as a whole": ("${URL}", "sqlite:///shop.db?visibility=s3cret"),
    "as an option": ("sqlite:///shop.db?visibility=${X}", "sqlite:///shop.db?visibility=s3cret"),
    "as a name": ("sqlite:///shop.db?${X}=1", "sqlite:///shop.db?s3cret=1"),
    "with an &": ("sqlite:///shop.db?queue=${X}", "sqlite:///shop.db?queue=a&s3cret=b"),
    "with percent signs": ("sqlite:///shop.db?visibility=${X}", "sqlite:///shop.db?visibility=%733cret"),
    "as a host": ("sqlite://${X}", "sqlite://s3cret"),
    "with no scheme": ("kafka://${X}", "kafka://s3cret"),
}


@pytest.mark.parametrize(("written", "url"), WRITTEN.values(), ids=WRITTEN.keys())
def test_an_adapter_that_refuses_a_url_tells_nothing_from_the_environment(written: str, url: str):
    value = url.removeprefix(written.partition("${")[0])
    with pytest.raises(SettingsError) as error:
        adapters.connect_source(Address(EnvFilledUrl(url, written, [value]), "shop", {}))
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None
    with pytest.raises(SettingsError):
        adapters.connect_source(Address(url, "shop", {}))


def test_words_of_the_url_itself_and_short_values_are_not_hidden():
    written = "sqlite:///shop.db?visble=${X}"
    with pytest.raises(SettingsError, match="unknown option 'visble'; did you mean visibility"):
        adapters.connect_source(Address(EnvFilledUrl(written.replace("${X}", "y"), written, ["y"]), "shop", {}))


def test_options_that_name_a_secret_are_shown_without_it():
    assert redacted("amqp://h/q?token=abc&queue=x") == "amqp://h/q?token=***&queue=x"
    assert redacted("sqlite:///a.db?table=t&db_password=hunter2#x") == "sqlite:///a.db?table=t&db_password=***#x"
    assert redacted("sqlite:///a.db?key=id&version=v") == "sqlite:///a.db?key=id&version=v"
