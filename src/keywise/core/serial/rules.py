"""The rules of serial functions as pure functions: which request is next, what a lost process leaves, what deadlocks.

The memory backend calls them; every other one is held to them.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from keywise.core.serial.contract import EVERY_RUN, Ending, Mode, Record, Reply, Request, Switch, Turn, TurnPolicy

TOO_LATE = "its deadline passed before its turn came"
CALLER_GONE = "its caller went away before its turn came"
HOLDER_LOST = "its runner was lost in the middle of it"
LOST_AGAIN = "its runner was lost %s times in a row; nothing of it happened"


class Arrival(enum.Enum):
    """What an id means to the store when it is asked for."""

    NEW = enum.auto()
    JOINED = enum.auto()


class Word(enum.Enum):
    """What the store says to a reply."""

    ENDS = enum.auto()
    ALREADY = enum.auto()
    """This very reply is stored: its first answer was lost on the way."""
    REFUSED = enum.auto()


# Asking.


def arrival(known: Record | None, request: Request) -> Reply | Arrival:
    """Whether a request is new, the same as an open one, or has ended; an id means one key and one body."""
    if known is None:
        return Arrival.NEW
    if (known.request.key, known.request.body) != (request.key, request.body):
        return clash(request, known.request.key)
    if known.reply is None:
        return Arrival.JOINED
    # It never ran, so that a caller who tries again with the same id is served.
    return Arrival.NEW if known.reply.outcome is Ending.EXPIRED else known.reply


def mode_of(request: Request, switches: Iterable[Switch], now: float, has_line: bool) -> Mode:
    """The mode of a key now: of the switch that counts for it, else as the caller says."""
    switch = switch_of(request.key, switches)
    mode = request.mode if switch is None else switch.mode_at(now)
    # What was asked for in turn ends in turn: nothing may run beside it.
    return Mode.ON if mode is Mode.OBSERVE and has_line else mode


def switch_of(key: str, switches: Iterable[Switch]) -> Switch | None:
    """The one that counts: for the key itself, else of the newest pattern."""
    covering = [switch for switch in switches if switch.covers(key)]
    return max(covering, key=lambda switch: (not switch.is_pattern, switch.at), default=None)


def entered(request: Request, place: int, now: float) -> Record:
    return Record(request=request, place=place, asked_at=now, deadline=now + request.wait_s)


def clash(request: Request, known_key: str) -> Reply:
    """An id that is known with another key or body."""
    other = "another key" if known_key != request.key else "another body"
    return refusal(request, f"the id {request.id!r} was asked for with {other} before; use a new id")


def refusal(request: Request, cause: str) -> Reply:
    return Reply(id=request.id, outcome=Ending.REFUSED, cause=cause)


def switched(request: Request, mode: Mode) -> Reply:
    return Reply(id=request.id, outcome=Ending.SWITCHED, cause=mode.value)


# Waiting for ever.


Spot: TypeAlias = tuple[str, str]
"""The name of a serial function, and a key of it."""
Wish: TypeAlias = tuple[Spot, int]
"""A request that somebody waits for: where it is, and the token of its turn; 0: it waits too."""


def circle(
    wish: Wish,
    within: Sequence[int],
    holders: Callable[[Spot], Iterable[int]],
    waits_for: Callable[[int], Iterable[Wish]],
) -> list[Spot] | None:
    """The keys, in a row, over which a request from within these turns would wait for itself; None: it would not.

    `holders` are the tokens of all turns on a key, observed ones too: a request that has no turn waits for them.
    `waits_for` are the requests that somebody waits for from within a turn. The shortest row is found, and of those the
    first by the names of its keys, so that all stores say the same.
    """
    mine, seen = set(within), set[int]()
    paths = [([wish[0]], wish[1])]
    for path, turn in paths:
        tokens = {turn} if turn else set(holders(path[-1]))
        if tokens & mine:
            return path
        wishes = {further for token in tokens - seen for further in waits_for(token)}
        paths.extend(([*path, spot], turn) for spot, turn in sorted(wishes))
        seen |= tokens
    return None


def joined(record: Record, within: Sequence[int]) -> Record:
    """A request that is waited for from within these turns too."""
    new = [token for token in within if token not in (*record.request.within, *record.joiners)]
    return replace(record, joiners=(*record.joiners, *new)) if new else record


def circle_cause(path: Sequence[Spot]) -> str:
    """What is told of a circle, with the names of its keys."""
    row = " → ".join(f"{function} {key!r}" for function, key in path)
    if len(path) == 1:
        return f"it would wait for itself: its own caller holds {row}; do not nest calls on one key"
    return f"it would wait for ever, over {row}, which its own caller holds; take keys in one order everywhere"


# Turns.


def departure(record: Record, now: float, is_runner_alive: bool) -> Reply | None:
    """What a waiting request ends with that can have no turn any more; None: it can."""
    if now >= record.deadline:
        return Reply(id=record.request.id, outcome=Ending.EXPIRED, cause=TOO_LATE)
    if record.request.runner != EVERY_RUN and not is_runner_alive:
        return Reply(id=record.request.id, outcome=Ending.EXPIRED, cause=CALLER_GONE)
    return None


def may_run(record: Record, owner: str) -> bool:
    return record.request.runner in (EVERY_RUN, owner)


def run_of(
    line: Iterable[Record], owner: str, run_max: int, now: float, is_alive: Callable[[str], bool]
) -> tuple[list[Reply], list[Record]]:
    """Of the waiting requests of a free key, in their order: those that end, and those that this owner runs now."""
    ended: list[Reply] = []
    run: list[Record] = []
    for record in line:
        reply = departure(record, now, is_alive(record.request.runner))
        if reply is not None:
            ended.append(reply)
        elif len(run) < run_max and may_run(record, owner):
            run.append(record)
        else:
            break
    return ended, run


def begun(record: Record, token: int, owner: str, now: float, policy: TurnPolicy) -> Record:
    attempts = record.attempts + 1
    return replace(record, token=token, owner=owner, attempts=attempts, started_at=now, is_atomic=policy.atomic)


def turn_of(record: Record, now: float) -> Turn:
    return Turn(
        request=record.request,
        token=record.token,
        place=record.place,
        left_s=record.deadline - now,
        attempts=record.attempts - 1,
        overlaps=record.overlaps,
    )


def given_back(record: Record) -> Record:
    """Wait again: the turn was not begun, so it does not count."""
    return replace(record, token=0, owner="", attempts=record.attempts - 1, started_at=0.0, is_atomic=False)


# Ends.


def word_on(record: Record | None, reply: Reply) -> Word:
    """Whether a reply ends its request: only with the token of the present turn."""
    if record is None or not reply.token:
        return Word.REFUSED
    if record.reply is not None:
        return Word.ALREADY if record.reply == reply else Word.REFUSED
    return Word.ENDS if record.token == reply.token else Word.REFUSED


def ended(record: Record, reply: Reply, now: float) -> Record:
    return replace(record, reply=reply, ended_at=now)


def after_loss(record: Record, now: float, policy: TurnPolicy) -> Reply | None:
    """What a request ends with whose runner is lost; None: nothing of it happened, and it waits for another turn.

    Whether anything can have happened is by the policy that it ran under; the other one is that of whoever finds it.
    """
    id = record.request.id
    if not record.is_atomic or record.request.mode is Mode.OBSERVE:
        return Reply(id=id, outcome=Ending.LOST, cause=HOLDER_LOST)
    if now >= record.deadline:
        return Reply(id=id, outcome=Ending.EXPIRED, cause=TOO_LATE)
    if record.attempts >= policy.attempts_max:
        return Reply(id=id, outcome=Ending.FAILED, cause=LOST_AGAIN % record.attempts)
    return None


def waiting_again(record: Record) -> Record:
    """After a loss; the turn counts."""
    return replace(record, token=0, owner="", started_at=0.0, is_atomic=False)


def withdrawn(record: Record, outcome: Ending, cause: str) -> Reply | None:
    """What a request ends with that is taken out of the line; None: it runs or has ended, and is left alone."""
    if record.token or record.reply is not None:
        return None
    return Reply(id=record.request.id, outcome=outcome, cause=cause)


def is_prunable(record: Record, now: float, retention_s: float) -> bool:
    return record.reply is not None and record.ended_at <= now - retention_s
