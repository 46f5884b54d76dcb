"""Which mode a key is in, as one process sees it: from the switches in the store, or from a function of the user's."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from keywise.clock import Clock
from keywise.errors import SettingsError, UnavailableError
from keywise.turn import Mode, Request, Switch
from keywise.turn_rules import mode_of

LOOK_S = 0.5
"""A store that does not answer in this time is down: what was known before holds on."""


class Modes:
    """A view of the switches, which is not older than `view_s` unless the store cannot be reached."""

    def __init__(
        self, default: Mode, read: Callable[[], Awaitable[tuple[float, Sequence[Switch]]]], view_s: float, clock: Clock
    ) -> None:
        self._default = default
        self._read = read
        self._view_s = view_s
        self._clock = clock
        self._switches: Sequence[Switch] = ()
        self._ahead_s = 0.0
        """How far the store's clock is ahead of the own one."""
        self._asked_at: float | None = None
        self._looking: asyncio.Task[None] | None = None

    async def of(self, key: str) -> Mode:
        if self._asked_at is None or self._clock() - self._asked_at > self._view_s:
            await self._look()
        request = Request(id="", key=key, body=b"", mode=self._default)
        return mode_of(request, self._switches, self._clock() + self._ahead_s, has_line=False)

    async def _look(self) -> None:
        """All callers that need it wait for one look."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._looked())
        await asyncio.shield(self._looking)

    async def _looked(self) -> None:
        asked_at = self._clock()
        with suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                now, self._switches = await self._read()
                self._ahead_s = now - self._clock()
        self._asked_at = asked_at


class Asked:
    """Modes from a function of the user's, which asks a flag service for example."""

    def __init__(self, ask: Callable[[str], Any]) -> None:
        self._ask = ask

    async def of(self, key: str) -> Mode:
        said = self._ask(key)
        return mode_from(await said if inspect.isawaitable(said) else said)


def mode_from(word: Any) -> Mode:
    try:
        return Mode(word)
    except ValueError:
        raise SettingsError(f"the mode {word!r} is not known; it is one of {', '.join(Mode)}") from None
