"""A call of a serial function that waits in this process for its answer, and the errors that its callers can get."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keywise.core.backoff import backoff_s
from keywise.core.clock import Clock
from keywise.core.errors import UnansweredError
from keywise.core.events import CallEnded, Event
from keywise.core.failures import cause_of_error
from keywise.core.serial.contract import Ending, Reply, Request
from keywise.core.serial.rules import TOO_LATE

OUTAGE_S = 0.05
"""The first look after the store could not be reached; each further one waits twice as long."""
OUTAGE_MAX_S = 1.0
PRUNE_S = 60.0
"""How often what has ended long ago is forgotten."""
ADVICE = "callers wait until the store can be used again; look at its error"
REPLIES_S = 0.05
"""How often it is asked for replies that others made, at the most, where a process runs its own requests."""
GRACE_S = 0.5
"""How long it may take, after the app was closed, to break off what still runs and to store that."""
AGAIN_MAX = 10
"""How often what others let expire is asked for again, at the most."""
NOT_ASKED = "its deadline passed before its store could be reached"
NOT_ASKED_ANY_MORE = "its app was closed before its store was asked"
STORING_S = 0.1
STORING_PART = 0.05
"""Kept of the time of a caller, at the most, to store its answer."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a merge queue lives: the name of its function, its clock, its chance, and who watches."""

    name: str
    clock: Clock
    rng: random.Random
    emit: Callable[[Event], None]


class Call:
    """A request of this process, and the callers that wait for it."""

    __slots__ = (
        "again",
        "argument",
        "asked_at",
        "began_at",
        "deadline",
        "futures",
        "is_asked",
        "is_running",
        "request",
    )

    def __init__(self, request: Request, argument: Any, now: float) -> None:
        self.request = request
        self.argument = argument
        self.deadline = now
        self.asked_at = now
        self.began_at = now
        self.futures: list[asyncio.Future[Reply]] = []
        self.is_asked = False
        """The store knows of it, or may know."""
        self.is_running = False
        self.again = 0
        """How often it was asked for again."""

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for it who was told nothing yet."""
        return any(not future.done() for future in self.futures)


def clash(request: Request) -> Reply:
    """The id waits here for something else."""
    cause = f"the id {request.id!r} waits with another key or body; use a new id"
    return Reply(id=request.id, outcome=Ending.REFUSED, cause=cause)


def unasked(request: Request) -> Reply:
    """The store knows nothing of this call; of an earlier one with its id it may."""
    return Reply(id=request.id, outcome=Ending.EXPIRED, cause=NOT_ASKED_ANY_MORE)


def closed(request: Request) -> Reply:
    """The store has taken it out."""
    return Reply(id=request.id, outcome=Ending.EXPIRED, cause="the app was closed")


def expired(call: Call) -> Reply:
    cause = TOO_LATE if call.is_asked or call.again else NOT_ASKED
    return Reply(id=call.request.id, outcome=Ending.EXPIRED, cause=cause)


def storing_s(call: Call, deadline: float) -> float:
    """What is kept of the time of a caller to store its answer."""
    return min(STORING_S, STORING_PART * max(0.0, deadline - call.asked_at))


def pause_s(call: Call, now: float, rng: random.Random) -> float | None:
    """How long until it is asked for again; None: there is no time for it, or it was asked for too often."""
    wait_s = backoff_s(call.again, OUTAGE_S, OUTAGE_MAX_S, rng) if call.again else 0.0
    is_in_time = now + wait_s < call.deadline - storing_s(call, call.deadline)
    return wait_s if is_in_time and call.again < AGAIN_MAX else None


def unanswered(function: str, call: Call, when: str = "in time") -> UnansweredError:
    return UnansweredError(
        f"{function} {call.request.id!r} has no answer {when}, and may have begun; ask again with the same id to get it"
    )


def unsent(function: str, call: Call, error: Exception) -> UnansweredError:
    return UnansweredError(
        f"{function} {call.request.id!r} has no answer, since its store does not take it: {cause_of_error(error)}; "
        "mend the request, or the store"
    )


def ended_event(function: str, call: Call, reply: Reply, now: float) -> CallEnded:
    """What observers are told of its end."""
    began_at = call.began_at if call.is_running else now
    return CallEnded(
        pipeline=function,
        key=call.request.key,
        outcome=reply.outcome.value,
        waited_s=began_at - call.asked_at,
        ran_s=now - began_at,
    )


async def end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel them. What hangs is not waited for."""
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=GRACE_S)
        await asyncio.gather(*done, return_exceptions=True)
