"""What can be wrong with a table, the credentials or a URL is reported with what to do."""

import pytest

import keywise
from adapters.dynamodb.benches import created, fresh, origin_of, sink_of
from keywise.adapters.dynamodb.origin import connect as connect_origin
from keywise.core.errors import AddressError, DatabaseError, SettingsError, ThrottledError, UnavailableError
from keywise.core.url import Address
from running import awaited, run
from servers import machine, shared
from servers.dynamodb_faults import dynamodb_faults

pytestmark = pytest.mark.server("dynamodb")

BAD_URLS = {
    "dynamodb://key:s3cret@pages": "credentials never belong into the URL",
    "dynamodb://?endpoint=http://key:s3cret@host": "the endpoint of dynamodb:// has a user",
    "dynamodb://pages?endpoint=http://key:s3cret%40host": "credentials never belong into the URL",
    "dynamodb://pages/more": "write the table as the host",
    "dynamodb://p%20s": "is no name of a table",
    "dynamodb://pages?endpoint=localhost:8000": "write for example endpoint=http://127.0.0.1:8000",
    "dynamodb://pages?endpoint=http://localhost:port": "is no URL",
    "dynamodb://pages?requests=0": "from 1 to 500",
    "dynamodb://pages?key=id&version=id": "different attributes",
    "dynamodb://pages?version=": "different attributes",
    "dynamodb://pages?touch=a&generation=b": "another attribute than generation=b",
    "dynamodb://pages?regio=x": "did you mean region",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_work_is_refused_with_the_fix(url):
    app = keywise.App("memory://")
    with pytest.raises(SettingsError, match=BAD_URLS[url]) as error:
        app.pipeline("shop", key="key").source("memory://").sink(url)
        run(app.run(handle_signals=False))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("segments", ["0", "many", "1000000"])
def test_an_origin_has_a_number_of_segments(segments):
    with pytest.raises(AddressError, match="from 1 to 100000"):
        connect_origin(Address(f"dynamodb://pages?segments={segments}", "pages", {}))


async def failure(table: str, endpoint: str = "", **options: str) -> Exception:
    with pytest.raises((DatabaseError, UnavailableError)) as error:
        async with sink_of(table, endpoint, **options):
            pass
    with pytest.raises(type(error.value)):
        async with origin_of(table, endpoint, **{name: value for name, value in options.items() if name == "key"}):
            pass
    return error.value


@awaited
async def test_a_missing_table_and_a_wrong_key_end_the_start():
    server = shared.dynamodb()
    assert "create the table, or check its name" in str(await failure(fresh("missing")))
    composite = server.create_table(fresh("table"), sort="part")
    assert "id and part, and keywise has one key" in str(await failure(composite))
    assert "has the type N" in str(await failure(server.create_table(fresh("table"), kind="N")))
    assert "or write key=id in the URL" in str(await failure(created(), key="page"))


@awaited
async def test_an_attribute_of_keywise_is_not_the_key_of_the_table():
    table = created(key="version")
    with pytest.raises(DatabaseError, match="version is the key of the table"):
        async with sink_of(table):
            pass


@awaited
async def test_missing_credentials_and_profiles_are_reported(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(await failure("pages"))
    with pytest.raises(DatabaseError, match=r"\(nobody\).*check the AWS configuration"):
        async with sink_of("pages", profile="nobody"):
            pass


REFUSALS = {
    (400, "AccessDeniedException"): (DatabaseError, "allow dynamodb:DescribeTable"),
    (400, "UnrecognizedClientException"): (DatabaseError, "check AWS_ACCESS_KEY_ID"),
    (400, "ExpiredTokenException"): (DatabaseError, "renew the credentials"),
    (400, "UnknownOperationException"): (DatabaseError, "check that the endpoint"),
}
PASSING = {
    (400, "ProvisionedThroughputExceededException"): ThrottledError,
    (400, "ThrottlingException"): ThrottledError,
    (400, "RequestLimitExceeded"): ThrottledError,
    (500, "InternalServerError"): UnavailableError,
    (503, "ServiceUnavailable"): UnavailableError,
}


@pytest.mark.parametrize("refusal", REFUSALS)
@awaited
async def test_a_refusal_of_the_service_says_what_to_do(refusal):
    kind, advice = REFUSALS[refusal]
    async with dynamodb_faults(shared.dynamodb().url) as proxy:
        proxy.judge = lambda action, asked: refusal
        error = await failure("pages", proxy.url)
    assert type(error) is kind and advice in str(error), error


@pytest.mark.parametrize("refusal", PASSING)
@awaited
async def test_what_may_pass_is_an_outage_for_an_origin_and_waited_for_by_a_sink(refusal):
    async with dynamodb_faults(shared.dynamodb().url) as proxy:
        proxy.judge = lambda action, asked: refusal
        with pytest.raises(UnavailableError) as error:
            async with origin_of("pages", proxy.url):
                pass
        assert type(error.value) is PASSING[refusal]
        async with sink_of("pages", proxy.url):
            pass


@awaited
async def test_an_origin_that_is_away_is_an_outage():
    with pytest.raises(UnavailableError):
        async with origin_of("pages", f"http://127.0.0.1:{machine.free_port()}"):
            pass
