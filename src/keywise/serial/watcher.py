"""Waits for changes in the store by other processes, while a call in this process waits."""

import asyncio
from collections.abc import Callable
from typing import Any

from keywise.serial import pending as calls


class Listener:
    """Tells when it is time to look again, and how many sessions with locks were lost so far."""

    def __init__(self, turns: Any, poll_s: float, tell: Callable[[int], None], alarm: Callable[[Exception], None]):
        self._turns = turns
        self._poll_s = poll_s
        self._tell = tell
        self._alarm = alarm
        self._wanted = asyncio.Event()

    def want(self, is_wanted: bool) -> None:
        (self._wanted.set if is_wanted else self._wanted.clear)()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            try:
                await self._turns.wait(self._poll_s)
            except Exception as error:
                # Whatever it is, it may pass, and nobody else looks.
                self._alarm(error)
                await asyncio.sleep(calls.OUTAGE_MAX_S)
            self._tell(getattr(self._turns, "sessions_lost", 0))
