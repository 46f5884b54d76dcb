"""The changes that are drained: the same ones every time.

Keys are uuids, drawn evenly or by a zipf law; one change in ten is delivered twice; delivery is shuffled
inside a window, so versions come out of order. A body has about 300 bytes of JSON.
"""

import itertools
import random
import uuid
from collections.abc import Iterable

import msgspec

WINDOW = 200
DUPLICATES = 0.1
ZIPF_EXPONENT = 0.99
TEXT = (
    "What every page says, over and over, until the body is long enough to weigh something. " * 2 + "And then it ends."
)
EPOCH_US = 1_700_000_000_000_000


class Routed(msgspec.Struct):
    """What must be read of a body to route it."""

    content_id: str
    payload_version: int


class Body(Routed):
    """A whole body."""

    document_type: str
    text: str


decode = msgspec.json.Decoder(Routed).decode


def changes(count: int, keys: int, distribution: str = "uniform", *, above: int = 0) -> list[bytes]:
    """Bodies in the order of delivery; the versions of each key count up from one, or from above another."""
    rng = random.Random(20)
    names = _names(rng, keys)
    versions = [itertools.count(above + 1) for _ in names]
    bodies: list[bytes] = []
    for key in _drawn(rng, keys, count, distribution):
        body = msgspec.json.encode(Body(names[key], next(versions[key]), "guide", TEXT))
        bodies += [body, body] if rng.random() < DUPLICATES else [body]
    return _shuffled(rng, bodies[:count])


def first_of_each(keys: int) -> list[bytes]:
    """A change for each of the keys that `changes` draws from, older than all of those."""
    return [msgspec.json.encode(Body(name, 0, "guide", TEXT)) for name in _names(random.Random(20), keys)]


def once_each(keys: int, *, timestamps: bool = False) -> list[bytes]:
    """One change for each of so many keys."""
    rng = random.Random(21)
    start = EPOCH_US if timestamps else 1
    names = _names(rng, keys)
    return [msgspec.json.encode(Body(name, start + rng.randrange(1000), "guide", TEXT)) for name in names]


def newest(bodies: Iterable[bytes]) -> dict[str, int]:
    """The version of each key that the store must end up with."""
    found: dict[str, int] = {}
    for body in bodies:
        change = decode(body)
        known = found.setdefault(change.content_id, change.payload_version)
        if change.payload_version > known:
            found[change.content_id] = change.payload_version
    return found


def _names(rng: random.Random, keys: int) -> list[str]:
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(keys)]


def _drawn(rng: random.Random, keys: int, count: int, distribution: str) -> list[int]:
    if distribution == "uniform":
        return rng.choices(range(keys), k=count)
    weights = (1 / rank**ZIPF_EXPONENT for rank in range(1, keys + 1))
    return rng.choices(range(keys), cum_weights=list(itertools.accumulate(weights)), k=count)


def _shuffled(rng: random.Random, bodies: list[bytes]) -> list[bytes]:
    shuffled: list[bytes] = []
    for start in range(0, len(bodies), WINDOW):
        shuffled += rng.sample(window := bodies[start : start + WINDOW], len(window))
    return shuffled
