"""What can be wrong with a queue, the credentials or a URL is reported with what to do."""

import pytest

import keywise
from adapters.sqs.benches import created, fresh, source_at
from keywise.adapters.sqs.source import connect
from keywise.core.errors import DatabaseError, SettingsError, UnavailableError
from keywise.core.url import Address
from running import awaited, run
from servers import machine, shared
from servers.aws_answers import aws_answers
from servers.fault_proxy import fault_proxy

pytestmark = pytest.mark.server("elasticmq")

BAD_URLS = {
    "sqs://": "names no host",
    "sqs://key:s3cret@sqs.eu-west-1.amazonaws.com/q": "credentials never belong into the URL",
    "sqs://queue.amazonaws.com/123456789012/q": "does not show its region; add for example region=eu-west-1",
    "sqs://host:port/q": "has an invalid port",
    "sqs://host/acme/q": "an account of 12 digits",
    "sqs://host/a.b": "is no name of a queue",
    "sqs://host/q?tls=maybe": "has to be on or off",
    "sqs://host/q?requests=0": "from 1 to 100",
    "sqs://host/q?copies=21": "from 0 to 20",
    "sqs://host/q?visibility=13h": "has to be from 1s to 12h",
    "sqs://host/q?visibility=often": "write for example 500ms",
    "sqs://host/q?regio=x": "did you mean region",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_work_is_refused_with_the_fix(url):
    app = keywise.App("memory://")
    with pytest.raises(SettingsError, match=BAD_URLS[url]) as error:
        app.pipeline("shop", key="key").source(url).sink("memory://")
        run(app.run(handle_signals=False))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "endpoint", "region", "queue"),
    [
        ("sqs.eu-west-1.amazonaws.com/123456789012/up", "https://sqs.eu-west-1.amazonaws.com", "eu-west-1", "up"),
        ("sqs.cn-north-1.amazonaws.com.cn/up", "https://sqs.cn-north-1.amazonaws.com.cn", "cn-north-1", "up"),
        (
            "vpce-1.sqs.us-east-2.vpce.amazonaws.com/123456789012",
            "https://vpce-1.sqs.us-east-2.vpce.amazonaws.com",
            "us-east-2",
            "name",
        ),
        ("127.0.0.1:9324/up.fifo?tls=off&region=x-1", "http://127.0.0.1:9324", "x-1", "up.fifo"),
    ],
)
def test_a_url_names_endpoint_region_and_queue(url, endpoint, region, queue):
    source = connect(Address(f"sqs://{url}", "name", {}))
    assert (source._service.endpoint, source._service._region, source._queue) == (endpoint, region, queue)


async def failure(port: int, queue: str = "missing") -> Exception:
    with pytest.raises((DatabaseError, UnavailableError)) as error:
        async with source_at(port, queue):
            pass
    return error.value


@awaited
async def test_a_missing_queue_ends_the_start_and_a_server_that_is_away_is_waited_for():
    missing = await failure(shared.elasticmq().port)
    assert isinstance(missing, DatabaseError) and "create the queue, or check the account" in str(missing)
    assert isinstance(await failure(machine.free_port()), UnavailableError)
    unnamed = connect(Address(f"sqs://127.0.0.1:{shared.elasticmq().port}?tls=off", "missing", {}))
    with pytest.raises(DatabaseError, match="create the queue"):
        await unnamed.__aenter__()


@awaited
async def test_missing_credentials_and_profiles_are_reported(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    missing = await failure(shared.elasticmq().port)
    assert isinstance(missing, DatabaseError) and "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(missing)
    url = f"sqs://127.0.0.1:{shared.elasticmq().port}/q?tls=off&profile=nobody"
    with pytest.raises(DatabaseError, match=r"\(nobody\).*check the AWS configuration"):
        await connect(Address(url, "q", {})).__aenter__()


REFUSALS = {
    (403, "AccessDeniedException"): (DatabaseError, "allow sqs:ReceiveMessage"),
    (403, "InvalidClientTokenId"): (DatabaseError, "check AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch"): (DatabaseError, "the region of the URL"),
    (403, "ExpiredToken"): (DatabaseError, "renew the credentials"),
    (400, "KmsDisabled"): (DatabaseError, "check the KMS key"),
    (400, "UnknownOperationException"): (DatabaseError, "check that the URL names an SQS queue"),
    (400, "RequestThrottled"): (UnavailableError, "words of the service"),
    (400, "OverLimit"): (UnavailableError, "too many messages are in flight"),
    (503, "ServiceUnavailable"): (UnavailableError, "words of the service"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@awaited
async def test_a_refusal_of_the_service_says_what_to_do(refusal):
    (status, code), (kind, advice) = refusal, REFUSALS[refusal]
    queue = created(shared.elasticmq(), fresh("refused"))
    async with fault_proxy(shared.elasticmq().port) as proxy:
        body = b'{"__type": "com.amazonaws.sqs#%s", "message": "words of the service"}' % code.encode()
        proxy.answer(b"GetQueueAttributes", status, body)
        error = await failure(proxy.port, queue)
    assert type(error) is kind and advice in str(error), error


@awaited
async def test_the_answer_of_a_gateway_is_an_outage():
    queue = created(shared.elasticmq(), fresh("gateway"))
    for status in (404, 502):
        async with fault_proxy(shared.elasticmq().port) as proxy:
            proxy.answer(b"GetQueueAttributes", status, b"<html>no route</html>")
            assert isinstance(await failure(proxy.port, queue), UnavailableError)


@awaited
async def test_a_lost_answer_is_an_outage_and_the_next_call_works():
    queue = created(shared.elasticmq(), fresh("lost"))
    async with fault_proxy(shared.elasticmq().port) as proxy, source_at(proxy.port, queue) as source:
        await source.send([b"one"])
        for action, call in {
            b"SendMessageBatch": lambda: source.send([b"two"]),
            b"ReceiveMessage": lambda: source.receive(10, 0.0),
            b"GetQueueAttributes": source.depth,
        }.items():
            proxy.lose_answer(action)
            with pytest.raises(UnavailableError):
                await call()
        assert await source.depth() == 2, "both were sent, though one answer was lost"


@awaited
async def test_a_queue_that_vanishes_is_an_outage_until_it_is_back():
    server, queue = shared.elasticmq(), created(shared.elasticmq(), fresh("vanishing"))
    async with source_at(server.port, queue) as source:
        server.ask("DeleteQueue", QueueUrl=f"{server.url}/000000000000/{queue}")
        for call in (lambda: source.receive(10, 0.0), lambda: source.receive(10, 5.0), lambda: source.send([b"one"])):
            with pytest.raises(UnavailableError, match="create the queue"):
                await call()
        created(server, queue)
        await source.send([b"one"])
        assert [one.body for one in await source.receive(10, 5.0)] == [b"one"]


@awaited
async def test_rights_that_are_taken_away_end_the_worker():
    queue = created(shared.elasticmq(), fresh("denied"))
    async with aws_answers(shared.elasticmq().url) as aws, source_at(aws.port, queue) as source:
        aws.denied |= {"ReceiveMessage", "DeleteMessageBatch"}
        with pytest.raises(DatabaseError, match="allow sqs:ReceiveMessage, DeleteMessage"):
            await source.receive(10, 5.0)
