"""Any HTTP service: one request for each change, to the place that a template names."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Self
from urllib.parse import quote, urlsplit

import msgspec
from msgspec.structs import replace

from keywise.adapters.http.client import (
    OPTIONS,
    WORDS_MAX,
    HttpClient,
    HttpResponse,
    one_line,
    retry_after_s,
    server_at,
)
from keywise.core.change import Change, Order, Outcome
from keywise.core.clock import Clock, boot_time
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AddressError, OutcomeUnknownError, UnavailableError
from keywise.core.settings import seconds
from keywise.core.sink import APPLIED, SUPERSEDED, Grade, Sink, SinkResult
from keywise.core.url import Address, redacted

ANSWER_MAX = 64 * 1024
"""Only the begin of an answer is of interest, and only if it is a refusal."""
NOT_FOUND, GONE = 404, 410
"""To a deletion: there is nothing to delete. But a gateway without a route to the service says 404 too."""
ANY = "any"
"""The value of the option `missing` that takes every 404 for the service's."""
NOT_LET_IN = frozenset({401, 407})
"""It is asked with the wrong user or token, or without one: no change is to blame for that."""
UNREAD = frozenset({408, 425})
"""The request came too slowly or too early, and was not worked on."""
OWN_FAILURES = frozenset({500, 501, 505, 507, 508})
"""The service itself failed and is done with it; any other 5xx may be a gateway's, and the service still at work."""
PAUSE_AFTER_KEYS = 5
"""Keys in a row that were all sent away for a time: then it is the service as a whole that wants to be left alone."""
ACTED = {"POST": frozenset({301, 302, 303}), "PUT": frozenset({303}), "DELETE": frozenset({303})}
"""Redirects that may follow a deed: clients go on with GET after them. After any other one the request is repeated."""
ORDER_HEADERS = ("Keywise-Era", "Keywise-Version", "Keywise-Generation")
DELETED_HEADER = "Keywise-Deleted"


class Contract(msgspec.Struct, frozen=True):
    """What is agreed with a service."""

    place: tuple[str, ...]
    """The parts of the path, percent-encoded; the key stands between them."""
    put: str = "PUT"
    delete: str = "DELETE"
    content_type: str = "application/json"
    timeout_s: float = 10.0
    superseded: int | None = None
    """The status with which the service refuses what is older than it holds; None if it takes anything."""
    forgets_deletions: bool = False
    busy: frozenset[int] = frozenset({429})
    """With these the service says that it has done nothing, and may do so later."""
    missing: str | None = None
    """A text that only the service itself puts into a 404; `any`: nobody else answers 404."""

    def says_missing(self, answer: HttpResponse) -> bool:
        """Whether the service itself has answered that it holds nothing of the key."""
        if answer.status != NOT_FOUND:
            return answer.status == GONE
        if answer.headers.get(DELETED_HEADER.lower(), "").lower() == "true":
            return True
        if self.missing is None or self.missing == ANY:
            return self.missing == ANY
        return self.missing in answer.body.decode("utf-8", "replace")

    def method_of(self, desired: "DesiredState") -> str:
        return self.delete if desired.deleted else self.put


class DesiredState(msgspec.Struct, frozen=True):
    """What a service is to hold: something at an order, or nothing."""

    order: Order
    deleted: bool


class HttpSink:
    """Plain, or conditional if the service itself refuses what is older than it holds."""

    batch_max = 1

    def __init__(self, client: HttpClient, contract: Contract) -> None:
        self.grade = Grade.PLAIN if contract.superseded is None else Grade.CONDITIONAL
        self.forgets_deletions = contract.forgets_deletions
        self._client = client
        self._contract = contract
        self._service_pause = ServicePause()

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__()

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        return [await self._apply(change, claim) for change, claim in zip(changes, claims, strict=True)]

    async def _apply(self, change: Change[Any], claim: Claim) -> SinkResult:
        # The claim knows the era; that of a repair has no order of its own.
        desired = DesiredState(claim.order or change.order, change.deleted)
        if (misfit := misfit_of(change.key)) is not None:
            return SinkResult(Outcome.FAILED, misfit, permanent=True)
        if (waits := self._service_pause.busy_result()) is not None:
            return waits
        result = None
        try:
            result = await self._ask(change, desired, claim)
            # Its claim has to run out, however long the service asks for: so the worker is told that it is away.
            return replace(result, wait_s=None) if result.certainty is Certainty.UNKNOWN else result
        finally:
            self._service_pause.record(change.key, result)

    async def _ask(self, change: Change[Any], desired: DesiredState, claim: Claim) -> SinkResult:
        contract = self._contract
        method, path = contract.method_of(desired), quote(change.key, safe="").join(contract.place)
        body, headers = b"", _headers(desired, claim)
        if method != "DELETE":
            # To send a body with DELETE means nothing, and some servers refuse it.
            body, headers["Content-Type"] = change.body, contract.content_type
        try:
            answer = await self._client.request(method, path, body=body, headers=headers, timeout_s=contract.timeout_s)
        except UnavailableError as error:
            return SinkResult(Outcome.BUSY, str(error))
        except OutcomeUnknownError as error:
            return SinkResult(Outcome.FAILED, str(error), certainty=Certainty.UNKNOWN)
        return judged(answer, desired, contract, self._client.discreet)


def _headers(desired: DesiredState, claim: Claim) -> dict[str, str]:
    headers = dict(zip(ORDER_HEADERS, map(str, desired.order), strict=True))
    headers[DELETED_HEADER] = "true" if desired.deleted else "false"
    if claim.token:
        # There is none while the ledger is down.
        headers["Keywise-Token"] = str(claim.token)
    return headers


class ServicePause:
    """Whether the service as a whole has asked to be left alone: nobody asks before that time, and then one begins.

    A service may limit each document for itself, so one that is sent away says nothing about the others.
    """

    def __init__(self, clock: Clock = boot_time) -> None:
        self._clock = clock
        self._refused_keys: set[str] = set()
        """Keys, since it took or refused anything."""
        self._cause = ""
        self._until = -math.inf
        self._is_probing = False
        """Somebody finds out whether it is over."""

    def busy_result(self) -> SinkResult | None:
        """What becomes of a change without asking; None if it may be sent, and then `record` has to be called."""
        if len(self._refused_keys) < PAUSE_AFTER_KEYS:
            return None
        if self._is_probing or self._clock() < self._until:
            return SinkResult(Outcome.BUSY, self._cause)
        self._is_probing = True
        return None

    def record(self, key: str, result: SinkResult | None) -> None:
        """What became of a change that was sent; None if nobody knows."""
        self._is_probing = False
        if result is not None and result.wait_s is not None:
            self._refused_keys.add(key)
            self._cause, self._until = result.cause, self._clock() + result.wait_s
        elif result is not None and result.outcome is not Outcome.BUSY and result.certainty is not Certainty.UNKNOWN:
            self._refused_keys.clear()


def judged(
    answer: HttpResponse, desired: DesiredState, contract: Contract, discreet: Callable[[str], str]
) -> SinkResult:
    """What an answer says about a change. `discreet` takes secrets out of what the service says."""
    status = answer.status
    if 200 <= status < 300 or (desired.deleted and contract.says_missing(answer)):
        return APPLIED
    cause = _format_response(answer, discreet)
    if status == contract.superseded:
        return _refused(answer, desired.order, cause)
    if 300 <= status < 400:
        return _redirected(status, contract.method_of(desired), cause)
    wait_s = retry_after_s(answer)
    # A 503 may be a gateway's, but a write of unknown outcome does no harm if the service refuses whatever is older.
    is_harmless = contract.superseded is not None and not contract.forgets_deletions
    if status in contract.busy | NOT_LET_IN or (status == 503 and wait_s is not None and is_harmless):
        return SinkResult(Outcome.BUSY, cause, wait_s=wait_s)
    if status == NOT_FOUND and desired.deleted:
        # Applied, if it were the service's; a gateway's would leave the document there for ever.
        hint = "a gateway may have said that: name in missing=… what only the service says, or write missing=any"
        # Not busy: something did answer. A deletion of an absent document has to end, also if no other change succeeds.
        return SinkResult(Outcome.FAILED, f"{cause} ({hint})", certainty=Certainty.UNKNOWN)
    if status in UNREAD:
        return SinkResult(Outcome.FAILED, cause)
    if status in OWN_FAILURES:
        return SinkResult(Outcome.FAILED, cause, certainty=Certainty.ENDED)
    if status >= 500:
        return SinkResult(Outcome.BUSY, cause, certainty=Certainty.UNKNOWN, wait_s=wait_s)
    return SinkResult(Outcome.FAILED, cause, permanent=True)


def _redirected(status: int, method: str, cause: str) -> SinkResult:
    """Whoever wrote the URL can put that right; no change can."""
    if status not in ACTED[method]:
        return SinkResult(Outcome.BUSY, cause)
    fix = "a service that takes a change has to answer 2xx itself"
    return SinkResult(Outcome.BUSY, f"{cause}; it may have been written: {fix}", certainty=Certainty.UNKNOWN)


def _refused(answer: HttpResponse, order: Order, cause: str) -> SinkResult:
    """The service holds something newer, if it tells the truth; if it says which, that is looked at."""
    held = held_order(answer, order)
    if held is None or held > order:
        return SUPERSEDED
    if held == order:
        # An earlier try arrived though its answer was lost.
        return APPLIED
    return SinkResult(Outcome.FAILED, f"{cause} (it holds version {held[1]}, which is older)", permanent=True)


def held_order(answer: HttpResponse, own: Order) -> Order | None:
    """The order that a service says it holds; what it leaves out is as in ours. None if it names no version."""
    fields = [answer.headers.get(name.lower(), "") for name in ORDER_HEADERS]
    if not fields[1] or not all(re.fullmatch(r"-?[0-9]{1,19}|", number) for number in fields):
        return None
    era, version, generation = (int(number or ours) for number, ours in zip(fields, own, strict=True))
    return era, version, generation


def _format_response(answer: HttpResponse, discreet: Callable[[str], str]) -> str:
    """The status, and what else the service says, on one short line without secrets."""
    if 300 <= answer.status < 400:
        return f"{answer.status}: it points to {_target(answer, discreet)}; name that URL, nothing is followed"
    # Hidden before it is cut, or a part of a secret might stay.
    said = one_line(discreet(answer.body.decode("utf-8", "replace")))
    return f"{answer.status}: {said}" if said else f"{answer.status}"


def _target(answer: HttpResponse, discreet: Callable[[str], str]) -> str:
    """Where a redirect leads, without what may be secret there."""
    try:
        parts = urlsplit(answer.headers.get("location", ""))
    except ValueError:
        return "no URL"
    host = parts.netloc.rpartition("@")[2]
    target = f"{parts.scheme}://{host}{parts.path}" if host else parts.path
    return quote(discreet(target), safe="/:%[]*")[:WORDS_MAX] or "nowhere"


def misfit_of(key: str) -> str | None:
    """Why a key has no safe place in a path; None if it has one.

    Whatever lies between may decode a path and resolve its dots, so that the request ends up elsewhere.
    """
    if any(part in (".", "..") for part in re.split(r"[/\\]", key)):
        return (
            "the key has . or .. between slashes, which may lead out of its place; make other keys in a read function"
        )
    return None


def connect(address: Address) -> Sink:
    """`https://host/path/{key}`, where each key has its place.

    The other options are in docs/how-to/http.md.
    """
    known = ("grade", "superseded", "forgets_deletions", "put", "delete", "content_type", "timeout", "busy", "missing")
    options = address.take(*known, *OPTIONS)
    server = server_at(address, address.scheme, options)
    return HttpSink(HttpClient(server, answer_max=ANSWER_MAX), _contract(address, options))


def _contract(address: Address, options: dict[str, str]) -> Contract:
    url = redacted(address.url)
    grade = _one_of(url, options, "grade", Grade.PLAIN, Grade.CONDITIONAL)
    if grade == Grade.PLAIN and (given := [name for name in ("superseded", "forgets_deletions") if name in options]):
        raise AddressError(f"{url}: {given[0]} is for grade=conditional, where the service refuses what is older")
    content_type = options.get("content_type", "application/json")
    if not re.fullmatch(r"[!-~][ -~]*", content_type):
        raise AddressError(f"{url}: content_type={content_type!r} is none; write for example application/json")
    timeout_s = seconds(options.get("timeout", "10s"))
    if not timeout_s > 0:
        raise AddressError(f"{url}: timeout has to be above zero")
    return Contract(
        place=_place(address),
        put=_one_of(url, options, "put", "PUT", "POST"),
        delete=_one_of(url, options, "delete", "DELETE", "POST", "PUT"),
        content_type=content_type,
        timeout_s=timeout_s,
        superseded=int(_one_of(url, options, "superseded", "409", "412")) if grade == Grade.CONDITIONAL else None,
        forgets_deletions=_one_of(url, options, "forgets_deletions", "no", "yes") == "yes",
        busy=_busy(url, options.get("busy", "429")),
        missing=_missing(url, options.get("missing")),
    )


def _place(address: Address) -> tuple[str, ...]:
    url, parts = redacted(address.url), urlsplit(address.url)
    if parts.fragment:
        raise AddressError(f"{url}: what follows a # is never sent; write %23 if it is part of the path")
    place = parts.path.split("{key}")
    if len(place) < 2:
        raise AddressError(
            f"{url} has no {{key}} in its path; write for example {address.scheme}://host/documents/{{key}}"
        )
    if any(set("{}") & set(part) for part in place):
        raise AddressError(f"{url}: only {{key}} is filled in; write %7B and %7D for other braces")
    return tuple(quote(part, safe="/%:@!$&'()*+,;=~") for part in place)


def _busy(url: str, statuses: str) -> frozenset[int]:
    if not re.fullmatch(r"[45]\d\d(,[45]\d\d)*", statuses):
        raise AddressError(f"{url}: busy={statuses} is no list of statuses; write for example busy=429,503")
    return frozenset(map(int, statuses.split(",")))


def _missing(url: str, text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise AddressError(f"{url}: missing= is empty; write what the service says in a 404, or missing=any")
    return text


def _one_of(url: str, options: dict[str, str], name: str, *known: str) -> str:
    """The value of an option; the first of those that are known if it is not given."""
    value = options.get(name, known[0])
    if value not in known:
        raise AddressError(f"{url}: {name}={value} is unknown; write {' or '.join(known)}")
    return str(value)
