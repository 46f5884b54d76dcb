"""An object of the user's as an origin: it has three methods, async or plain, and returns rows of any type."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self, runtime_checkable

from keywise.core.bodies import encoded
from keywise.core.errors import OriginError, SettingsError, UnavailableError
from keywise.core.origin import CURSOR_MAX_BYTES, Page, Shard, note_bytes

THREADS = 4
"""How many calls of plain methods run at a time."""


@runtime_checkable
class UserOrigin(Protocol):
    """The methods that an object of the user's needs: those of `Origin`, plain or async, with rows of any type."""

    def shards(self, size: int) -> Any:
        """Return a list of `Shard`."""

    def scan(self, shard: Shard, after: str, limit: int) -> Any:
        """Return a `Page`; its rows are bytes, or values that become JSON."""

    def fetch(self, keys: Sequence[str]) -> Any:
        """Return a mapping of keys to rows. A key that has no row is left out, or its row is None."""


@runtime_checkable
class ConsistencyDeclaration(Protocol):
    """An object that declares whether its `fetch` sees every write that was confirmed before."""

    @property
    def is_consistent(self) -> bool: ...


class FunctionOrigin:
    """Calls the methods of an object, and checks what they return. Plain ones run in threads."""

    def __init__(self, user_origin: UserOrigin) -> None:
        if isinstance(user_origin, type) or not isinstance(user_origin, UserOrigin):
            raise SettingsError(
                f"{user_origin!r} cannot be an origin; write a URL, or an object with the methods shards(size), "
                "scan(shard, after, limit) and fetch(keys)"
            )
        self._user_origin = user_origin
        self._declared = user_origin if isinstance(user_origin, ConsistencyDeclaration) else None
        self._threads: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="keywise-origin")
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._threads is not None, "the origin is not open"
        # Do not wait: a thread cannot be cancelled, and a method that hangs would block the shutdown.
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_consistent(self) -> bool:
        return self._declared is not None and self._declared.is_consistent

    async def shards(self, size: int) -> Sequence[Shard]:
        shards: list[Shard] = list(await self._call(self._user_origin.shards, size))
        names = {shard.name for shard in shards}
        if len(names) < len(shards):
            raise OriginError("shards() returned two shards of the same name; give each a name of its own")
        for shard in shards:
            _check_length(f"shards() returned bounds of shard {shard.name!r}", shard.bounds)
        return shards

    async def scan(self, shard: Shard, after: str, limit: int) -> Page:
        page: Page = await self._call(self._user_origin.scan, shard, after, limit)
        if not page.after:
            raise OriginError("scan() returned an empty cursor, which is before the first row; return another text")
        _check_length("scan() returned a cursor", page.after)
        return Page([encoded(row) for row in page.rows], page.after, page.is_last)

    async def fetch(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        found: Mapping[str, Any] = await self._call(self._user_origin.fetch, keys)
        return {key: encoded(found[key]) for key in keys if found.get(key) is not None}

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*arguments)
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, method, *arguments)
            # A plain method may return an awaitable, as some decorators do.
            return await answer if inspect.isawaitable(answer) else answer
        except OSError as error:
            raise UnavailableError(f"the origin cannot be reached: {error}") from error


def _check_length(what: str, text: str) -> None:
    if note_bytes(text) > CURSOR_MAX_BYTES:
        raise OriginError(f"{what} with more than {CURSOR_MAX_BYTES} bytes as JSON; return a shorter text")
