"""The changes of one simulated run: versions of a few keys, sent twice, late and out of order."""

import random

import msgspec

from keywise.core.change import Order, order_of
from keywise.testing.simulator.faults import Faults

KEYS = 6
SENDING_S = 90.0
MEETING = "key-meeting"
QUIET = "key-quiet"
STUBBORN = 10**9
"""A change that fails so often is as good as poisonous."""


class Sent(msgspec.Struct):
    """One message of the workload, and what its handler will do with it."""

    number: int
    key: str
    version: int
    deleted: bool
    at: float
    poison: bool = False
    killer: bool = False
    flaky: int = 0
    """So many tries fail first."""
    malformed: bool = False
    unversioned: bool = False
    delay_s: float = 0.0
    """How long the queue holds it back, if nothing else delays it."""
    purged: bool = False
    """Somebody took it out of the queue by hand."""
    mended: bool = False
    """Whatever was wrong with its handler is put right."""
    era: int = 0
    """Of its key, when it was sent. The message itself says nothing of it."""

    def mend(self) -> None:
        self.mended, self.poison, self.killer, self.flaky = True, False, False, 0

    @property
    def order(self) -> Order:
        return order_of(None if self.unversioned else self.version)

    @property
    def rank(self) -> Order:
        """Its order in the era of its key."""
        return (self.era, *self.order[1:])

    @property
    def body(self) -> bytes:
        if self.malformed:
            return b'{"id": "%d", "v": }' % self.number
        state = "gone" if self.deleted else "here"
        version = "null" if self.unversioned else str(self.version)
        return f'{{"id": "{self.key}", "v": {version}, "state": "{state}", "number": {self.number}}}'.encode()


def draw(faults: Faults) -> list[Sent]:
    """A workload of 30 to 60 changes; versions may be zero or negative, and have gaps."""
    rng, rates = faults.rng, faults.rates
    keys = [f"key-{number}" for number in range(rng.randint(5, KEYS))]
    versions = {key: rng.randint(-3, 3) for key in keys}
    changes: list[Sent] = []
    for number in range(rng.randint(30, 60)):
        key = rng.choice(keys) if rng.random() < 0.7 else keys[0]
        versions[key] += rng.choice((1, 1, 1, 5))
        sent = Sent(number, key, versions[key], rng.random() < 0.25, at=SENDING_S * rng.random() ** 2)
        changes.append(sent)
    if rates.unversioned:
        changes += _meeting(faults, len(changes))
    _in_order(changes, rng)
    for sent in changes:
        _afflict(sent, faults, rng)
    if rates.reorder:
        _displace(changes, faults)
    if rates.prune and not rates.jump and rng.random() < 0.5:
        changes += _quiet(rng, len(changes))
    return sorted(changes, key=lambda sent: sent.at)


def truth(changes: list[Sent], dead: set[tuple[str, Order]]) -> dict[str, Sent]:
    """What the store must hold in the end: the newest of each key that was neither set aside nor taken away."""
    newest: dict[str, Sent] = {}
    for sent in changes:
        if sent.malformed or sent.purged or sent.key == MEETING or (sent.key, sent.order) in dead:
            continue
        if sent.key not in newest or sent.rank > newest[sent.key].rank:
            newest[sent.key] = sent
    return newest


def _meeting(faults: Faults, number: int) -> list[Sent]:
    """A key on which unversioned and versioned changes meet: whatever comes first decides, the others are set aside."""
    faults.injected["unversioned"] += 1
    count = faults.rng.randint(2, 4)
    return [Sent(number + i, MEETING, i, False, at=0.0, unversioned=i % 2 == 0) for i in range(count)]


def _in_order(changes: list[Sent], rng: random.Random) -> None:
    moments = sorted(sent.at for sent in changes)
    burst = rng.random() < 0.5
    for sent, moment in zip(changes, moments, strict=True):
        sent.at = moment // 15 * 15 + rng.random() * 0.2 if burst else moment


def _afflict(sent: Sent, faults: Faults, rng: random.Random) -> None:
    rates = faults.rates
    if faults.happens("malformed", rates.malformed):
        sent.malformed = True
    elif sent.key == MEETING:
        return
    elif faults.happens("poison", rates.poison):
        sent.poison = rng.random() < 0.6
        sent.flaky = 0 if sent.poison else STUBBORN
    elif faults.happens("killer", rates.killer):
        sent.killer = True
    elif faults.happens("flaky", rates.flaky):
        sent.flaky = rng.randint(1, 2)


def _quiet(rng: random.Random, number: int) -> list[Sent]:
    """A key that is left alone until it could be forgotten; then an older version arrives, sent in time."""
    newer = Sent(number, QUIET, 2, deleted=rng.random() < 0.5, at=rng.uniform(0.0, 30.0))
    older = Sent(number + 1, QUIET, 1, deleted=False, at=newer.at + rng.uniform(10.0, 29.0))
    older.delay_s = rng.uniform(20.0, 29.0)
    return [newer, older]


def _displace(changes: list[Sent], faults: Faults) -> None:
    for sent in changes:
        if faults.happens("reorder", faults.rates.reorder * 0.3):
            sent.at = max(0.0, sent.at + faults.rng.uniform(-3.0, 3.0) * faults.rng.choice((1, 1, 4)))
