"""How long to wait before the next try: twice as long each time, with jitter, up to a limit."""

import random


def backoff_s(attempts: int, first_s: float, max_s: float, rng: random.Random) -> float:
    """The delay after so many failed tries: half of it is certain, half is drawn, so that crowds disperse."""
    whole = min(max_s, first_s * 2.0 ** min(attempts - 1, 60))
    return whole * (0.5 + 0.5 * rng.random())


def shortened(limit: int, vain: int) -> int:
    """Half as much at once after each vain try: perhaps the server cuts off what takes too long."""
    return max(1, limit >> vain)
