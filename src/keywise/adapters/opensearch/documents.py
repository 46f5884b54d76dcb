"""What OpenSearch and Elasticsearch are told, and what their answers mean: bulk lines, items, conflicts, pressure."""

import enum
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from keywise.adapters.http.client import HttpResponse, one_line
from keywise.core.change import VERSION_MIN, Change, Outcome
from keywise.core.clock import Clock, boot_time
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AddressError
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult

NEWER, NOT_OLDER = b"external", b"external_gte"
"""What the engine lets pass: a version above the one that it holds, or one that is not below it."""
CONFLICT, TOO_MANY, UNAVAILABLE = 409, 429, 503
NOT_FOUND = "index_not_found_exception"
CLOSED = frozenset(
    {
        "cluster_block_exception",
        "index_closed_exception",
        NOT_FOUND,
        "security_exception",
        "unavailable_shards_exception",
    }
)
"""Somebody has closed, removed or locked the index, or a part of it is away: no change is to blame for that."""
BACKOFF_S, BACKOFF_MAX_S = 0.1, 5.0
NAME_MAX_BYTES = 255


# What is told.


class Action(msgspec.Struct, frozen=True, gc=False):
    """One change as lines of a bulk request."""

    key: str
    deleted: bool
    version: int
    lines: bytes


def action_of(change: Change[Any], claim: Claim, held: Mapping[str, int]) -> Action | SinkResult:
    """The lines of a change, or what became of it without asking; `held` has the versions of removals."""
    if is_removal(change):
        # Whatever is there goes, unless it becomes newer meanwhile.
        return _deletion(change.key, held[change.key], NOT_OLDER) if change.key in held else APPLIED
    # Upstream names no era; the claim does.
    era, version, generation = claim.order or change.order
    if era > 0:
        return _hopeless(
            f"the key is in era {era}, and an index has one number per document, without room for an era; "
            "send the new numbering to a fresh index, as a pipeline with a new name"
        )
    if version < 0:
        return _hopeless(f"version {version} is below 0, and the engine takes versions from 0 on")
    # A repair, which has a claim without an order, and an operator write at the version that is there.
    rule = NOT_OLDER if generation > 0 or claim.order is None else NEWER
    if change.deleted:
        return _deletion(change.key, version, rule)
    try:
        body = line_of(change.body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return _hopeless(f"the body is no JSON object: {error}")
    return Action(change.key, False, version, _PUT % (b"index", _encoded(change.key), version, rule, body))


def is_removal(change: Change[Any]) -> bool:
    """Whether a key is removed of which no version is known, by an operator or a repair."""
    return change.deleted and change.order[1] == VERSION_MIN


def line_of(body: bytes) -> bytes:
    """A JSON object as it is, or without the line breaks between its parts; raises if it is none."""
    _OBJECT.decode(body)
    return msgspec.json.format(body, indent=-1) if b"\n" in body else body


def first_part(actions: Sequence[Action], count: int, bytes_max: int) -> Sequence[Action]:
    """As many from the begin as fit into a request; one that is too large for any goes alone."""
    sizes = list(accumulate(len(action.lines) for action in actions[:count]))
    return actions[: max(1, bisect_right(sizes, bytes_max))]


def index_of(path: str, example: str) -> str:
    """The name of the index in the path of a URL; `example` shows a right URL."""
    name = path.removeprefix("/")
    if not name:
        raise AddressError(f"the URL names no index; write for example {example}")
    is_wrong = re.search(r'[\\/*?"<>|\s,#:]', name) or name.startswith(("-", "_", "+", "."))
    if is_wrong or name != name.lower() or len(name.encode()) > NAME_MAX_BYTES:
        raise AddressError(f"{name!r} cannot be the name of one index or alias; write for example {example}")
    return name


def _deletion(key: str, version: int, rule: bytes) -> Action:
    return Action(key, True, version, _HEAD % (b"delete", _encoded(key), version, rule))


_HEAD = b'{"%b":{"_id":%b,"version":%d,"version_type":"%b"}}\n'
_PUT = _HEAD + b"%b\n"
_encoded = msgspec.json.Encoder().encode
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _hopeless(cause: str) -> SinkResult:
    return SinkResult(Outcome.FAILED, cause, permanent=True)


# What is said.


class Reason(msgspec.Struct, frozen=True):
    """Why something was refused, in the engine's words."""

    type: str = ""
    reason: str | None = None
    caused_by: "Reason | None" = None

    def __str__(self) -> str:
        deeper = self.caused_by.reason if self.caused_by is not None else None
        return ": ".join(part for part in (self.type, self.reason, deeper) if part)


class Item(msgspec.Struct, frozen=True):
    """What became of one action."""

    status: int
    error: Reason | None = None


class Items(msgspec.Struct, frozen=True):
    """The answer to a bulk request."""

    errors: bool
    items: list[dict[str, Item]] = []


class Document(msgspec.Struct, frozen=True):
    """What the index holds of one key."""

    key: str = msgspec.field(name="_id")
    found: bool = False
    version: int | None = msgspec.field(name="_version", default=None)
    body: msgspec.Raw = msgspec.field(name="_source", default=msgspec.Raw(b""))
    error: Reason | None = None


class Documents(msgspec.Struct, frozen=True):
    """The answer to a multi-get."""

    docs: list[Document] = []


class Index(msgspec.Struct, frozen=True):
    """What an index is also called."""

    aliases: dict[str, msgspec.Raw] = {}


class _Refusal(msgspec.Struct, frozen=True):
    error: Reason | str = ""
    status: int = 0


read_items = msgspec.json.Decoder(Items).decode
read_documents = msgspec.json.Decoder(Documents).decode
read_indexes = msgspec.json.Decoder(dict[str, Index]).decode
_read_refusal = msgspec.json.Decoder(_Refusal).decode


class Conflict(enum.Enum):
    """A refusal because of a version that has to be looked into."""

    EQUAL = enum.auto()
    """This very version is there already."""
    UNCLEAR = enum.auto()
    """The engine does not say which version is there."""
    CONTRARY = enum.auto()
    """The engine says that a lower version is there, which would be no conflict."""


def judged(action: Action, item: Item) -> SinkResult | Conflict:
    """What became of an action."""
    error = item.error
    if error is None:
        # A deletion of what is not there has the status 404, and is no error.
        return APPLIED
    if item.status == CONFLICT:
        return _conflicting(action, error.reason or "")
    if item.status in (TOO_MANY, UNAVAILABLE) or error.type in CLOSED or is_astray(error):
        return SinkResult(Outcome.BUSY, str(error))
    if 400 <= item.status < 500:
        return _hopeless(str(error))
    return SinkResult(Outcome.FAILED, str(error), certainty=Certainty.ENDED)


def is_astray(error: Reason) -> bool:
    """Whether the name does not lead to one index any more: it is gone, or an alias stands for several."""
    has_several = (error.reason or "").startswith("no write index is defined for alias")
    return error.type == NOT_FOUND or (error.type == "illegal_argument_exception" and has_several)


def _conflicting(action: Action, reason: str) -> SinkResult | Conflict:
    # At the end, because the text begins with the key.
    match = re.search(r"current version \[(\d+)\] is higher [a-z ]*the one provided \[\d+\]$", reason)
    if match is None:
        return Conflict.UNCLEAR
    current = int(match[1])
    if current != action.version:
        return SUPERSEDED if current > action.version else Conflict.CONTRARY
    # An earlier try has arrived though its answer was lost. A put is looked for all the same: an operator who removes
    # a key that the ledger does not know deletes at the version that is there.
    return APPLIED if action.deleted else Conflict.EQUAL


def looked_into(action: Action, conflict: Conflict, held: int | None) -> SinkResult:
    """What a conflict means, with the version that is held now; None: no document is there."""
    if held is not None and held >= action.version:
        return APPLIED if held == action.version else SUPERSEDED
    if held is not None or conflict is Conflict.CONTRARY:
        return CONTRADICTED
    return APPLIED if action.deleted else REMEMBERED


REMEMBERED = SinkResult(
    Outcome.BUSY,
    "the index refuses this version and holds nothing: it remembers a removal, and forgets it after index.gc_deletes",
)
CONTRADICTED = SinkResult(
    Outcome.BUSY, "the index refuses this version, and holds none that is as high; it is asked again"
)


def cause_of(answer: HttpResponse, discreet: Callable[[str], str]) -> str:
    """Why a whole request was refused. `discreet` takes secrets out of what the server says."""
    words = str(_refusal_of(answer).error) or answer.body.decode("utf-8", "replace")
    # Hidden before it is cut, or a part of a secret might stay.
    text = one_line(discreet(words))
    return f"status {answer.status}{f', {text}' if text else ''}"


def refused(answer: HttpResponse, cause: str) -> SinkResult:
    """What it means for a change that its whole request was refused."""
    if answer.status in (400, 413):
        return _hopeless(cause)
    # The engine's own errors have a type, and repeat their status.
    refusal = _refusal_of(answer)
    is_of_engine = isinstance(refusal.error, Reason) and refusal.error.type != "" and refusal.status == answer.status
    if answer.status < 500 or (is_of_engine and answer.status == UNAVAILABLE):
        # Rights, addresses and limits concern every change, and none of them is to blame.
        return SinkResult(Outcome.BUSY, cause)
    if is_of_engine or answer.status == 500:
        certainty = Certainty.ENDED if is_of_engine and answer.status == 500 else Certainty.UNKNOWN
        return SinkResult(Outcome.FAILED, cause, certainty=certainty)
    # A gateway answers in place of the engine, which may still be at it.
    return SinkResult(Outcome.BUSY, cause, certainty=Certainty.UNKNOWN)


def _refusal_of(answer: HttpResponse) -> _Refusal:
    try:
        return _read_refusal(answer.body)
    except (msgspec.MsgspecError, UnicodeError):
        return _Refusal()


# What it bears.


class AdaptiveLimit:
    """How much the engine bears: it is left alone after a refusal, and gets fewer changes until it copes again."""

    def __init__(self, limit_max: int, clock: Clock = boot_time) -> None:
        self.limit = limit_max
        """Changes in one request, at the most."""
        self.cause = ""
        self._limit_max = limit_max
        self._clock = clock
        self._until = -math.inf
        self._refusals = 0

    @property
    def wait_s(self) -> float:
        """How long it is to be left alone; not above zero if it is not."""
        return self._until - self._clock()

    def record_refusal(
        self, cause: str, *, wait_s: float | None = None, is_crowded: bool, is_whole: bool = True
    ) -> None:
        """It could not take changes: all of a request (`is_whole`), or some; too many at once (`is_crowded`), or none.

        `wait_s` is what it asked for itself.
        """
        if self.wait_s <= 0:
            # Requests that were sent beside one that was refused say nothing new.
            self._refusals += is_whole
            self.limit = max(1, self.limit // 2) if is_crowded else self.limit
        self.cause = cause
        backoff_s = min(BACKOFF_S * 2 ** min(self._refusals, 10), BACKOFF_MAX_S)
        self._until = max(self._until, self._clock() + (backoff_s if wait_s is None else wait_s))

    def record_success(self, changes: int) -> None:
        """It took a request; only one that was as large as it may be tells that a larger one can be tried."""
        self._refusals = 0
        if changes >= self.limit:
            self.limit = min(self._limit_max, self.limit + max(1, self.limit // 4))
