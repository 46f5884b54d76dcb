"""An index of OpenSearch or Elasticsearch: bulk requests with external versions, so the engine refuses older ones.

The engine forgets deletions after a while (`index.gc_deletes`, by default a minute) and when it restarts. The ledger's
tombstones stay.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import quote

import msgspec

from keywise.adapters.http.client import OPTIONS, HttpResponse, Server, retry_after_s, server_at
from keywise.adapters.opensearch.documents import (
    TOO_MANY,
    Action,
    Conflict,
    Document,
    action_of,
    first_batch,
    index_of,
    is_index_name,
    is_misdirected,
    is_removal,
    is_unused,
    read_documents,
    read_indexes,
    read_items,
    refused,
    result_of,
    result_of_conflict,
)
from keywise.adapters.opensearch.engine import JSON, Engine
from keywise.adapters.opensearch.targets import IndexTargets
from keywise.core.adaptive_limit import AdaptiveLimit
from keywise.core.change import Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import (
    AddressError,
    AdminError,
    DatabaseError,
    KeywiseError,
    OutcomeUnknownError,
    UnavailableError,
)
from keywise.core.resource import opening
from keywise.core.settings import seconds
from keywise.core.sink import APPLIED, Content, Grade, Sink, SinkResult
from keywise.core.target import TargetNote
from keywise.core.url import Address

PORT = 9200
BATCH_MAX = 500
REQUEST_MAX_BYTES = 5 * 1024 * 1024
TIMEOUT_S = 30.0
SHARD_WAIT = "10s"
"""How long the engine waits for a shard that is down. Its default, a minute, is longer than a claim."""
FIND_S = 5.0
"""How long the start of a pipeline waits for the index: a command that only asks the ledger should not wait for it."""
READ_MAX = 100
"""The most documents in one read."""
ANSWER_MAX_BYTES = 64 * 1024 * 1024
FILTER_PATH = "errors,items.*.status,items.*.error.type,items.*.error.reason,items.*.error.caused_by.reason"
LINES = {"Content-Type": "application/x-ndjson"}


class OpenSearchSink:
    """Writes documents: the id is the key, the version is the change's, and the body is stored byte by byte."""

    grade = Grade.CONDITIONAL
    forgets_deletions = True

    def __init__(self, server: Server, index: str, batch_max: int, request_max_bytes: int, timeout_s: float) -> None:
        self.batch_max = batch_max
        self._engine = Engine(server, index, timeout_s, ANSWER_MAX_BYTES)
        self._targets = IndexTargets(self._engine, index)
        self._index = index
        self._path = f"/{quote(index, safe='')}"
        self._request_max_bytes = self._bytes_max = request_max_bytes
        self._adaptive_limit = AdaptiveLimit(batch_max)
        self._is_known = False
        """Whether the sink has found the index, so that a write does not create it."""
        self._is_alias = False

    async def __aenter__(self) -> Self:
        async with opening(self._engine):
            # An engine that is down does not stop the start: `apply` looks again, and many commands need only the
            # ledger.
            with suppress(UnavailableError):
                await self._find_index()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._engine.__aexit__()

    # Writing.

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        if self._adaptive_limit.wait_s > 0:
            return [self._paused()] * len(changes)
        try:
            await self._find_index()
            held = await self._versions(change.key for change in changes if is_removal(change))
        except KeywiseError as error:
            return [self._pause(str(error))] * len(changes)
        planned = [action_of(change, claim, held) for change, claim in zip(changes, claims, strict=True)]
        results = iter(await self._write([one for one in planned if isinstance(one, Action)]))
        return [one if isinstance(one, SinkResult) else next(results) for one in planned]

    async def _write(self, actions: Sequence[Action]) -> list[SinkResult]:
        results: list[SinkResult] = []
        while rest := actions[len(results) :]:
            results += await self._send(first_batch(rest, self._adaptive_limit.limit, self._bytes_max))
        return results

    async def _send(self, actions: Sequence[Action]) -> list[SinkResult]:
        """Send one request; if the engine refuses it as too large or malformed, send its halves."""
        if self._adaptive_limit.wait_s > 0:
            return [self._paused()] * len(actions)
        body = b"".join([action.lines for action in actions])
        # For an alias, the engine can refuse to create an index. There is no such option for an index: one that is
        # removed meanwhile would be created again.
        query = f"filter_path={FILTER_PATH}&timeout={SHARD_WAIT}{'&require_alias=true' if self._is_alias else ''}"
        try:
            answer = await self._ask("_bulk", query, body, LINES)
        except UnavailableError as error:
            return [self._pause(str(error))] * len(actions)
        except OutcomeUnknownError as error:
            return [_unknown(str(error))] * len(actions)
        if answer.status == 200:
            return await self._results_of(actions, answer)
        if answer.status in (400, 413) and len(actions) > 1:
            if answer.status == 413:
                self._bytes_max = min(self._bytes_max, max(1, len(body) // 2))
            middle = len(actions) // 2
            return [*await self._send(actions[:middle]), *await self._send(actions[middle:])]
        result = refused(answer, self._engine.cause(answer))
        if result.outcome is Outcome.BUSY:
            is_crowded = answer.status == TOO_MANY
            self._adaptive_limit.record_refusal(result.cause, wait_s=retry_after_s(answer), is_crowded=is_crowded)
        return [result] * len(actions)

    async def _results_of(self, actions: Sequence[Action], answer: HttpResponse) -> list[SinkResult]:
        try:
            reply = read_items(answer.body)
        except (msgspec.MsgspecError, UnicodeError) as error:
            return [_unknown(f"the answer cannot be read: {error}")] * len(actions)
        if not reply.errors:
            self._adaptive_limit.record_success(len(actions))
            return [APPLIED] * len(actions)
        if len(reply.items) != len(actions):
            return [_unknown(f"{len(reply.items)} answers to {len(actions)} changes")] * len(actions)
        items = [item for item_by_action in reply.items for item in item_by_action.values()]
        verdicts = [result_of(action, item) for action, item in zip(actions, items, strict=True)]
        if any(item.error is not None and is_misdirected(item.error) for item in items):
            self._is_known = False  # The next `apply` looks for the index again, and reports what is wrong.
        # The engine may refuse a part of a request: its queue was full, or a shard was down.
        waiting = [one.cause for one in verdicts if isinstance(one, SinkResult) and one.outcome is Outcome.BUSY]
        if waiting:
            is_crowded = any(item.status == TOO_MANY for item in items)
            is_whole = len(waiting) == len(verdicts)
            self._adaptive_limit.record_refusal(waiting[0], is_crowded=is_crowded, is_whole=is_whole)
        else:
            self._adaptive_limit.record_success(len(items))
        return await self._resolve_conflicts(actions, verdicts)

    async def _resolve_conflicts(
        self, actions: Sequence[Action], verdicts: Sequence[SinkResult | Conflict]
    ) -> list[SinkResult]:
        pairs = list(zip(actions, verdicts, strict=True))
        try:
            held = await self._versions(action.key for action, verdict in pairs if isinstance(verdict, Conflict))
        except KeywiseError as error:
            waits = SinkResult(Outcome.BUSY, str(error))
            return [waits if isinstance(verdict, Conflict) else verdict for verdict in verdicts]
        return [
            result_of_conflict(action, verdict, held.get(action.key)) if isinstance(verdict, Conflict) else verdict
            for action, verdict in pairs
        ]

    # Pausing.

    def _paused(self) -> SinkResult:
        return SinkResult(Outcome.BUSY, self._adaptive_limit.cause)

    def _pause(self, cause: str) -> SinkResult:
        """Start a pause after an error that came before the write; the changes are busy, because nothing was sent."""
        self._adaptive_limit.record_refusal(cause, is_crowded=False)
        return self._paused()

    # Reading.

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        found: dict[str, Content] = {}
        for start in range(0, len(keys), READ_MAX):
            for document in await self._documents(keys[start : start + READ_MAX], "_source=true"):
                # An index may store no bodies (`_source` is off); then there is nothing to compare.
                found[document.key] = Content(bytes(document.body) or {}, document.version)
        return found

    async def is_empty(self) -> bool:
        """Return whether the index has no document, not even one that no search has seen since the last refresh."""
        if not self._is_known:
            return False
        with self._engine.repeatable():
            path = f"{self._path}/_stats/docs,indexing?filter_path=_all.primaries"
            answer = await self._engine.ask("GET", path, timeout_s=min(self._engine.timeout_s, FIND_S))
            if answer.status in (403, 404):
                return False  # This user may not ask.
            self._engine.check(answer)
            return is_unused(answer.body)

    async def _versions(self, keys: Iterable[str]) -> dict[str, int]:
        asked = list(keys)
        found = await self._documents(asked, "_source=false") if asked else []
        return {document.key: document.version for document in found if document.version is not None}

    async def _documents(self, keys: Sequence[str], query: str) -> list[Document]:
        """Read the documents of these keys in real time, not from the last refresh as a search would."""
        with self._engine.repeatable():
            answer = await self._ask("_mget", query, msgspec.json.encode({"ids": keys}), JSON)
            if not answer.is_whole and len(keys) > 1:
                middle = len(keys) // 2
                return [*await self._documents(keys[:middle], query), *await self._documents(keys[middle:], query)]
            self._engine.check(answer)
            documents = read_documents(answer.body).docs
        for document in documents:
            if document.error is not None:
                raise UnavailableError(f"{self._engine.name}: {document.error}")
        return [document for document in documents if document.found]

    # The index.

    async def _find_index(self) -> None:
        """Look for the index, once: a bulk request would create a missing one, with guessed field types."""
        if self._is_known:
            return
        with self._engine.repeatable():
            find_s = min(self._engine.timeout_s, FIND_S)
            answer = await self._engine.ask("GET", f"{self._path}/_alias", timeout_s=find_s)
            if answer.status == 403:
                self._is_known = True  # This user may not ask, so the sink assumes that the index exists.
                return
            self._engine.check(answer)
            indexes = read_indexes(answer.body)
        self._is_alias = self._index not in indexes
        if self._is_alias and [self._index in index.aliases for index in indexes.values()] != [True]:
            # With several indexes, one key could have several documents.
            raise DatabaseError(
                f"{self._index} is neither an index nor an alias of one index, but stands for "
                f"{', '.join(sorted(indexes)) or 'none'}; let it stand for one"
            )
        self._is_known = True

    # Other indexes that the alias can stand for.

    async def current_target(self) -> str:
        return await self._targets.current()

    def at_target(self, target: str) -> Sink:
        if not is_index_name(target):
            raise AdminError(f"{target!r} cannot be the name of an index")
        server, timeout_s = self._engine.server, self._engine.timeout_s
        return OpenSearchSink(server, target, self.batch_max, self._request_max_bytes, timeout_s)

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        await self._targets.create(target, note, epoch, definition)

    async def finish_target(self, target: str) -> list[str]:
        return await self._targets.finish(target)

    async def count(self, target: str) -> int:
        return await self._targets.count(target)

    async def targets(self, pipeline: str) -> list[str]:
        return await self._targets.built_by(pipeline)

    async def drop_target(self, target: str) -> None:
        await self._targets.drop(target)

    async def move_name(self, before: str, after: str, epoch: int) -> None:
        await self._targets.move(before, after, epoch)

    # Requests.

    async def _ask(self, what: str, query: str, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
        return await self._engine.ask("POST", f"{self._path}/{what}?{query}", body, headers=headers)


def connect(address: Address) -> Sink:
    """Make the sink for `opensearch://user:password@host:9200/INDEX`; `opensearchs` is encrypted."""
    options = address.take("batch_max", "request_max_bytes", "timeout", *OPTIONS)
    scheme = "https" if address.scheme.endswith("searchs") else "http"
    server = server_at(address, scheme, options, PORT)
    index = index_of(address.path, f"{address.scheme}://localhost:{PORT}/pages")
    timeout_s = seconds(options.get("timeout", TIMEOUT_S))
    if timeout_s <= 0:
        raise AddressError(f"timeout={options['timeout']} must be above zero")
    batch_max = _count(options, "batch_max", BATCH_MAX)
    return OpenSearchSink(server, index, batch_max, _count(options, "request_max_bytes", REQUEST_MAX_BYTES), timeout_s)


def _count(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise AddressError(f"{name}={text} must be a whole number above zero")
    return int(text)


def _unknown(cause: str) -> SinkResult:
    return SinkResult(Outcome.FAILED, cause, certainty=Certainty.UNKNOWN)
