"""What becomes of a change that asked for a claim: three pure decisions, which `LeasedWorker` acts on.

`on_refusal` says what to do when the claim was refused. `dispose` says what to do with a claimed change: after its
execution, or instead of it. `Acted` is the result of recording that in the ledger.
"""

import enum
import random
from typing import TypeAlias

import msgspec

from keywise.core.change import Order, Outcome
from keywise.core.entry import Certainty, Claim, Level, Refusal, RefusalReason
from keywise.core.failures import cause_of_refusal, concerns_key, look_again_s
from keywise.core.settings import Settings
from keywise.core.sink import SinkResult

# A refused claim.


class Skip(msgspec.Struct, frozen=True):
    """Ack the change: it, or a newer one, is committed, or an operator has removed its key."""

    outcome: Outcome
    mark: Order


class Reject(msgspec.Struct, frozen=True):
    """Dead-letter the change. No claim is held."""

    cause: str


class OnProbation(msgspec.Struct, frozen=True):
    """Claim it again at this level, when there is a place for it."""

    level: Level


class Wait(msgspec.Struct, frozen=True):
    """Hold the change, and claim it again later."""

    seconds: float
    blocks_newer: bool
    """Newer changes of the key wait as well."""


OnRefusal: TypeAlias = Skip | Reject | OnProbation | Wait


def on_refusal(refusal: Refusal, rng: random.Random) -> OnRefusal:
    match refusal.reason:
        case RefusalReason.STALE | RefusalReason.DUPLICATE | RefusalReason.REMOVED:
            assert refusal.mark is not None, "only a mark ends a change that was not tried"
            return Skip(Outcome(refusal.reason.value), refusal.mark)
        case RefusalReason.MIXED | RefusalReason.FORGOTTEN:
            return Reject(cause_of_refusal(refusal))
        case RefusalReason.PROBATION:
            return OnProbation(refusal.level)
        case _:
            return Wait(look_again_s(refusal, rng), concerns_key(refusal))


# A claimed change.


class NotStarted(msgspec.Struct, frozen=True):
    """No user code ran, or its transaction was rolled back: nothing was written and no call is in flight."""


class Ran(msgspec.Struct, frozen=True, gc=False):
    """The sink or the handler has answered, raised, or was cancelled."""

    result: SinkResult
    committed: bool = False
    """The executor's transaction has committed the mark already."""
    overdue: bool = False
    """The claim ended before the answer came."""
    rest_s: float = 0.0
    """How long the worker backs off after it, because the sink is busy."""


class CutOff(msgspec.Struct, frozen=True):
    """It could not finish because the ledger or the sink was unreachable: the change is not to blame."""

    cause: str
    rest_s: float = 0.0


Execution: TypeAlias = NotStarted | Ran | CutOff
NOT_STARTED = NotStarted()


class Disposition(enum.Enum):
    """What to do with a claimed change."""

    COMMIT = enum.auto()
    """Raise the mark, then ack."""
    ACK_ONLY = enum.auto()
    """The executor's transaction has raised the mark: ack."""
    RETRY = enum.auto()
    """Count an attempt, and try again later."""
    DEAD_LETTER = enum.auto()
    INTERRUPTED = enum.auto()
    """Record the outcome as unknown; it costs no attempt. The next attempt waits for the lease to expire."""
    RELEASE = enum.auto()
    """Give the claim up; nothing was written."""
    BACK_OFF = enum.auto()
    """Give the claim up, and try again when the sink may be less busy."""
    SNOOZE = enum.auto()
    """Give the claim up, and let the source redeliver the message at the time that the handler asked for."""


def dispose(execution: Execution, claim: Claim, settings: Settings) -> Disposition:
    match execution:
        case NotStarted():
            return Disposition.DEAD_LETTER if exhausted(claim, settings) else Disposition.RELEASE
        case CutOff():
            return Disposition.INTERRUPTED
        case Ran(committed=True):
            return Disposition.ACK_ONLY
        case Ran(result=result):
            return _dispose_result(result, claim, settings)


def exhausted(claim: Claim, settings: Settings) -> str | None:
    """Return why a change may not be tried again, known as soon as it is claimed; None if it may."""
    if claim.crashes >= settings.crashes_max:
        workers = "1 worker" if claim.crashes == 1 else f"{claim.crashes} workers"
        return f"{workers} died alone with this change"
    if claim.attempts >= settings.attempts_max:
        # Its last outcome was unknown, so it was not dead-lettered then. Now its lease has expired.
        return f"the outcome of the last of {claim.attempts} attempts is unknown"
    return None


def _dispose_result(result: SinkResult, claim: Claim, settings: Settings) -> Disposition:
    match result.outcome:
        case Outcome.BUSY:
            return Disposition.BACK_OFF if result.wait_s is None else Disposition.SNOOZE
        case Outcome.FAILED:
            is_last = result.permanent or claim.attempts + 1 >= settings.attempts_max
            # An unknown write may still land. It is dead-lettered, if at all, after its lease has expired.
            is_over = is_last and result.certainty is not Certainty.UNKNOWN
            return Disposition.DEAD_LETTER if is_over else Disposition.RETRY
        case _:
            return Disposition.COMMIT


class Acted(enum.Enum):
    """What became of a disposition."""

    SETTLED = enum.auto()
    """The ledger has recorded it."""
    LOST = enum.auto()
    """The ledger has refused it: another worker has the key."""
    JOURNALED = enum.auto()
    """The ledger is down. The change was handed to the degraded worker, which settles it."""
