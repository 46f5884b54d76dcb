"""What an HTTP sink makes of URLs, keys and answers, without a service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keywise import adapters
from keywise.adapters.http.client import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    HttpResponse,
    Server,
    retry_after_s,
    server_at,
)
from keywise.adapters.http.sink import (
    PAUSE_AFTER_KEYS,
    Contract,
    DesiredState,
    HttpSink,
    ServicePause,
    held_order,
    key_fault,
    result_of_response,
)
from keywise.core.change import Outcome, order_of
from keywise.core.entry import Certainty
from keywise.core.errors import AddressError
from keywise.core.sink import APPLIED, SUPERSEDED, Grade, SinkResult
from keywise.core.url import Address

PUT = DesiredState(order_of(5), deleted=False)
DELETION = DesiredState(order_of(5), deleted=True)
PLAIN = Contract(("/documents/", ""))
CONDITIONAL = Contract(("/documents/", ""), superseded=412)
SAYS_MISSING = Contract(("/documents/", ""), missing="no such page")
ANY_404 = Contract(("/documents/", ""), missing="any")
BASE = "http://host/documents/{key}"


def said(status: int, body: str = "", **headers: str) -> HttpResponse:
    return HttpResponse(status, {name.replace("_", "-"): value for name, value in headers.items()}, body.encode())


def result_of(answer: HttpResponse, asked: DesiredState = PUT, contract: Contract = PLAIN) -> SinkResult:
    return result_of_response(answer, asked, contract, lambda message: message.replace("hunter2", "***"))


def sink_at(url: str) -> HttpSink:
    return adapters.connect_sink(Address(url, "pages", {}))


# Answers.


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_what_the_service_took_is_applied(status):
    assert result_of(said(status)) == APPLIED
    assert result_of(said(status), DELETION) == APPLIED


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_not_there_cannot_be_put(status):
    for contract in (PLAIN, SAYS_MISSING, ANY_404):
        assert result_of(said(status, "no such page"), contract=contract) == SinkResult(
            Outcome.FAILED, f"{status}: no such page", permanent=True
        )


@pytest.mark.parametrize(
    ("answer", "contract"),
    [
        (said(410), PLAIN),
        (said(404, "here is no such page"), SAYS_MISSING),
        (said(404, "no such page", keywise_deleted="True"), PLAIN),
        (said(404, "default backend"), ANY_404),
    ],
    ids=["410", "says what was agreed", "echoes the header", "nobody else answers"],
)
def test_what_the_service_says_is_not_there_is_deleted(answer, contract):
    assert result_of(answer, DELETION, contract) == APPLIED


@pytest.mark.parametrize("contract", [PLAIN, SAYS_MISSING, CONDITIONAL], ids=["plain", "says it", "conditional"])
def test_a_404_to_a_deletion_may_be_of_a_gateway_and_the_document_still_there(contract):
    """What is shown in the end would otherwise be a document that was deleted."""
    for answer in (said(404, "default backend - 404"), said(404, keywise_deleted="false")):
        result = result_of(answer, DELETION, contract)
        assert (result.outcome, result.certainty, result.permanent) == (Outcome.FAILED, Certainty.UNKNOWN, False)
        assert "missing=" in result.cause


def test_a_404_that_was_agreed_to_mean_busy_is_busy():
    agreed = Contract(("/", ""), busy=frozenset({404}))
    assert result_of(said(404), DELETION, agreed) == SinkResult(Outcome.BUSY, "404")


def test_a_refusal_of_something_older_is_superseded_only_if_that_was_agreed():
    assert result_of(said(412), contract=CONDITIONAL) == SUPERSEDED
    assert result_of(said(409), contract=CONDITIONAL) == SinkResult(Outcome.FAILED, "409", permanent=True)
    assert result_of(said(412)) == SinkResult(Outcome.FAILED, "412", permanent=True)


@pytest.mark.parametrize(
    ("held", "outcome"),
    [("6", Outcome.SUPERSEDED), ("5", Outcome.APPLIED), ("4", Outcome.FAILED), ("no number", Outcome.SUPERSEDED)],
)
def test_a_refusal_that_says_what_is_held_is_taken_at_its_word(held, outcome):
    result = result_of(said(412, "no", keywise_version=held), contract=CONDITIONAL)
    assert result.outcome is outcome
    if outcome is Outcome.FAILED:
        assert (result.permanent, result.cause) == (True, "412: no (it holds version 4, which is older)")


def test_what_a_refusal_does_not_say_is_as_in_the_change():
    assert held_order(said(412, keywise_version="7"), (1, 5, 2)) == (1, 7, 2)
    assert held_order(said(412, keywise_version="-7", keywise_era="0"), (1, 5, 2)) == (0, -7, 2)
    assert held_order(said(412, keywise_era="1"), (1, 5, 2)) is None


def test_a_service_that_asks_for_time_costs_no_attempt():
    assert result_of(said(429, "slow", retry_after="7")) == SinkResult(Outcome.BUSY, "429: slow", wait_s=7.0)
    assert result_of(said(429)) == SinkResult(Outcome.BUSY, "429")
    agreed = Contract(("/", ""), busy=frozenset({503}))
    assert result_of(said(503), contract=agreed) == SinkResult(Outcome.BUSY, "503")


def test_a_503_that_asks_for_time_may_come_from_a_gateway_after_the_service_has_acted():
    """It is brought back at that time only where the service itself refuses what is older."""
    forgetful = Contract(("/", ""), superseded=412, forgets_deletions=True)
    for contract in (PLAIN, forgetful):
        result = result_of(said(503, retry_after="2"), contract=contract)
        assert result == SinkResult(Outcome.BUSY, "503", certainty=Certainty.UNKNOWN, wait_s=2.0)
    assert result_of(said(503, retry_after="2"), contract=CONDITIONAL) == SinkResult(Outcome.BUSY, "503", wait_s=2.0)
    assert result_of(said(503, retry_after="soon"), contract=CONDITIONAL).certainty is Certainty.UNKNOWN


@pytest.mark.parametrize("status", [401, 407])
def test_a_wrong_token_is_no_fault_of_any_change(status):
    """An expired one would make dead letters of everything that comes."""
    assert result_of(said(status, "who?")) == SinkResult(Outcome.BUSY, f"{status}: who?")


@pytest.mark.parametrize(
    ("status", "certainty"),
    [
        (408, Certainty.CLEAN),
        (425, Certainty.CLEAN),
        (500, Certainty.ENDED),
        (501, Certainty.ENDED),
        (507, Certainty.ENDED),
    ],
)
def test_a_failure_that_may_pass_says_what_is_known_of_the_write(status, certainty):
    assert result_of(said(status, "oh")) == SinkResult(Outcome.FAILED, f"{status}: oh", certainty=certainty)


@pytest.mark.parametrize("status", [502, 503, 504, 524])
def test_a_gateway_does_not_know_whether_the_service_behind_it_is_still_at_work(status):
    assert result_of(said(status, "oh")) == SinkResult(Outcome.BUSY, f"{status}: oh", certainty=Certainty.UNKNOWN)


@pytest.mark.parametrize("status", [400, 403, 405, 413, 414, 415, 422, 431, 499])
def test_any_other_refusal_is_permanent(status):
    assert result_of(said(status)) == SinkResult(Outcome.FAILED, str(status), permanent=True)


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("https://other.net/documents/a?token=hunter2#x", "https://other.net/documents/a"),
        ("https://user:hunter2@other.net:8443/a", "https://other.net:8443/a"),
        ("/login", "/login"),
        ("//other.net/a\x1b[31m", "://other.net/a%1B[31m"),
        ("http://[broken/", "no URL"),
        ("", "nowhere"),
    ],
)
def test_a_redirect_is_no_fault_of_a_change_and_says_where_it_points(location, told):
    result = result_of(said(301, "moved", location=location))
    assert result == SinkResult(Outcome.BUSY, f"301: it points to {told}; name that URL, nothing is followed")


@pytest.mark.parametrize(
    ("method", "unknown"), [("POST", {301, 302, 303}), ("PUT", {303}), ("DELETE", {303})], ids=["POST", "PUT", "DELETE"]
)
def test_a_redirect_after_which_clients_do_not_repeat_the_request_may_follow_a_write(method, unknown):
    asked = DELETION if method == "DELETE" else PUT
    contract = Contract(("/", ""), put="POST" if method == "POST" else "PUT")
    for status in (300, 301, 302, 303, 304, 307, 308):
        result = result_of(said(status, location="/login"), asked, contract)
        certainty = Certainty.UNKNOWN if status in unknown else Certainty.CLEAN
        assert (result.outcome, result.certainty, result.permanent) == (Outcome.BUSY, certainty, False)
        assert ("has to answer 2xx itself" in result.cause) is (status in unknown)


def test_a_cause_is_short_printable_and_without_secrets():
    answer = said(400, "\x1b[31m<p>no\r\n\tgood</p> hunter2 " + "x" * 500)
    cause = result_of(answer).cause
    assert cause.startswith("400: [31m<p>no good</p> *** xxx")
    assert len(cause) == len("400: ") + 200
    assert result_of(HttpResponse(400, {}, b"\xff\xfe")).cause == "400: \ufffd\ufffd"


# A service as a whole.


class Hands:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


AWAY = SinkResult(Outcome.BUSY, "429: slow", wait_s=10.0)


def paused_service(clock: Hands) -> ServicePause:
    pause = ServicePause(clock)
    for number in range(PAUSE_AFTER_KEYS):
        assert pause.busy_result() is None
        pause.record(f"k{number}", AWAY)
    return pause


def test_few_that_are_sent_away_in_a_row_speak_for_all():
    clock = Hands()
    pause = paused_service(clock)
    assert pause.busy_result() == SinkResult(Outcome.BUSY, "429: slow"), "to be asked again when the consumer sees fit"
    clock.now = 9.9
    assert pause.busy_result() is not None
    clock.now = 10.1
    assert pause.busy_result() is None


def test_one_finds_out_whether_a_service_takes_changes_again():
    clock = Hands()
    pause = paused_service(clock)
    clock.now = 11.0
    assert (pause.busy_result(), pause.busy_result()) == (None, SinkResult(Outcome.BUSY, "429: slow"))
    pause.record("k9", AWAY)
    clock.now = 20.9
    assert pause.busy_result() is not None, "it is left alone again"
    clock.now = 21.1
    assert pause.busy_result() is None
    pause.record("k9", APPLIED)
    assert (pause.busy_result(), pause.busy_result()) == (None, None), "all may ask again"


@pytest.mark.parametrize(
    "result", [None, SinkResult(Outcome.BUSY, "no connection"), SinkResult(Outcome.FAILED, certainty=Certainty.UNKNOWN)]
)
def test_if_the_one_finds_out_nothing_another_one_does(result):
    clock = Hands()
    pause = paused_service(clock)
    clock.now = 11.0
    assert pause.busy_result() is None
    pause.record("k9", result)
    assert (pause.busy_result() is None, pause.busy_result() is None) == (True, False)


def test_one_document_that_is_sent_away_again_and_again_holds_up_no_other():
    pause = ServicePause(Hands())
    for _ in range(3 * PAUSE_AFTER_KEYS):
        pause.record("hot", AWAY)
    assert pause.busy_result() is None


def test_documents_that_are_sent_away_between_others_hold_up_nobody():
    pause = ServicePause(Hands())
    for number in range(3 * PAUSE_AFTER_KEYS):
        pause.record(f"k{number}", AWAY)
        pause.record("other", APPLIED if number % 2 else SinkResult(Outcome.FAILED, "500"))
        assert pause.busy_result() is None


# Retry-After.


@pytest.mark.parametrize(
    ("told", "date", "wait_s"),
    [
        ("3", "", 3.0),
        (" 3 ", "", 3.0),
        ("0", "", RETRY_AFTER_MIN_S),
        ("99999999", "", RETRY_AFTER_MAX_S),
        ("9" * 8000, "", RETRY_AFTER_MAX_S),
        ("", "", None),
        ("soon", "", None),
        ("-3", "", None),
        ("1.5", "", None),
        ("Sun, 15 Nov 2026 12:00:30 GMT", "Sun, 15 Nov 2026 12:00:00 GMT", 30.0),
        ("Sun, 15 Nov 2026 12:00:30 -0000", "Sun, 15 Nov 2026 12:00:00 GMT", 30.0),
        ("Sun, 15 Nov 2026 12:00:00 GMT", "Sun, 15 Nov 2026 12:00:30 GMT", RETRY_AFTER_MIN_S),
        ("Fri, 15 Nov 1996 12:00:00 GMT", "", RETRY_AFTER_MIN_S),
        ("Fri, 31 Dec 9999 23:59:59 GMT", "no date", RETRY_AFTER_MAX_S),
    ],
)
def test_the_wait_is_what_the_server_asks_for_within_bounds(told, date, wait_s):
    assert retry_after_s(said(429, retry_after=told, date=date)) == wait_s


@given(st.text(), st.text())
def test_whatever_a_server_asks_for_there_is_an_answer(told, date):
    wait_s = retry_after_s(said(429, retry_after=told, date=date))
    assert wait_s is None or RETRY_AFTER_MIN_S <= wait_s <= RETRY_AFTER_MAX_S


@given(st.from_regex(r"[A-Za-z0-9:,+\- ]{0,40}", fullmatch=True))
def test_a_date_that_is_nearly_one_is_no_error(told):
    retry_after_s(said(429, retry_after=told, date=told))


# Keys.


@pytest.mark.parametrize("key", [".", "..", "../a", "a/..", "a/../b", "a/./b", "..\\a", "a\\.."])
def test_a_key_that_may_lead_out_of_its_place_has_none(key):
    assert "lead out of its place" in key_fault(key)


@pytest.mark.parametrize(
    "key", ["a", "...", "a..b", "a.", ".a", "a/b", "/", "//", "a b", "é", "%2e%2e", "?a=b#c", "a\nb"]
)
def test_any_other_key_has_its_place(key):
    assert key_fault(key) is None


# URLs.


def test_a_url_names_a_plain_service():
    sink = sink_at(BASE)
    assert (sink.grade, sink.forgets_deletions, sink.batch_max) == (Grade.PLAIN, False, 1)


def test_options_say_what_is_agreed():
    sink = sink_at(
        "https://host/a%2Fb c/{key}.json?grade=conditional&superseded=412&forgets_deletions=yes&put=POST&delete=PUT"
        "&content_type=text/plain&timeout=500ms&busy=429,503&missing=no%20such%20page"
    )
    assert (sink.grade, sink.forgets_deletions) == (Grade.CONDITIONAL, True)
    assert sink._contract == Contract(
        place=("/a%2Fb%20c/", ".json"),
        put="POST",
        delete="PUT",
        content_type="text/plain",
        timeout_s=0.5,
        superseded=412,
        forgets_deletions=True,
        busy=frozenset({429, 503}),
        missing="no such page",
    )


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("http://host/documents", "no {key} in its path; write for example http://host/documents/{key}"),
        ("http://host/{id}/{key}", "only {key} is filled in"),
        ("http://host/{key}#part", "what follows a # is never sent"),
        ("http:///{key}", "names no server"),
        ("http://one,two/{key}", "names no server"),
        ("http://ho..st/{key}", "names no server"),
        ("http://exämple.net/{key}", "names no server"),
        ("http://host:http/{key}", "invalid port"),
        (f"{BASE}?grade=atomic", "grade=atomic is unknown; write plain or conditional"),
        (f"{BASE}?superseded=412", "superseded is for grade=conditional"),
        (f"{BASE}?forgets_deletions=yes", "forgets_deletions is for grade=conditional"),
        (f"{BASE}?grade=conditional&superseded=404", "superseded=404 is unknown; write 409 or 412"),
        (f"{BASE}?put=PATCH", "put=PATCH is unknown; write PUT or POST"),
        (f"{BASE}?delete=GET", "delete=GET is unknown"),
        (f"{BASE}?timeout=0s", "timeout has to be above zero"),
        (f"{BASE}?busy=200", "no list of statuses"),
        (f"{BASE}?missing=%20", "missing= is empty"),
        (f"{BASE}?content_type=a%0D%0Ab", "content_type="),
        (f"{BASE}?ca=x.pem", "ca is for connections that are encrypted"),
        (f"{BASE}?verify=no", "unknown option 'verify'"),
        (f"{BASE}?token_env=KEYWISE_NO_TOKEN", "has no such variable"),
        ("http://user:pass@host/{key}?token_env=KEYWISE_NO_TOKEN", "both a user and token_env"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_the_fix(url, fix):
    with pytest.raises(AddressError) as refused:
        sink_at(url)
    assert fix in str(refused.value)


# Servers.


def server(url: str, scheme: str = "http", **more: str) -> Server:
    return server_at(Address(url, "pages", {}), scheme, dict(more))


def test_a_server_has_the_port_of_its_scheme_unless_another_is_named():
    assert server("http://host/").origin == "http://host:80"
    assert server("https://HOST/", "https").origin == "https://host:443"
    assert server("http://[::1]:8080/").origin == "http://[::1]:8080"
    assert server_at(Address("opensearch://host", "pages", {}), "http", {}, port=9200).name == "host:9200"


def test_a_user_is_let_in_by_a_header_and_never_shown():
    one = server("http://us%40er:p%40ssw%C3%B6rd@host/")
    assert one.authorization == "Basic dXNAZXI6cEBzc3fDtnJk"
    assert "ss" not in repr(one)
    assert set(one.secrets) == {"dXNAZXI6cEBzc3fDtnJk", "p@sswörd", "p%40ssw%C3%B6rd"}
    assert server("http://user@host/").authorization == "Basic dXNlcjo="


def test_a_token_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("SEARCH_TOKEN", "hunter2-hunter2")
    one = server("http://host/", token_env="SEARCH_TOKEN")
    assert (one.authorization, one.secrets) == ("Bearer hunter2-hunter2", ("hunter2-hunter2",))
    assert "hunter2" not in repr(one)
    monkeypatch.setenv("SEARCH_TOKEN", "hunter2\r\nEvil: yes")
    with pytest.raises(AddressError, match="is no token") as refused:
        server("http://host/", token_env="SEARCH_TOKEN")
    assert "hunter2" not in str(refused.value)


def test_what_was_taken_from_the_options_is_gone():
    options = {"ca": "x.pem", "index": "pages"}
    assert server_at(Address("https://host", "pages", {}), "https", options).ca == "x.pem"
    assert options == {"index": "pages"}
