"""The object that `app.serial` returns: the first call opens its store, and the app closes it."""

import asyncio
import functools
import os
import random
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from keywise.core.clock import Clock, boot_time
from keywise.core.errors import ExpiredError, LostError, RefusedError, SettingsError
from keywise.core.events import Alarmed, Event, Observer, notify
from keywise.core.serial.contract import EVERY_RUN, Ending, Mode, Request, Switch, TurnPolicy
from keywise.core.settings import SerialSettings, named_settings, seconds
from keywise.core.transaction_context import open_transactions
from keywise.serial.client import Merge
from keywise.serial.codec import Serial, checked
from keywise.serial.grants import be_alone
from keywise.serial.modes import Asked, Modes, mode_from
from keywise.serial.pending import NOT_ASKED, Scene
from keywise.serial.runner import Runner, within

ID_MAX_BYTES = 256
ASKED_BY_MAX_BYTES = 512
T = TypeVar("T")

PASSED = "its deadline passed in the middle of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Where a serial function finds its store, and who watches it."""

    connect: Callable[[str, TurnPolicy], Any]
    """Makes the store for an owner; it is opened later, by `async with`."""
    observers: Sequence[Observer]
    runs_here: bool = False
    """Callers run requests too, where any process may."""
    clock: Clock = boot_time
    rng: random.Random = field(default_factory=random.Random)


class SerialFunction:
    """A function that is run one at a time per key: call it, and wait for its answer."""

    def __init__(
        self, serial: Serial, settings: SerialSettings, wiring: Wiring, switch: Callable[[str], Any] | None, mode: Mode
    ) -> None:
        self.name = serial.name
        self.settings = settings
        self.owner = ""
        """New with each opening: a call of an earlier one may still be on its way."""
        self.mode = mode
        """Of keys that nobody has switched."""
        self._serial = serial
        self._wiring = wiring
        self._modes = Asked(switch) if switch else Modes(mode, self._read, settings.view_s, wiring.clock, self._alarm)
        self._runs_here = wiring.runs_here
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._turns: Any = None
        self._merge: Merge | None = None
        self._runner: Runner | None = None
        functools.update_wrapper(self, serial.function)

    async def __call__(
        self, request: Any, *, id: str | None = None, timeout: float | str | None = None, asked_by: str = ""
    ) -> Any:
        """The function's result, once its turn has come; an error of `keywise.core.errors` says why there is none.

        The function is run at most once for each `id`, and the same id has the same answer.
        """
        timeout_s = self.settings.timeout_s if timeout is None else seconds(timeout)
        deadline = asyncio.get_running_loop().time() + timeout_s
        key = self._serial.key_of(request)
        id = secrets.token_hex(16) if id is None else checked("id", id, ID_MAX_BYTES)
        asker = checked("asked_by", asked_by, ASKED_BY_MAX_BYTES) if asked_by != "" else ""
        if timeout_s <= 0:
            raise ExpiredError(f"{self.name} {id!r} has not run: timeout={timeout!r} is over before it begins")
        self._refuse_within()
        await be_alone()
        try:
            async with asyncio.timeout_at(deadline):
                mode = await self._modes.of(key, timeout_s)
                merge = await self._opened() if mode is not Mode.OFF else None
        except TimeoutError:
            raise ExpiredError(f"{self.name}: {NOT_ASKED}") from None
        if merge is None:
            return await self._run_off(key, request, deadline)
        asked = Request(
            id=id,
            key=key,
            body=self._serial.body_of(request),
            asked_by=asker or self.owner,
            runner=self.owner if merge.runs_own else EVERY_RUN,
            within=within.get(),
            mode=mode,
        )
        reply = await merge.call(asked, request, deadline)
        if reply.outcome is Ending.SWITCHED:
            return await self._run_off(key, request, deadline)
        return self._serial.result_of(reply)

    async def work(self) -> bool:
        """Run requests of other processes too; False if the store does not allow it."""
        if not self.connect().is_shared:
            return False
        (await self._opened()).serve()
        return True

    async def close(self) -> None:
        """Let what runs come to its end; further calls open it again."""
        await self._modes.close()
        await self._stack.aclose()
        self._turns = self._merge = self._runner = None

    def connect(self) -> Any:
        """The turns of this function; not opened yet."""
        wiring, settings = self._wiring, self.settings
        policy = TurnPolicy(lease_s=settings.lease_s, atomic=self._serial.is_atomic, attempts_max=settings.attempts_max)
        return wiring.connect(self.owner, policy)

    def _refuse_within(self) -> None:
        """Refuse a call that its own caller's transaction holds up, or a pool that is empty because of such callers."""
        open_ones = [one.database for one in open_transactions.get() if one.database is not None and not one.is_over]
        if not open_ones:
            return
        turns = self.connect() if self._turns is None else self._turns
        if any(turns.database is database for database in open_ones):
            raise RefusedError(
                f"{self.name} was called from within a transaction of its own store, and would wait for its end; call "
                "it before or after that, from a function that takes no keywise.Transaction, or keep its requests in "
                "another store with turns="
            )

    async def _run_off(self, key: str, request: Any, deadline: float) -> Any:
        """Without a turn, and without the store unless the function writes there.

        It ends with its deadline: after that and the age of a view, nothing runs off on a key that is switched on,
        except for what runs in threads.
        """
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                if self._serial.is_atomic:
                    await self._opened()
                if self._runner is None:
                    self._runner = Runner(self._serial, self._turns, self.settings, self._wiring.rng)
                run = self._runner.run_off(key, request)
                return await (run if self._serial.is_async else _left_alone(run))
        except TimeoutError:
            if not limit.expired():
                raise
            told = "was broken off" if self._serial.is_async else "has no answer in time, and goes on in its thread"
            raise LostError(f"{self.name} of {key!r} {told}; nobody knows how much of it happened: {PASSED}") from None

    async def _opened(self) -> Merge:
        async with self._opening:
            if self._merge is None:
                self.owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
                turns = self.connect()
                if self._serial.is_atomic and turns.database is None:
                    raise SettingsError(
                        f"the serial function {self.name!r} asks for a transaction, and its store has none; leave that "
                        "parameter out, or use a store in SQLite or Postgres"
                    )
                self._turns = await self._stack.enter_async_context(turns)
                self._runner = Runner(self._serial, turns, self.settings, self._wiring.rng)
                scene = Scene(self.name, self._wiring.clock, self._wiring.rng, self._emit)
                self._merge = Merge(turns, self._runner, self.settings, scene)
                self._merge.works = self._merge.works or self._runs_here
                self._merge.start()
                self._stack.push_async_callback(self._merge.close)
            return self._merge

    async def _read(self) -> tuple[float, Sequence[Switch]]:
        await self._opened()
        operator = self._turns.operator
        return await operator.now(), await operator.switches()

    def _alarm(self, cause: str, advice: str) -> None:
        self._emit(Alarmed(pipeline=self.name, cause=cause, advice=advice))

    def _emit(self, event: Event) -> None:
        notify(self._wiring.observers, event)


class SerialWorker:
    """Runs what others ask of a serial function, until it is told to stop; ends at once where only callers run."""

    def __init__(self, serial: SerialFunction) -> None:
        self._serial = serial
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        if await self._serial.work():
            await self._stopped.wait()
            await self._serial.close()

    def stop(self) -> None:
        self._stopped.set()


async def _left_alone(run: Coroutine[Any, Any, T]) -> T:
    """What it returns; who is cancelled does not wait for its end."""
    task = asyncio.get_running_loop().create_task(run)
    try:
        return await asyncio.shield(task)
    finally:
        # What has not begun never does, and the caller is told after that.
        task.cancel()
        await asyncio.sleep(0)


def define(name: str, function: Callable[..., Any], wiring: Wiring, options: Mapping[str, Any]) -> SerialFunction:
    """Make a serial function out of its words."""
    words = dict(options)
    key, switch = words.pop("key"), words.pop("switch", None)
    wiring = replace(wiring, runs_here=bool(words.pop("run_here", False)))
    mode = mode_from(words.pop("mode", Mode.ON))
    known = {field.name for field in fields(SerialSettings)}
    settings = SerialSettings(**named_settings(words, known))
    return SerialFunction(Serial(name, function, key), settings, wiring, switch, mode)
