"""Exponential backoff with jitter."""

import random


def backoff_s(attempts: int, first_s: float, max_s: float, rng: random.Random) -> float:
    """Return the delay after `attempts` failures: doubled each time, up to `max_s`.

    Half of the delay is random, so that workers that failed together do not retry together.
    """
    whole = min(max_s, first_s * 2.0 ** min(attempts - 1, 60))
    return whole * (0.5 + 0.5 * rng.random())


def shortened(limit: int, failures: int) -> int:
    """Halve a batch limit for each failed attempt: the server may be cancelling transactions that take too long."""
    return max(1, limit >> failures)
