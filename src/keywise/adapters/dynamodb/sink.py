"""A table of Amazon DynamoDB: each item is put on the condition that the table holds no newer version of its key.

A deletion is an item too, a tombstone with the version and without a body. So the table never forgets a deletion.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from keywise.adapters.aws.errors import error_code, refusal_of, was_sent
from keywise.adapters.aws.service import Answer
from keywise.adapters.dynamodb.errors import CONDITION_FAILED, IN_TRANSACTION, INVALID, MISSING_TABLE
from keywise.adapters.dynamodb.items import (
    AttributeNames,
    ConditionalPut,
    HeldItem,
    Item,
    fields_of,
    held_of,
    is_removal,
    is_tombstone,
    number,
    permanent,
    result_of_refusal,
    write_of,
)
from keywise.adapters.dynamodb.requests import RequestSlots
from keywise.adapters.dynamodb.table import OPTIONS, TOMBSTONE, DynamoTable, table_at
from keywise.core.change import Change, Outcome
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import AddressError, DatabaseError, KeywiseError, ThrottledError, UnavailableError
from keywise.core.sink import APPLIED, SUPERSEDED, Content, Grade, Sink, SinkResult
from keywise.core.url import Address, redacted

BATCH_MAX = 100
REQUESTS, REQUESTS_MAX = 32, 500
TOUCHES_MAX = 5
"""How often one attempt touches a row that gets a newer version each time; then the change ends as *busy*."""
OLD_ITEM = "ALL_OLD"


class DynamoSink:
    """Puts items: the body's fields are attributes, beside those for key, version and generation."""

    grade = Grade.CONDITIONAL
    forgets_deletions = False
    batch_max = BATCH_MAX

    def __init__(
        self, table: DynamoTable, names: AttributeNames, *, touches: bool = False, requests: int = REQUESTS
    ) -> None:
        self._table = table
        self._names = names
        self._touches = touches
        """Whether a change of a reindex only raises the generation of its row."""
        self._requests = requests
        self._slots = RequestSlots(requests)

    async def __aenter__(self) -> Self:
        await self._table.open(self._requests + 1)
        try:
            # A service that is down does not stop the start: `apply` looks again, and many commands need only the
            # ledger.
            with suppress(UnavailableError):
                await self._find_table()
        except BaseException:
            await self._table.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._table.close()

    # Writing.

    async def apply(self, changes: Sequence[Change[Any]], claims: Sequence[Claim]) -> Sequence[SinkResult]:
        if self._slots.is_paused:
            return [self._paused()] * len(changes)
        try:
            await self._find_table()
        except KeywiseError as error:
            self._slots.record_outage(str(error))
            return [self._paused()] * len(changes)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._apply_one(*pair)) for pair in zip(changes, claims, strict=True)]
        return [task.result() for task in tasks]

    async def _apply_one(self, change: Change[Any], claim: Claim) -> SinkResult:
        async with self._slots.slot():
            if self._slots.is_paused:
                return self._paused()
            _, version, generation = claim.order or change.order
            if is_removal(change):
                return await self._remove(change.key)
            if self._touches and generation > 0:
                # The table is its own origin: a row that is gone there is gone here.
                return APPLIED if change.deleted else await self._touch(change.key, version, generation)
            write = write_of(change, claim, self._table.key, self._names)
            return write if isinstance(write, SinkResult) else await self._put(write)

    async def _put(self, write: ConditionalPut) -> SinkResult:
        request = {
            "Item": write.item,
            "ConditionExpression": write.condition,
            "ExpressionAttributeNames": write.names,
            "ExpressionAttributeValues": write.values,
            "ReturnValuesOnConditionCheckFailure": OLD_ITEM,
        }
        answer = await self._sent(partial(self._table.ask, "put_item", **request))
        if isinstance(answer, SinkResult):
            return answer
        return APPLIED if answer is None else result_of_refusal(write, self._held(answer), self._names)

    async def _touch(self, key: str, version: int, generation: int) -> SinkResult:
        """Raise the generation of a row, at its version or at a newer one that it has got meanwhile."""
        for _ in range(TOUCHES_MAX):
            held = await self._touched_at(key, version, generation)
            if isinstance(held, SinkResult):
                return held
            if held is None or held.is_tombstone:
                return SUPERSEDED
            if held.version is None or held.version < version:
                found = "no whole number" if held.version is None else f"{held.version}, which is older than {version}"
                return SinkResult(Outcome.FAILED, f"the row has {found} in {self._names.version}")
            if held.generation >= generation:
                return APPLIED if held.version == version else SUPERSEDED
            version = held.version
        return SinkResult(Outcome.BUSY, "the row gets new versions all the time")

    async def _touched_at(self, key: str, version: int, generation: int) -> SinkResult | HeldItem | None:
        """Raise the generation of a row at this version; return the result, or what the table holds if it refused."""
        request = {
            "Key": self._table.key_of(key),
            "UpdateExpression": "SET #generation = :generation",
            "ConditionExpression": (
                "#version = :version AND attribute_not_exists(#tombstone) "
                "AND (attribute_not_exists(#generation) OR #generation < :generation)"
            ),
            "ExpressionAttributeNames": {
                "#version": self._names.version,
                "#generation": self._names.generation,
                "#tombstone": self._names.tombstone,
            },
            "ExpressionAttributeValues": {":version": number(version), ":generation": number(generation)},
            "ReturnValuesOnConditionCheckFailure": OLD_ITEM,
        }
        answer = await self._sent(partial(self._table.ask, "update_item", **request))
        if isinstance(answer, SinkResult):
            return answer
        return APPLIED if answer is None else self._held(answer)

    async def _remove(self, key: str) -> SinkResult:
        """Delete the item of a key whose version the ledger does not know, if the item has not changed meanwhile."""
        name, names = self._table.key_of(key), {"#version": self._names.version}
        try:
            found = await self._table.ask("get_item", Key=name, ConsistentRead=True)
        except KeywiseError as error:
            return await self._failed(error, is_write=False)
        if not (item := found.get("Item")):
            return APPLIED
        request: dict[str, Any] = {"Key": name, "ExpressionAttributeNames": names}
        if self._names.version in item:
            request["ConditionExpression"] = "attribute_not_exists(#version) OR #version = :version"
            request["ExpressionAttributeValues"] = {":version": item[self._names.version]}
        else:
            request["ConditionExpression"] = "attribute_not_exists(#version)"
        answer = await self._sent(partial(self._table.ask, "delete_item", **request))
        if isinstance(answer, SinkResult):
            return answer
        return APPLIED if answer is None else SinkResult(Outcome.BUSY, "the item has just got another version")

    # Answers.

    async def _sent(self, request: Callable[[], Awaitable[Answer]]) -> SinkResult | Item | None:
        """Send a write, and again if its answer was lost: the condition then shows whether it was applied.

        Return None if it was accepted; if its condition was refused, the item that the table holds, empty if there is
        none; and otherwise the result of the change.
        """
        for is_again in (False, True):
            try:
                await request()
            except KeywiseError as error:
                if (refusal := refusal_of(error)) is not None and error_code(refusal) == CONDITION_FAILED:
                    self._slots.record_success()
                    return dict(refusal.response.get("Item") or {})
                if is_again or not _is_lost(error):
                    return await self._failed(error, is_write=True)
            else:
                break
        self._slots.record_success()
        return None

    async def _failed(self, error: KeywiseError, *, is_write: bool) -> SinkResult:
        """Return the result of a change whose request has failed; pause the sink if other changes would fail too."""
        cause, refusal = str(error), refusal_of(error)
        code = error_code(refusal) if refusal is not None else ""
        if isinstance(error, ThrottledError):
            self._slots.record_throttling(cause)
        elif code in (INVALID, MISSING_TABLE):
            return await self._refused(cause)
        elif is_write and _is_lost(error):
            return SinkResult(Outcome.BUSY, cause, certainty=Certainty.UNKNOWN)
        elif code != IN_TRANSACTION:
            # Permissions, addresses and outages concern every change, so none of them is at fault.
            self._slots.record_outage(cause)
        return SinkResult(Outcome.BUSY, cause)

    async def _refused(self, cause: str) -> SinkResult:
        """Return that the change can never be written; if the table is gone or has another key, pause the sink instead.

        The item may be too large, or an attribute may have a type that an index of the table does not take.
        """
        try:
            await self._table.find_again()
        except KeywiseError as error:
            self._slots.record_outage(str(error))
            return self._paused()
        return permanent(cause)

    def _paused(self) -> SinkResult:
        return SinkResult(Outcome.BUSY, self._slots.adaptive_limit.cause)

    def _held(self, item: Item) -> HeldItem | None:
        return held_of(item, self._names) if item else None

    # Reading.

    async def read(self, keys: Sequence[str]) -> Mapping[str, Content]:
        await self._find_table()
        own = {self._table.key, self._names.version, self._names.generation}
        found: dict[str, Content] = {}
        for key, item in (await self._table.items(keys)).items():
            if not is_tombstone(item, self._names.tombstone):
                body = {name: value for name, value in fields_of(item).items() if name not in own}
                found[key] = Content(body, held_of(item, self._names).version)
        return found

    async def is_empty(self) -> bool:
        """Return whether the table has no item, not even a tombstone."""
        await self._find_table()
        answer = await self._table.ask("scan", Limit=1, ConsistentRead=True)
        return not answer.get("Items") and not answer.get("LastEvaluatedKey")

    async def _find_table(self) -> None:
        await self._table.find()
        if self._table.key in {self._names.version, self._names.generation, self._names.tombstone}:
            raise DatabaseError(
                f"{self._table.service.name}: {self._table.key} is the key of the table; name other attributes with "
                "version=, generation= and tombstone="
            )


def _is_lost(error: KeywiseError) -> bool:
    """Whether a write may have been applied, or may still be: there was no answer, or one of a failing server."""
    if (refusal := refusal_of(error)) is not None:
        return bool(refusal.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500)
    return isinstance(error, UnavailableError) and was_sent(error)


def connect(address: Address) -> Sink:
    """Make the sink for `dynamodb://TABLE?key=id&version=version`; the table is named like the pipeline by default."""
    options = address.take("key", "version", "generation", "touch", "tombstone", "requests", *OPTIONS)
    url, touch = redacted(address.url), options.get("touch", "")
    if touch and options.get("generation", touch) != touch:
        raise AddressError(f"{url}: touch={touch} raises another attribute than generation={options['generation']}")
    names = AttributeNames(
        version=options.get("version", "version"),
        generation=touch or options.get("generation", ""),
        tombstone=options.get("tombstone", TOMBSTONE),
    )
    given = [name for name in (options.get("key"), names.version, names.generation, names.tombstone) if name]
    if len(set(given)) < len(given) or not (names.version and names.tombstone):
        raise AddressError(f"{url}: key, version, generation and tombstone have to be different attributes")
    requests = options.get("requests", str(REQUESTS))
    if not (requests.isascii() and requests.isdigit() and 1 <= int(requests) <= REQUESTS_MAX):
        raise AddressError(f"{url}: requests={requests} has to be a number from 1 to {REQUESTS_MAX}")
    return DynamoSink(table_at(address, options), names, touches=bool(touch), requests=int(requests))
