"""The mode of a key, as one process sees it: from the switches in the store, or from a function of the user."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from keywise.core.clock import Clock
from keywise.core.errors import SettingsError, UnavailableError
from keywise.core.failures import cause_of_error
from keywise.core.serial.contract import Mode, Request, Switch
from keywise.core.serial.rules import mode_of

LOOK_S = 0.5
"""A store that does not answer in this time is away: what was known before holds on, while it is asked still."""
LOOK_PART = 0.5
"""Of the time of a caller, at the most, to look at the switches."""
AGAIN_S = 0.2
"""So soon after a look that failed the next call looks again."""
ADVICE = "what was known last of the switches holds on, so that a switch is not seen; look at the error of the store"


class Modes:
    """A view of the switches, which is not older than `view_s` unless the store cannot be reached."""

    def __init__(
        self,
        default: Mode,
        read: Callable[[], Awaitable[tuple[float, Sequence[Switch]]]],
        view_s: float,
        clock: Clock,
        alarm: Callable[[str, str], None],
    ) -> None:
        self._default = default
        self._read = read
        """Opens the store too, which may take its time."""
        self._view_s = view_s
        self._clock = clock
        self._alarm = alarm
        """Is told the cause and what to do."""
        self._alarmed = ""
        self._switches: Sequence[Switch] = ()
        self._ahead_s = 0.0
        """How far the store's clock is ahead of the own one."""
        self._asked_at = -math.inf
        """When the store was asked for what is known."""
        self._failed_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        """Nobody waits longer for the present look."""

    async def of(self, key: str, timeout_s: float = math.inf) -> Mode:
        """The mode of a key, for a caller that has so much time."""
        now = self._clock()
        if now - self._asked_at > self._view_s and now - self._failed_at > AGAIN_S:
            await self._look(timeout_s * LOOK_PART)
        request = Request(id="", key=key, body=b"", mode=self._default)
        return mode_of(request, self._switches, self._clock() + self._ahead_s, has_line=False)

    async def close(self) -> None:
        if self._looking is not None and not self._looking.done():
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look(self, patience_s: float) -> None:
        """All callers that need it wait for one look, for a while; it goes on until the store has answered."""
        loop = asyncio.get_running_loop()
        if self._looking is None or self._looking.done():
            is_over = self._is_over = asyncio.Event()
            # One timer for all: those with timers of their own for the same moment would not go on in their order.
            loop.call_later(LOOK_S, is_over.set)
            self._looking = loop.create_task(self._looked())
            self._looking.add_done_callback(lambda look: is_over.set())
        look = self._looking
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._is_over.wait()
        if look.done() and not look.cancelled():
            look.result()

    async def _looked(self) -> None:
        asked_at = self._clock()
        try:
            now, self._switches = await self._read()
        except (SettingsError, UnavailableError, TimeoutError) as error:
            self._failed_at = self._clock()
            if isinstance(error, SettingsError):
                raise
        except Exception as error:
            # Calls that are off need no store, and so they do not fail with it.
            self._failed_at = self._clock()
            self._tell(cause_of_error(error))
        else:
            self._ahead_s = now - self._clock()
            self._asked_at, self._alarmed = asked_at, ""

    def _tell(self, cause: str) -> None:
        """Once, until it is another cause or is over."""
        if cause != self._alarmed:
            self._alarmed = cause
            self._alarm(cause, ADVICE)


class Asked:
    """Modes from a function of the user's, which asks a flag service for example."""

    def __init__(self, ask: Callable[[str], Any]) -> None:
        self._ask = ask

    async def of(self, key: str, timeout_s: float = math.inf) -> Mode:
        said = self._ask(key)
        return mode_from(await said if inspect.isawaitable(said) else said)

    async def close(self) -> None:
        """There is nothing to close."""


def mode_from(word: Any) -> Mode:
    try:
        return Mode(word)
    except ValueError:
        raise SettingsError(f"the mode {word!r} is not known; it is one of {', '.join(Mode)}") from None
