"""The HTTP client and a real service that hangs, lies, cuts off and speaks TLS: what is known after each failure."""

import asyncio
import base64
from urllib.parse import urlsplit

import pytest

from adapters.function.handler_shop import passed
from keywise.adapters.http.client import HttpClient, HttpResponse, Server
from keywise.core.errors import AddressError, OutcomeUnknownError, UnavailableError
from running import awaited
from servers import machine, shared
from servers.http import Space, make_certificate

pytestmark = pytest.mark.server("http")

SECRET = "hunter2-hunter2"


def server(space: Space, **more: object) -> Server:
    return Server("http", "127.0.0.1", space.service.port, **more)


def encrypted(space: Space, **more: object) -> Server:
    return Server("https", "127.0.0.1", space.service.tls_port, **more)


async def put(
    client: HttpClient, space: Space, key: str = "a", *, timeout_s: float = 20.0, body: bytes = b"x"
) -> HttpResponse:
    return await client.request("PUT", space.path.format(key=key), body=body, timeout_s=timeout_s)


async def until_it_came(space: Space) -> None:
    while not space.log:
        await passed(0.01)


@awaited
async def test_an_answer_is_whole_with_its_headers_in_lower_case():
    space = shared.http().space(
        fault="answer", answer={"status": 418, "body": "tea", "headers": {"X-Kind": "Green"}}, writes=True
    )
    async with HttpClient(server(space)) as client:
        answer = await put(client, space)
    assert (answer.status, answer.headers["x-kind"], answer.body, answer.is_whole) == (418, "Green", b"tea", True)


@awaited
async def test_a_path_arrives_as_it_was_encoded():
    space = shared.http().space()
    async with HttpClient(server(space)) as client:
        await put(client, space, "a%2F..%2Fb%20%7e%2E")
        await client.request("PUT", "/" + space.path.split("/")[1] + "/./x/../y?a=%2F&b", timeout_s=20)
    assert [urlsplit(line["target"]).path.split("/", 2)[2] for line in space.log] == [
        "documents/a%2F..%2Fb%20%7e%2E",
        "./x/../y",
    ]
    assert space.log[1]["target"].endswith("?a=%2F&b")


@awaited
async def test_a_large_body_arrives_whole():
    space = shared.http().space()
    async with HttpClient(server(space)) as client:
        assert (await put(client, space, body=b"x" * 3_000_000)).status == 200
    assert len(space.documents["a"]) == 3_000_000


@awaited
async def test_nothing_was_sent_to_a_server_that_is_not_there():
    port = machine.free_port()
    async with HttpClient(Server("http", "127.0.0.1", port)) as client:
        with pytest.raises(UnavailableError, match=f"^127.0.0.1:{port}: .*"):
            await client.request("PUT", "/a", timeout_s=20)
    async with HttpClient(Server("http", "no-such-host.invalid", port)) as client:
        with pytest.raises(UnavailableError, match=f"^no-such-host.invalid:{port}: "):
            await client.request("PUT", "/a", timeout_s=20)


@awaited
async def test_nothing_was_sent_while_a_connection_was_waited_for():
    space = shared.http().space(fault="hang")
    async with HttpClient(server(space), connections_max=1) as client:
        hanging = asyncio.create_task(put(client, space))
        await until_it_came(space)
        with pytest.raises(UnavailableError, match="no connection in time"):
            await put(client, space, "b", timeout_s=0.05)
        hanging.cancel()
        await asyncio.wait([hanging])
        assert hanging.cancelled()
    assert len(space.log) == 1


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("hang", "no answer in time"),
        ("hang in the answer", "no answer in time"),
        ("cut", "the connection was lost"),
        ("short", "its answer broke off"),
        ("garbage", "its answer is no HTTP"),
    ],
)
def test_nobody_knows_what_became_of_a_request_without_a_whole_answer(fault, why):
    space = shared.http().space(fault=fault, writes=True)

    @awaited
    async def main() -> None:
        async with HttpClient(server(space, authorization=f"Bearer {SECRET}")) as client:
            with pytest.raises(OutcomeUnknownError) as lost:
                await put(client, space, timeout_s=0.5 if "hang" in fault else 20.0)
        assert str(lost.value) == f"127.0.0.1:{space.service.port}: {why}"

    main()
    assert space.documents == {"a": "x"}, "it had arrived"


@awaited
async def test_a_request_is_never_sent_twice():
    """The client library sends PUT and DELETE again, by itself, when a connection that it kept has ended."""
    space = shared.http().space(fault="cut", after=1)
    async with HttpClient(server(space)) as client:
        assert (await put(client, space)).status == 200
        with pytest.raises(OutcomeUnknownError, match="the connection was lost"):
            await put(client, space, "b")
    peers = [line["peer"] for line in space.log]
    assert len(peers) == 2
    assert peers[0] == peers[1], "over the connection that was kept"


@awaited
async def test_a_connection_that_the_server_closed_meanwhile_is_made_anew():
    space = shared.http().space(closes=True)
    async with HttpClient(server(space)) as client:
        for number in range(3):
            assert (await put(client, space, f"k{number}")).status == 200
            await passed(0.05)
    assert len({line["peer"] for line in space.log}) == 3


@awaited
async def test_what_follows_an_answer_is_nobody_elses_answer():
    """A server that says less than it sends could smuggle in an answer to the next request."""
    space = shared.http().space(fault="long", times=1)
    async with HttpClient(server(space)) as client:
        assert (await put(client, space)).body == b"ok"
        assert (await put(client, space, "b")).body == b"stored"


@awaited
async def test_an_endless_answer_is_read_up_to_a_limit():
    space = shared.http().space(fault="huge", times=1)
    async with HttpClient(server(space), answer_max=1000) as client:
        answer = await put(client, space)
        assert (answer.status, len(answer.body), answer.is_whole) == (200, 1000, False)
        assert (await put(client, space)).status == 200
    assert len({line["peer"] for line in space.log}) == 2


@awaited
async def test_a_redirect_is_an_answer_like_any_other():
    other = shared.http().space()
    space = shared.http().space(
        fault="answer", answer={"status": 307, "headers": {"Location": other.url, "Set-Cookie": "a=b"}}
    )
    async with HttpClient(server(space, authorization=f"Bearer {SECRET}")) as client:
        for _ in range(2):
            assert (await put(client, space)).status == 307
    assert other.log == []
    assert not any("cookie" in line["headers"] for line in space.log)


@awaited
async def test_users_and_tokens_are_let_in_and_hidden_in_what_the_server_says():
    basic = base64.b64encode(f"user:{SECRET}".encode()).decode()
    for wanted, secrets in ((f"Bearer {SECRET}", (SECRET,)), (f"Basic {basic}", (basic, SECRET))):
        space = shared.http().space(authorization=wanted)
        async with HttpClient(server(space, authorization=wanted, secrets=secrets)) as client:
            assert (await put(client, space)).status == 200
            space.rule(authorization="other")
            answer = await put(client, space)
            assert (answer.status, SECRET in client.discreet(answer.body.decode())) == (401, False)
            assert "***" in client.discreet(answer.body.decode())


@awaited
async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    space = shared.http().space()
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{machine.free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with HttpClient(server(space)) as client:
        assert (await put(client, space)).status == 200


@awaited
async def test_a_certificate_that_the_given_ones_vouch_for_is_trusted():
    space = shared.http().space()
    async with HttpClient(encrypted(space, ca=str(space.service.ca))) as client:
        assert (await put(client, space)).status == 200
    assert space.documents == {"a": "x"}


@awaited
async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path):
    space, stranger = shared.http().space(), tmp_path / "stranger.pem"
    make_certificate(stranger, tmp_path / "key.pem")
    named_otherwise = Server("https", "localhost", space.service.tls_port, ca=str(space.service.ca))
    for one in (encrypted(space), encrypted(space, ca=str(stranger)), named_otherwise):
        async with HttpClient(one) as client:
            with pytest.raises(UnavailableError, match=f"^{one.name}: its certificate is not trusted: "):
                await put(client, space)
    assert space.log == [], "nothing was sent, no secret either"


@awaited
async def test_a_server_that_does_not_speak_tls_is_unavailable():
    space = shared.http().space()
    async with HttpClient(Server("https", "127.0.0.1", space.service.port)) as client:
        with pytest.raises(UnavailableError):
            await put(client, space)


@awaited
async def test_certificates_that_cannot_be_read_are_told_when_it_is_opened(tmp_path):
    no_certificate = tmp_path / "empty.pem"
    no_certificate.write_text("nothing")
    for ca in (str(tmp_path / "missing.pem"), str(no_certificate)):
        with pytest.raises(AddressError, match="cannot be read as certificates"):
            async with HttpClient(Server("https", "127.0.0.1", 1, ca=ca)):
                pass
