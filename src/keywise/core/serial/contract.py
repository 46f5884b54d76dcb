"""The contract of a serial store, and its values: it keeps the requests of each key in order, and grants serial claims.

A caller asks, and its request gets a place behind the others of its key; who may run it takes a turn, and answers.
The module of a serial store has a function `connect(address, owner, policy) -> Turns`.
All methods take many items at once and are one atomic step per key. `UnavailableError` means that the call may or may
not have taken effect, and that the caller may repeat it.
"""

import enum
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import msgspec

from keywise.core.resource import AsyncResource

EVERY_RUN = ""
"""The runner of a request that any process may run."""


class Ending(enum.StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    """The function raised; it is not run again."""
    EXPIRED = "expired"
    """Its deadline passed or its caller went away before it began: it never ran, and may be asked for again."""
    CANCELLED = "cancelled"
    """An operator took it out of the line; it never ran."""
    LOST = "lost"
    """Its runner was lost in the middle of it: nobody knows how much of it happened. It is not run again."""
    REFUSED = "refused"
    """It was not taken in, and nothing of it is kept: the cause says why."""
    SWITCHED = "switched"
    """It was not taken in, because its key is in another mode now; the cause is that mode."""


class Mode(enum.StrEnum):
    """What is done with requests to a key; an operator can switch it."""

    OFF = "off"
    """They run at once, and the store does not hear of it."""
    OBSERVE = "observe"
    """They run at once; the store is told, and counts those that ran side by side."""
    ON = "on"
    """They run one at a time, in their order."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a serial function."""

    id: str
    """Given by the caller, or made; a function is run at most once for each."""
    key: str
    body: bytes
    asked_by: str = ""
    """For the history."""
    runner: str = EVERY_RUN
    """The owner that has to run it, because its caller waits there; empty: any."""
    wait_s: float = math.inf
    """How long the caller still waits. The store turns it into a deadline by its own clock."""
    within: tuple[int, ...] = ()
    """The tokens of the turns that the caller holds while it waits, the outermost first."""
    mode: Mode = Mode.ON
    """What the caller takes the mode of the key for; the store may know better."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a request ended with."""

    id: str
    outcome: Ending
    body: bytes = b""
    """What the function returned."""
    cause: str = ""
    token: int = 0
    """Of the turn that it ends; 0: of none."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The right to run one request. Turns of one key that are taken together share a token, and run in their order."""

    request: Request
    token: int
    place: int
    """Number in the sequence of its key, from 1."""
    left_s: float
    """Until the deadline of the request, when the turn was given."""
    attempts: int = 0
    """How many turns it had before, whose runners were lost before anything happened."""
    overlaps: int = 0
    """Observed only: how many others of the key ran when this one began."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one request, from its arrival until it is pruned; times are by the store's clock."""

    request: Request
    place: int
    asked_at: float
    deadline: float
    token: int = 0
    """Of its turn; 0 while it waits."""
    owner: str = ""
    """Who runs it, or ran it."""
    attempts: int = 0
    """Turns that it had, with the present one."""
    overlaps: int = 0
    started_at: float = 0.0
    is_atomic: bool = False
    """Its turn is under an atomic policy; that of another process may be different."""
    ended_at: float = 0.0
    reply: Reply | None = None
    joiners: tuple[int, ...] = ()
    """Tokens of turns from within which it was asked for again, as far as the store tells them apart."""


class TurnPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a store treats the requests of one serial function."""

    lease_s: float = 30.0
    """An owner that was not heard of for so long is lost."""
    atomic: bool = False
    """The work is done in the store's own transaction: nothing of it happened if there is no answer."""
    attempts_max: int = 3
    """Turns that a request has at the most; only atomic ones can have a second one."""


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's word on the mode of a key, or of all keys like a pattern."""

    keys: str
    """A key, or a pattern with `*`, `?` and `[abc]`."""
    mode: Mode
    is_pattern: bool = False
    observe_until: float = 0.0
    """By the store's clock: until then keys that are switched on are observed only, since some may still run off."""
    at: float = 0.0
    by: str = ""

    def covers(self, key: str) -> bool:
        return fnmatchcase(key, self.keys) if self.is_pattern else key == self.keys

    def mode_at(self, now: float) -> Mode:
        return Mode.OBSERVE if self.mode is Mode.ON and now < self.observe_until else self.mode


class Answered(msgspec.Struct):
    """What became of replies, and the turns that were given in the same step."""

    refused: list[str] = []
    """Ids of requests that were not the answerer's any more: what it did for them does not count."""
    turns: list[Turn] = []
    answers: list[Reply | Turn | None] = []
    """To the requests that were asked for in the same step."""


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """What goes on with one key now."""

    key: str
    waiting: int
    running: int
    owner: str = ""
    """Who holds it."""
    since: float = 0.0
    """When the first of its running requests began, or else when the first of the waiting ones was asked for."""
    overlaps: int = 0
    """Requests that are kept of it, and that ran beside another one."""


class TurnsTransaction(Protocol):
    """A transaction of the store: what a function writes in it stands if its answer does."""

    @property
    def connection(self) -> Any: ...

    async def answer(self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1) -> Answered:
        """As `Turns.answer`, when the transaction commits. If one is refused, the caller has to roll back.

        A reply that was stored before is refused too: its work is done, and must not be done twice.
        """

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """What is written inside is undone if it raises, and the rest of the transaction stays."""


class Turns(AsyncResource, Protocol):
    """The requests of one serial function, as one process sees them, which is called its owner.

    Any call tells the store that the owner lives, for another `lease_s`. What an owner holds that is lost is free.
    All that happens in one call happens at one moment of the store's clock.
    """

    @property
    def database(self) -> object | None:
        """The opened database, if functions can write in a transaction of it."""

    @property
    def is_shared(self) -> bool:
        """Requests may be run by any process that works; else only by the one that asks for them."""

    @property
    def operator(self) -> "TurnsOperator": ...

    async def ask(self, requests: Sequence[Request]) -> list[Reply | Turn | None]:
        """Take in requests, each behind all others of its key that came before; one answer for each.

        None: it waits, or the same id waits or runs already. A reply: the same id has ended so, or this one was not
        taken in. A turn: its key is only observed, and it runs at once. An expired request is asked for anew.
        """

    async def take(self, limit: int, run_max: int = 1) -> list[Turn]:
        """Turns for up to `limit` requests that this owner may run, the keys that waited longest for a turn first.

        Those that never had one are in the order of their first requests, then of their names.
        A key has one holder. It gets the first request in the line, and up to `run_max` in a row if all are its own.
        Requests that can have no turn any more end here: those past their deadline, and those of lost owners.
        """

    async def answer(
        self, replies: Sequence[Reply], limit: int = 0, run_max: int = 1, requests: Sequence[Request] = ()
    ) -> Answered:
        """End requests whose turn has the token of the reply, then `ask`, then `take`: in one step.

        The key is free with the last of them. A reply that was stored before is not refused.
        """

    async def give_back(self, turns: Sequence[Turn]) -> None:
        """Turns that were not begun: their requests wait again, in their old places."""

    async def renew(self, tokens: Sequence[int], before: float | None = None) -> list[int]:
        """Say that this owner lives. Returns those of its tokens that are not its own any more: their work must end.

        With `before`, turns of this owner that were given before that moment of the store's clock, under tokens that it
        does not name, wait again: the answer of the call that gave them was lost, so that they were not begun.
        """

    async def withdraw(self, ids: Sequence[str], outcome: Ending = Ending.EXPIRED, cause: str = "") -> list[str]:
        """End requests that wait; returns the ids of those that ended. Those that run or have ended are left alone."""

    async def replies(self, ids: Sequence[str]) -> dict[str, Reply]:
        """The replies that there are; an id that has none yet, or is not known, is left out."""

    async def wait(self, wait_s: float) -> None:
        """Return when others made a turn or a reply for this owner that was not there at its last call.

        It may also return for nothing, and does so after `wait_s`.
        """


class TransactedTurns(Turns, Protocol):
    """Turns whose functions can write in the store's own transaction."""

    def transaction(self, *tokens: int) -> AbstractAsyncContextManager[TurnsTransaction]:
        """Open one, for work under these tokens. It is rolled back if anything raises inside."""


class TurnsOperator(Protocol):
    """The operator's verbs."""

    async def now(self) -> float:
        """The time by the store's clock."""

    async def states(self, limit: int) -> list[KeyState]:
        """Keys with requests that wait or run, those with the most waiting first."""

    async def history(self, key: str | None, limit: int) -> list[Record]:
        """What is kept of requests to a key, or to all: the newest first, by arrival, then by place and key."""

    async def record(self, id: str) -> Record | None:
        """What is kept of one request: of the last one with this id."""

    async def switches(self) -> list[Switch]:
        """All that are set."""

    async def switch(self, switch: Switch | None, keys: str = "", is_pattern: bool = False) -> None:
        """Set one, in place of one for the same keys; None removes the one that is named."""

    async def prune(self, retention_s: float) -> int:
        """Forget requests that ended longer ago; returns how many."""


@runtime_checkable
class CountsLostSessions(Protocol):
    """The ability of a `TurnsOperator` to say how many sessions were lost with the locks of running calls."""

    async def sessions_lost(self) -> int: ...
