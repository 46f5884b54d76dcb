"""Causes of failures and refusals as text for an operator, and how long to wait before the next claim."""

import random

import msgspec

from keywise.core.entry import Refusal, RefusalReason
from keywise.core.errors import PermanentError
from keywise.core.tracebacks import escaped, place_of
from keywise.core.url import without_secrets

BUSY_LOOK_S = 0.5
"""How long to wait for a busy key, with jitter. A holder usually finishes long before its lease expires."""

CAUSE_MAX = 2000

_CAUSES = {
    RefusalReason.MIXED: "versioned and unversioned changes are mixed on this key, and they have no common order; "
    "send all of them with a version, or none",
    RefusalReason.FORGOTTEN: "sent longer ago than the retention, and the key is forgotten; "
    "replay it with --older if nothing newer was applied",
}


def cause_of_refusal(refusal: Refusal) -> str:
    return _CAUSES[refusal.reason]


def cause_of_error(error: BaseException) -> str:
    """Return the name and the text of an error, with the innermost line of the user's own code that led to it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        # The exception may be a class of the user's, and its __str__ may raise.
        text = type(error).__name__
    place = place_of(error)
    return without_secrets(text)[: CAUSE_MAX - len(place)] + place if place else without_secrets(text)


def storable(cause: str) -> str:
    """Return the cause as text that every store accepts: bounded, and without NUL or lone surrogates.

    Lone surrogates come from file names that are not valid UTF-8.
    """
    return escaped(cause[:CAUSE_MAX])


def is_permanent(error: BaseException) -> bool:
    """Whether a retry cannot help: the handler raised `PermanentError`, or the body does not match its type."""
    return isinstance(error, PermanentError | msgspec.ValidationError)


def concerns_key(refusal: Refusal) -> bool:
    """Whether a refusal holds for every change of the key, so that newer changes must wait as well."""
    return refusal.reason in (RefusalReason.PAUSED, RefusalReason.LIMITED)


def look_again_s(refusal: Refusal, rng: random.Random) -> float:
    """Seconds until the next claim of a key that was refused for now."""
    if concerns_key(refusal):
        return refusal.wait_s
    return min(max(refusal.wait_s, BUSY_LOOK_S / 100), BUSY_LOOK_S * (0.5 + rng.random()))
