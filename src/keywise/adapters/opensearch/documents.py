"""Requests to OpenSearch and Elasticsearch, and what their responses mean: bulk lines, items, conflicts."""

import enum
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from keywise.adapters.http.client import HttpResponse, one_line
from keywise.core.change import VERSION_MIN, Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AddressError
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult

NEWER, NOT_OLDER = b"external", b"external_gte"
"""Version types: the engine accepts only a higher version than it has, or an equal one too."""
CONFLICT, TOO_MANY, UNAVAILABLE = 409, 429, 503
NOT_FOUND = "index_not_found_exception"
INDEX_UNAVAILABLE = frozenset(
    {
        "cluster_block_exception",
        "index_closed_exception",
        NOT_FOUND,
        "security_exception",
        "unavailable_shards_exception",
    }
)
"""The index is closed, removed or blocked, or a shard is down; this is not the fault of a change."""
NAME_MAX_BYTES = 255


# Requests.


class Action(msgspec.Struct, frozen=True, gc=False):
    """One change as lines of a bulk request."""

    key: str
    deleted: bool
    version: int
    lines: bytes


def action_of(change: Change[Any], claim: Claim, held: Mapping[str, int]) -> Action | SinkResult:
    """Return the lines of a change, or its result if no request is needed; `held` has the versions for removals."""
    if is_removal(change):
        # Delete at the version that was just read. The engine refuses this if a newer version arrives meanwhile.
        return _deletion(change.key, held[change.key], NOT_OLDER) if change.key in held else APPLIED
    # A message has no era; the claim has the era of the key.
    era, version, generation = claim.order or change.order
    if era > 0:
        return _permanent(
            f"the key is in era {era}, and an index has one number per document, without room for an era; "
            "send the new numbering to a fresh index, as a pipeline with a new name"
        )
    if version < 0:
        return _permanent(f"version {version} is below 0, and the engine takes versions from 0 on")
    # A repair (its claim has no order) and an operator's command write again at the version that the index has.
    rule = NOT_OLDER if generation > 0 or claim.order is None else NEWER
    if change.deleted:
        return _deletion(change.key, version, rule)
    try:
        body = line_of(change.body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return _permanent(f"the body is no JSON object: {error}")
    return Action(change.key, False, version, _PUT % (b"index", _encoded(change.key), version, rule, body))


def is_removal(change: Change[Any]) -> bool:
    """Whether an operator or a repair removes a key whose version is unknown."""
    return change.deleted and change.order[1] == VERSION_MIN


def line_of(body: bytes) -> bytes:
    """Return a JSON object on one line, unchanged if it has no line breaks; raises if it is not an object."""
    _OBJECT.decode(body)
    return msgspec.json.format(body, indent=-1) if b"\n" in body else body


def first_batch(actions: Sequence[Action], count: int, bytes_max: int) -> Sequence[Action]:
    """Return the first actions that fit into one request; an action that is too large goes alone."""
    sizes = list(accumulate(len(action.lines) for action in actions[:count]))
    return actions[: max(1, bisect_right(sizes, bytes_max))]


def index_of(path: str, example: str) -> str:
    """Return the index that the path of a URL names; `example` is a correct URL for the error message."""
    name = path.removeprefix("/")
    if not name:
        raise AddressError(f"the URL names no index; write for example {example}")
    if not is_index_name(name):
        raise AddressError(f"{name!r} cannot be the name of one index or alias; write for example {example}")
    return name


def is_index_name(name: str) -> bool:
    """Whether a text can be the name of one index. It is no pattern and no list, which requests would follow too."""
    is_wrong = re.search(r'[\\/*?"<>|\s,#:]', name) or name.startswith(("-", "_", "+", "."))
    return bool(name) and not is_wrong and name == name.lower() and len(name.encode()) <= NAME_MAX_BYTES


def _deletion(key: str, version: int, rule: bytes) -> Action:
    return Action(key, True, version, _HEAD % (b"delete", _encoded(key), version, rule))


_HEAD = b'{"%b":{"_id":%b,"version":%d,"version_type":"%b"}}\n'
_PUT = _HEAD + b"%b\n"
_encoded = msgspec.json.Encoder().encode
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _permanent(cause: str) -> SinkResult:
    return SinkResult(Outcome.FAILED, cause, permanent=True)


# Responses.


class Reason(msgspec.Struct, frozen=True):
    """The engine's reason for a refusal."""

    type: str = ""
    reason: str | None = None
    caused_by: "Reason | None" = None

    def __str__(self) -> str:
        deeper = self.caused_by.reason if self.caused_by is not None else None
        return ": ".join(part for part in (self.type, self.reason, deeper) if part)


class Item(msgspec.Struct, frozen=True):
    """The response to one action."""

    status: int
    error: Reason | None = None


class Items(msgspec.Struct, frozen=True):
    """The response to a bulk request."""

    errors: bool
    items: list[dict[str, Item]] = []


class Document(msgspec.Struct, frozen=True):
    """The document of one key, in the response to a multi-get."""

    key: str = msgspec.field(name="_id")
    found: bool = False
    version: int | None = msgspec.field(name="_version", default=None)
    body: msgspec.Raw = msgspec.field(name="_source", default=msgspec.Raw(b""))
    error: Reason | None = None


class Documents(msgspec.Struct, frozen=True):
    """The response to a multi-get."""

    docs: list[Document] = []


class Index(msgspec.Struct, frozen=True):
    """An index with its aliases."""

    aliases: dict[str, msgspec.Raw] = {}


class _Documents(msgspec.Struct, frozen=True):
    count: int = 0


class _Indexing(msgspec.Struct, frozen=True):
    index_total: int = 0


class _Primaries(msgspec.Struct, frozen=True):
    docs: _Documents = _Documents()
    indexing: _Indexing = _Indexing()


class _Stats(msgspec.Struct, frozen=True):
    primaries: dict[str, _Primaries] = msgspec.field(name="_all", default={})


class _Refusal(msgspec.Struct, frozen=True):
    error: Reason | str = ""
    status: int = 0


read_items = msgspec.json.Decoder(Items).decode
read_documents = msgspec.json.Decoder(Documents).decode
read_indexes = msgspec.json.Decoder(dict[str, Index]).decode
_read_stats = msgspec.json.Decoder(_Stats).decode
_read_refusal = msgspec.json.Decoder(_Refusal).decode


def is_unused(stats: bytes) -> bool:
    """Whether the statistics of an index count no document, and no write whose document waits for a refresh."""
    totals = _read_stats(stats).primaries.values()
    return not any(one.docs.count or one.indexing.index_total for one in totals)


class Conflict(enum.Enum):
    """A version conflict that can be judged only after the document's version has been read."""

    EQUAL = enum.auto()
    """The index has this version already."""
    UNCLEAR = enum.auto()
    """The engine does not say which version the index has."""
    CONTRARY = enum.auto()
    """The engine reports a lower version, which would not be a conflict."""


def result_of(action: Action, item: Item) -> SinkResult | Conflict:
    """Return the result of an action, or the conflict that has to be resolved first."""
    error = item.error
    if error is None:
        # The deletion of an absent document has the status 404, and no error.
        return APPLIED
    if item.status == CONFLICT:
        return _conflict(action, error.reason or "")
    if item.status in (TOO_MANY, UNAVAILABLE) or error.type in INDEX_UNAVAILABLE or is_misdirected(error):
        return SinkResult(Outcome.BUSY, str(error))
    if 400 <= item.status < 500:
        return _permanent(str(error))
    return SinkResult(Outcome.FAILED, str(error), certainty=Certainty.ENDED)


def is_misdirected(error: Reason) -> bool:
    """Whether the name no longer stands for one index: it is gone, or it is an alias of several."""
    has_several = (error.reason or "").startswith("no write index is defined for alias")
    return error.type == NOT_FOUND or (error.type == "illegal_argument_exception" and has_several)


def _conflict(action: Action, reason: str) -> SinkResult | Conflict:
    # Match at the end: the reason begins with the key, which may contain anything.
    match = re.search(r"current version \[(\d+)\] is higher [a-z ]*the one provided \[\d+\]$", reason)
    if match is None:
        return Conflict.UNCLEAR
    current = int(match[1])
    if current != action.version:
        return SUPERSEDED if current > action.version else Conflict.CONTRARY
    # For a deletion: an earlier attempt was applied, and its response was lost. For a put, read the document first: an
    # operator who removes a key that the ledger does not know deletes at the version that the index has, and this
    # version may be that deletion.
    return APPLIED if action.deleted else Conflict.EQUAL


def result_of_conflict(action: Action, conflict: Conflict, held: int | None) -> SinkResult:
    """Return the result of a conflict, given the version that the index has now; None: it has no document."""
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
    """Return why a whole request was refused. `discreet` removes secrets from the quoted text."""
    words = str(_refusal_of(answer).error) or answer.body.decode("utf-8", "replace")
    # Remove secrets before the text is cut: a part of a secret would not be recognised.
    text = one_line(discreet(words))
    return f"status {answer.status}{f', {text}' if text else ''}"


def refused(answer: HttpResponse, cause: str) -> SinkResult:
    """Return the result of a change whose whole request was refused."""
    if answer.status in (400, 413):
        return _permanent(cause)
    is_of_engine = own_reason(answer) is not None
    if answer.status < 500 or (is_of_engine and answer.status == UNAVAILABLE):
        # Permissions, addresses and limits concern every change, so none of them is at fault.
        return SinkResult(Outcome.BUSY, cause)
    if is_of_engine or answer.status == 500:
        certainty = Certainty.ENDED if is_of_engine and answer.status == 500 else Certainty.UNKNOWN
        return SinkResult(Outcome.FAILED, cause, certainty=certainty)
    # A gateway answered, and the engine may still process the request.
    return SinkResult(Outcome.BUSY, cause, certainty=Certainty.UNKNOWN)


def own_reason(answer: HttpResponse) -> Reason | None:
    """Return the engine's own reason for a refusal; it has a type and repeats the status, and a gateway's does not."""
    match _refusal_of(answer):
        case _Refusal(error=Reason(type=kind) as reason, status=answer.status) if kind:
            return reason
    return None


def _refusal_of(answer: HttpResponse) -> _Refusal:
    try:
        return _read_refusal(answer.body)
    except (msgspec.MsgspecError, UnicodeError):
        return _Refusal()
