"""An HTTP service as a sink: one request per change, to the URL that a template gives for its key."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Self
from urllib.parse import quote, urlsplit

import msgspec
from msgspec.structs import replace

from keywise.adapters.http.client import (
    OPTIONS,
    QUOTE_MAX,
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
"""A response body matters only if the request was refused, and then only its beginning."""
NOT_FOUND, GONE = 404, 410
"""For a deletion, both mean that there is nothing to delete. But a gateway without a route to the service answers 404
too."""
ANY = "any"
"""The value of the option `missing` with which every 404 counts as the service's own."""
UNAUTHENTICATED = frozenset({401, 407})
"""The credentials are wrong or missing, which is not the fault of a change."""
NOT_PROCESSED = frozenset({408, 425})
"""The request came too slowly or too early, and was not processed."""
OWN_FAILURES = frozenset({500, 501, 505, 507, 508})
"""The service itself failed and has ended the request. Any other 5xx may come from a gateway while the service still
processes the request."""
PAUSE_AFTER_KEYS = 5
"""After so many different keys in a row were refused with a delay, the service as a whole counts as overloaded."""
REDIRECTS_AFTER_WRITE = {"POST": frozenset({301, 302, 303}), "PUT": frozenset({303}), "DELETE": frozenset({303})}
"""Redirects that a service may answer after it has processed the request: the client goes on with GET. After any other
redirect, a client repeats the request, so it was not processed."""
ORDER_HEADERS = ("Keywise-Era", "Keywise-Version", "Keywise-Generation")
DELETED_HEADER = "Keywise-Deleted"


class Contract(msgspec.Struct, frozen=True):
    """How a service expects requests, and what its responses mean."""

    place: tuple[str, ...]
    """The parts of the path before, between and after the key, percent-encoded."""
    put: str = "PUT"
    delete: str = "DELETE"
    content_type: str = "application/json"
    timeout_s: float = 10.0
    superseded: int | None = None
    """The status with which the service refuses an order that is older than its own; None: it accepts every order."""
    forgets_deletions: bool = False
    busy: frozenset[int] = frozenset({429})
    """Statuses that mean: not processed, try again later."""
    missing: str | None = None
    """A text that only the service itself puts into a 404; `any`: no gateway answers 404."""

    def says_missing(self, answer: HttpResponse) -> bool:
        """Whether the service itself, and not a gateway, says that it has nothing for this key."""
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
    """What the service should have: a document at an order, or none."""

    order: Order
    deleted: bool


class HttpSink:
    """A plain sink, or a conditional one if the service refuses an order that is older than its own."""

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
        # The claim has the era of the key. The claim of a repair has no order of its own.
        desired = DesiredState(claim.order or change.order, change.deleted)
        if (fault := key_fault(change.key)) is not None:
            return SinkResult(Outcome.FAILED, fault, permanent=True)
        if (waits := self._service_pause.busy_result()) is not None:
            return waits
        result = None
        try:
            result = await self._ask(change, desired, claim)
            # After an unknown outcome the claim has to expire, however long the service asks to wait. Without `wait_s`,
            # the worker backs off as from an unreachable sink.
            return replace(result, wait_s=None) if result.certainty is Certainty.UNKNOWN else result
        finally:
            self._service_pause.record(change.key, result)

    async def _ask(self, change: Change[Any], desired: DesiredState, claim: Claim) -> SinkResult:
        contract = self._contract
        method, path = contract.method_of(desired), quote(change.key, safe="").join(contract.place)
        body, headers = b"", _headers(desired, claim)
        if method != "DELETE":
            # A body of a DELETE has no meaning in HTTP, and some servers refuse it.
            body, headers["Content-Type"] = change.body, contract.content_type
        try:
            answer = await self._client.request(method, path, body=body, headers=headers, timeout_s=contract.timeout_s)
        except UnavailableError as error:
            return SinkResult(Outcome.BUSY, str(error))
        except OutcomeUnknownError as error:
            return SinkResult(Outcome.FAILED, str(error), certainty=Certainty.UNKNOWN)
        return result_of_response(answer, desired, contract, self._client.discreet)


def _headers(desired: DesiredState, claim: Claim) -> dict[str, str]:
    headers = dict(zip(ORDER_HEADERS, map(str, desired.order), strict=True))
    headers[DELETED_HEADER] = "true" if desired.deleted else "false"
    if claim.token:
        # Without a ledger (`write-anyway`), there is no token.
        headers["Keywise-Token"] = str(claim.token)
    return headers


class ServicePause:
    """Pauses all requests while the service as a whole is overloaded; afterwards one request goes first, as a probe.

    A service may limit each document separately, so one refused key says nothing about the others.
    """

    def __init__(self, clock: Clock = boot_time) -> None:
        self._clock = clock
        self._refused_keys: set[str] = set()
        """Keys that were refused with a delay since the last definite result."""
        self._cause = ""
        self._until = -math.inf
        self._is_probing = False
        """Whether a request is under way that probes the end of the pause."""

    def busy_result(self) -> SinkResult | None:
        """Return the result of a change during a pause; None: send it, and call `record` afterwards."""
        if len(self._refused_keys) < PAUSE_AFTER_KEYS:
            return None
        if self._is_probing or self._clock() < self._until:
            return SinkResult(Outcome.BUSY, self._cause)
        self._is_probing = True
        return None

    def record(self, key: str, result: SinkResult | None) -> None:
        """Record the result of a change that was sent; None: the call raised or was cancelled."""
        self._is_probing = False
        if result is not None and result.wait_s is not None:
            self._refused_keys.add(key)
            self._cause, self._until = result.cause, self._clock() + result.wait_s
        elif result is not None and result.outcome is not Outcome.BUSY and result.certainty is not Certainty.UNKNOWN:
            self._refused_keys.clear()


def result_of_response(
    answer: HttpResponse, desired: DesiredState, contract: Contract, discreet: Callable[[str], str]
) -> SinkResult:
    """Return what a response means for a change. `discreet` removes secrets from the quoted text."""
    status = answer.status
    if 200 <= status < 300 or (desired.deleted and contract.says_missing(answer)):
        return APPLIED
    cause = _format_response(answer, discreet)
    if status == contract.superseded:
        return _refused(answer, desired.order, cause)
    if 300 <= status < 400:
        return _redirected(status, contract.method_of(desired), cause)
    wait_s = retry_after_s(answer)
    # A 503 may come from a gateway, so the write may still happen. That does no harm if the service refuses older
    # orders.
    is_harmless = contract.superseded is not None and not contract.forgets_deletions
    if status in contract.busy | UNAUTHENTICATED or (status == 503 and wait_s is not None and is_harmless):
        return SinkResult(Outcome.BUSY, cause, wait_s=wait_s)
    if status == NOT_FOUND and desired.deleted:
        # If the service itself answered, the deletion is done. If a gateway did, the document would stay for ever.
        hint = "a gateway may have said that: name in missing=… what only the service says, or write missing=any"
        # Not busy: something did answer. Attempts have to count, so that the deletion of an absent document ends.
        return SinkResult(Outcome.FAILED, f"{cause} ({hint})", certainty=Certainty.UNKNOWN)
    if status in NOT_PROCESSED:
        return SinkResult(Outcome.FAILED, cause)
    if status in OWN_FAILURES:
        return SinkResult(Outcome.FAILED, cause, certainty=Certainty.ENDED)
    if status >= 500:
        return SinkResult(Outcome.BUSY, cause, certainty=Certainty.UNKNOWN, wait_s=wait_s)
    return SinkResult(Outcome.FAILED, cause, permanent=True)


def _redirected(status: int, method: str, cause: str) -> SinkResult:
    """Busy, because no change is at fault: the URL has to be corrected."""
    if status not in REDIRECTS_AFTER_WRITE[method]:
        return SinkResult(Outcome.BUSY, cause)
    fix = "a service that takes a change has to answer 2xx itself"
    return SinkResult(Outcome.BUSY, f"{cause}; it may have been written: {fix}", certainty=Certainty.UNKNOWN)


def _refused(answer: HttpResponse, order: Order, cause: str) -> SinkResult:
    """Judge a refusal as superseded by the order that the service reports to have, if it reports one."""
    held = held_order(answer, order)
    if held is None or held > order:
        return SUPERSEDED
    if held == order:
        # An earlier attempt was applied, and its response was lost.
        return APPLIED
    return SinkResult(Outcome.FAILED, f"{cause} (it holds version {held[1]}, which is older)", permanent=True)


def held_order(answer: HttpResponse, own: Order) -> Order | None:
    """Return the order that the service reports to have; missing parts are as in ours. None without a version."""
    fields = [answer.headers.get(name.lower(), "") for name in ORDER_HEADERS]
    if not fields[1] or not all(re.fullmatch(r"-?[0-9]{1,19}|", number) for number in fields):
        return None
    era, version, generation = (int(number or ours) for number, ours in zip(fields, own, strict=True))
    return era, version, generation


def _format_response(answer: HttpResponse, discreet: Callable[[str], str]) -> str:
    """Format the status and the beginning of the body, on one line and without secrets."""
    if 300 <= answer.status < 400:
        return f"{answer.status}: it points to {_target(answer, discreet)}; name that URL, nothing is followed"
    # Remove secrets before the text is cut: a part of a secret would not be recognised.
    said = one_line(discreet(answer.body.decode("utf-8", "replace")))
    return f"{answer.status}: {said}" if said else f"{answer.status}"


def _target(answer: HttpResponse, discreet: Callable[[str], str]) -> str:
    """Return the target of a redirect, without user, password and query, which may be secret."""
    try:
        parts = urlsplit(answer.headers.get("location", ""))
    except ValueError:
        return "no URL"
    host = parts.netloc.rpartition("@")[2]
    target = f"{parts.scheme}://{host}{parts.path}" if host else parts.path
    return quote(discreet(target), safe="/:%[]*")[:QUOTE_MAX] or "nowhere"


def key_fault(key: str) -> str | None:
    """Return why a key cannot be part of a path; None if it can.

    A proxy may decode the path and resolve its dots, so that the request would reach another document.
    """
    if any(part in (".", "..") for part in re.split(r"[/\\]", key)):
        return (
            "the key has . or .. between slashes, which may lead out of its place; make other keys in a read function"
        )
    return None


def connect(address: Address) -> Sink:
    """Make the sink for `https://host/path/{key}`.

    docs/how-to/http.md describes the options.
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
    """Return the value of an option, which has to be one of `known`; by default the first of these."""
    value = options.get(name, known[0])
    if value not in known:
        raise AddressError(f"{url}: {name}={value} is unknown; write {' or '.join(known)}")
    return str(value)
