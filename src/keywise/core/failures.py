"""Why something failed or has to wait, in words that an operator can act on."""

import random

import msgspec

from keywise.core.entry import Refusal, RefusalReason
from keywise.core.errors import PermanentError

BUSY_LOOK_S = 0.5
"""A holder is usually done long before its lease: look again after so long, with jitter."""

CAUSE_MAX = 2000

_CAUSES = {
    RefusalReason.MIXED: "versioned and unversioned changes meet on this key, and nobody can order them; "
    "send all of them with a version, or none",
    RefusalReason.FORGOTTEN: "sent longer ago than the retention, and the key is forgotten; "
    "replay it with --older if nothing newer was applied",
}


def cause_of_refusal(refusal: Refusal) -> str:
    return _CAUSES[refusal.reason]


def cause_of_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        # It comes from user code, and so does its text.
        return type(error).__name__


def storable(cause: str) -> str:
    """A cause that any store takes: of bounded length, and without half characters, as file names can hold."""
    return cause[:CAUSE_MAX].encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def is_permanent(error: BaseException) -> bool:
    """Trying again cannot help: the handler said so, or the body is not what its type says."""
    return isinstance(error, PermanentError | msgspec.ValidationError)


def concerns_key(refusal: Refusal) -> bool:
    """Whether newer changes of the key have to wait as well."""
    return refusal.reason in (RefusalReason.PAUSED, RefusalReason.LIMITED)


def look_again_s(refusal: Refusal, rng: random.Random) -> float:
    """When to ask again for a key that has to wait."""
    if concerns_key(refusal):
        return refusal.wait_s
    return min(max(refusal.wait_s, BUSY_LOOK_S / 100), BUSY_LOOK_S * (0.5 + rng.random()))
