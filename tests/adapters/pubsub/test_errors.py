"""What can be wrong with a subscription, the rights or a URL is reported with what to do."""

import asyncio
import os
import signal
from functools import partial

import pytest
from google.pubsub_v1 import types
from grpc import StatusCode

import keywise
from adapters.pubsub.benches import PROJECT, asked, created, fresh, source_at, topic_of
from adapters.pubsub.waiting import received, until
from keywise.adapters.pubsub.service import ENDPOINT, PUBLISHER, SUBSCRIBER
from keywise.adapters.pubsub.source import connect
from keywise.core.errors import DatabaseError, SettingsError, UnavailableError
from keywise.core.url import Address
from running import awaited, run
from servers import machine, shared
from servers.pubsub import pubsub_server
from servers.pubsub_answers import pubsub_answers

pytestmark = pytest.mark.server("pubsub")

BAD_URLS = {
    "pubsub://": "names no project",
    "pubsub:///orders": "names no project",
    "pubsub://key:s3cret@shop/orders": "credentials never belong into the URL",
    "pubsub://shop/a": "is no name of a subscription",
    "pubsub://shop/goog-orders": "is no name of a subscription",
    "pubsub://shop/projects/shop/orders": "is no name of a subscription",
    "pubsub://shop/orders?emulator=host:port": "has to be a host with a port",
    "pubsub://shop/orders?emulator=http://host": "has to be a host with a port",
    "pubsub://shop/orders?emulator=host:1&endpoint=host:1": "exclude each other",
    "pubsub://shop/orders?visibility=9s": "has to be from 10s to 10m",
    "pubsub://shop/orders?visibility=11m": "has to be from 10s to 10m",
    "pubsub://shop/orders?visibility=often": "write for example 500ms",
    "pubsub://shop/orders?requests=0": "from 1 to 100",
    "pubsub://shop/orders?emulater=x": "did you mean emulator",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_work_is_refused_with_the_fix(url):
    app = keywise.App("memory://")
    with pytest.raises(SettingsError, match=BAD_URLS[url]) as error:
        app.pipeline("shop", key="key").source(url).sink("memory://")
        run(app.run(handle_signals=False))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "environment", "emulator", "endpoint", "subscription"),
    [
        ("shop-1/orders", "", "", ENDPOINT, "projects/shop-1/subscriptions/orders"),
        ("acme.com:shop/orders", "", "", ENDPOINT, "projects/acme.com:shop/subscriptions/orders"),
        ("shop-1", "host:1", "host:1", ENDPOINT, "projects/shop-1/subscriptions/name"),
        ("shop-1/orders?emulator=here:2", "host:1", "here:2", ENDPOINT, "projects/shop-1/subscriptions/orders"),
        ("shop-1/orders?endpoint=eu:443", "host:1", "", "eu:443", "projects/shop-1/subscriptions/orders"),
    ],
)
def test_a_url_names_project_subscription_and_service(
    url, environment, emulator, endpoint, subscription, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", environment)
    source = connect(Address(f"pubsub://{url}", "name", {}))
    service = source._service
    assert (service.emulator, service._endpoint, source._subscription) == (emulator, endpoint, subscription)


async def failure(address: str, subscription: str = "missing") -> Exception:
    with pytest.raises((DatabaseError, UnavailableError)) as error:
        async with source_at(address, subscription):
            pass
    return error.value


@awaited
async def test_a_missing_subscription_ends_the_start_and_a_server_that_is_away_is_waited_for():
    missing = await failure(shared.pubsub().address)
    assert isinstance(missing, DatabaseError) and "create the subscription and its topic" in str(missing)
    assert isinstance(await failure(f"127.0.0.1:{machine.free_port()}"), UnavailableError)


@awaited
async def test_missing_credentials_are_reported():
    source = connect(Address("pubsub://shop-1/orders", "", {}))
    with pytest.raises(DatabaseError, match=r"set GOOGLE_APPLICATION_CREDENTIALS.*PUBSUB_EMULATOR_HOST"):
        await source.__aenter__()


REFUSALS = {
    StatusCode.PERMISSION_DENIED: (DatabaseError, "grant roles/pubsub.subscriber and roles/pubsub.viewer"),
    StatusCode.UNAUTHENTICATED: (DatabaseError, "check GOOGLE_APPLICATION_CREDENTIALS"),
    StatusCode.UNIMPLEMENTED: (DatabaseError, "names a Pub/Sub service"),
    StatusCode.FAILED_PRECONDITION: (DatabaseError, "words of the service"),
    StatusCode.RESOURCE_EXHAUSTED: (UnavailableError, "words of the service"),
    StatusCode.UNAVAILABLE: (UnavailableError, "words of the service"),
    StatusCode.INTERNAL: (UnavailableError, "words of the service"),
    StatusCode.DEADLINE_EXCEEDED: (UnavailableError, "words of the service"),
}


@awaited
async def test_a_refusal_of_the_service_says_what_to_do():
    name = await created(fresh("refused"))
    async with pubsub_answers(shared.pubsub().address) as proxy:
        for code, (kind, advice) in REFUSALS.items():
            proxy.refuse("GetSubscription", code)
            error = await failure(proxy.address, name)
            assert type(error) is kind and advice in str(error), error


@awaited
async def test_a_subscription_that_no_worker_can_pull_from_is_refused():
    name = await created(fresh("push"), push_config=types.PushConfig.pb()(push_endpoint="https://shop.example"))
    pushed = await failure(shared.pubsub().address, name)
    assert isinstance(pushed, DatabaseError) and "create a pull subscription" in str(pushed)


@awaited
async def test_rights_that_are_taken_away_end_the_worker_and_an_outage_does_not():
    name = await created(fresh("denied"))
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        for code, kind in ((StatusCode.PERMISSION_DENIED, DatabaseError), (StatusCode.UNAVAILABLE, UnavailableError)):
            await source.send([b"held"])
            held = await received(source, 1)
            for method, call in {
                "Pull": partial(source.receive, 10, 5.0),
                "Publish": partial(source.send, [b"one"]),
                "Acknowledge": partial(source.ack, held),
                "ModifyAckDeadline": partial(source.extend, held, 60.0),
            }.items():
                proxy.refuse(method, code)
                with pytest.raises(kind, match="words of the service"):
                    await call()
                proxy.refusals.clear()


@awaited
async def test_a_lost_answer_is_an_outage_and_the_next_call_works():
    name = await created(fresh("lost"))
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        for method, call in {"Publish": lambda: source.send([b"one"]), "GetSubscription": source.backlog}.items():
            proxy.lost.add(method)
            with pytest.raises(UnavailableError, match="the connection was lost"):
                await call()
            await call()
        assert shared.pubsub().unacked(topic_of(name)) == 2, "one answer was lost, but no message"


@awaited
async def test_messages_are_handed_over_though_their_deadline_cannot_be_set():
    name = await created(fresh("unset"))
    async with pubsub_answers(shared.pubsub().address) as proxy, source_at(proxy.address, name) as source:
        await source.send([b"one"])
        proxy.refuse("ModifyAckDeadline", StatusCode.UNAVAILABLE)
        [held] = await received(source, 1)
        await source.ack([held])
        assert shared.pubsub().unacked(topic_of(name)) == 0


@awaited
async def test_a_subscription_that_vanishes_is_an_outage_until_it_is_back():
    name = await created(fresh("vanishing"))
    async with source_at(shared.pubsub().address, name) as source:
        deletion = types.DeleteSubscriptionRequest.pb()(subscription=f"projects/{PROJECT}/subscriptions/{name}")
        await asked(SUBSCRIBER + "DeleteSubscription", None, deletion)
        for call in (lambda: source.receive(10, 0.0), lambda: source.receive(10, 5.0), source.backlog):
            with pytest.raises(UnavailableError, match="create the subscription"):
                await call()
        await asked(PUBLISHER + "DeleteTopic", None, types.DeleteTopicRequest.pb()(topic=topic_of(name)))
        await created(name)
        await source.send([b"one"])
        assert [one.body for one in await received(source, 1)] == [b"one"]


@awaited
async def test_a_subscription_whose_topic_was_deleted_cannot_be_sent_to():
    name = await created(fresh("orphan"))
    await asked(PUBLISHER + "DeleteTopic", None, types.DeleteTopicRequest.pb()(topic=topic_of(name)))
    async with source_at(shared.pubsub().address, name) as source:
        with pytest.raises(DatabaseError, match="the topic of the subscription was deleted"):
            await source.send([b"one"])


def test_a_service_that_takes_a_second_to_accept_a_connection_is_waited_for():
    async def story() -> None:
        os.kill(server.pid, signal.SIGSTOP)
        # Its threads may go on for a moment.
        await asyncio.to_thread(os.waitid, os.P_PID, server.pid, os.WSTOPPED)
        try:
            opening = asyncio.create_task(source_at(server.address, "missing").__aenter__())
            await asyncio.wait([opening], timeout=1.0)
            assert not opening.done(), opening
        finally:
            os.kill(server.pid, signal.SIGCONT)
        with pytest.raises(DatabaseError, match="create the subscription"):
            await opening

    with pubsub_server() as server:
        run(story())


def test_an_emulator_that_goes_away_is_an_outage_until_it_is_back():
    async def story() -> None:
        source = source_at(server.address, "missing")
        await source._service.open()
        source._service.started()
        server.stop()
        with pytest.raises(UnavailableError):
            await source.receive(10, 0.0)
        server.start()

        async def is_back() -> bool:
            try:
                await source.receive(10, 0.0)
            except UnavailableError as error:
                # The fake has forgotten everything.
                return "create the subscription" in str(error)
            return False

        await until(is_back)
        await source.__aexit__()

    with pubsub_server() as server:
        run(story())
