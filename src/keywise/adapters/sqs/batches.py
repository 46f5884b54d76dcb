"""Batches of SQS: at most ten entries and so many bytes in a request, and so many requests side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from keywise.adapters.sqs.messages import OutgoingMessage
from keywise.core.errors import KeywiseError

T = TypeVar("T")

BATCH_MAX = 10
"""The most entries of one request."""


class RequestLimit:
    """Runs requests side by side, up to a limit for all callers together."""

    def __init__(self, requests: int) -> None:
        self._free = asyncio.Semaphore(requests)

    async def run(self, requests: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Run all requests, also if one fails; then raise the first error."""
        if len(requests) == 1:
            async with self._free:
                return [await requests[0]()]
        ended = await asyncio.gather(*map(self._ended, requests))
        if errors := [one for one in ended if isinstance(one, KeywiseError)]:
            raise errors[0]
        return [one for one in ended if not isinstance(one, KeywiseError)]

    async def _ended(self, request: Callable[[], Awaitable[T]]) -> T | KeywiseError:
        async with self._free:
            try:
                return await request()
            except KeywiseError as error:
                return error


def batches(entries: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut a sequence into batches of ten."""
    return (entries[start : start + BATCH_MAX] for start in range(0, len(entries), BATCH_MAX))


def numbered(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the entries of a request their ids: their places in it."""
    return [{"Id": str(place), **entry} for place, entry in enumerate(entries)]


def sized_batches(messages: Sequence[OutgoingMessage], bytes_max: int) -> Iterator[tuple[int, list[OutgoingMessage]]]:
    """Cut messages into batches of ten that have at most so many bytes; each with the place of its first message."""
    batch, size, start = list[OutgoingMessage](), 0, 0
    for place, message in enumerate(messages):
        if batch and (len(batch) == BATCH_MAX or size + message.size > bytes_max):
            yield start, batch
            batch, size, start = [], 0, place
        batch.append(message)
        size += message.size
    if batch:
        yield start, batch
