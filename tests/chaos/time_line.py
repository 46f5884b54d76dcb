"""When changes were sent, delivered and written, and how long keys were silent while a worker was dead or hung."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from chaos.witness import Witness
from keywise import Change, Delivery, Put
from keywise.core.clock import boot_time

READ, WROTE = "time line: read", "time line: wrote"
PATIENCE_S = 5.0
"""So long a change may wait during a fault, besides its call and what it has to wait for by design."""


class Sent(msgspec.Struct, frozen=True):
    """A change that was sent; the clock is the one that all processes of a machine share."""

    key: str
    version: int
    at: float


class Effect(msgspec.Struct, frozen=True):
    """A version of a key that a handler has written."""

    key: str
    version: int
    at: float


class Reading(msgspec.Struct, frozen=True):
    """A message that reached a worker, as delivery number `count` of it."""

    worker: str
    key: str
    version: int
    count: int
    at: float


class Wait(msgspec.Struct, frozen=True):
    """How long one change waited until its version or a newer one was written; None: it never was."""

    sent: Sent
    written_at: float | None

    def seconds(self, now: float) -> float:
        """Until it was written, or until now."""
        return (self.written_at if self.written_at is not None else now) - self.sent.at


class Record(msgspec.Struct):
    """What happened in one trial."""

    sent: list[Sent] = []
    effects: list[Effect] = []
    readings: list[Reading] = []
    victim: str = ""
    """The worker that was killed or stopped."""
    claimed: set[str] = set()
    """The keys on which the ledger had a claim of the victim then."""
    began: float = 0.0
    ended: float = 0.0
    """When no more changes were sent: after the victim ran again, or after its leases had expired."""
    judged_at: float = 0.0


class Limits(msgspec.Struct, frozen=True):
    """How long changes may be silent by design."""

    lease_s: float
    redelivery_s: float
    """Until the queue delivers a message of a dead or hung worker again."""
    call_s: float
    concurrency: int


class Silence(msgspec.Struct):
    """The longest silence of one group of keys."""

    keys: str
    changes: int
    longest_s: float | None
    """None if no change of the group waited."""
    limit_s: float

    @property
    def verdict(self) -> str:
        if self.longest_s is None:
            return "not measured"
        return "held" if self.longest_s <= self.limit_s else "MISSED"


class NothingMeasuredError(AssertionError):
    """The trial says nothing about silence."""


class SlowHandler:
    """A handler that waits for a slow store, and notes when a message came and when its change was written."""

    def __init__(self, witness: Witness) -> None:
        self._note = witness.note

    def read(self, message: dict, delivery: Delivery) -> Put:
        key, version = message["key"], message["version"]
        self._note(f"{READ} {key} {version} {delivery.count} {boot_time()}")
        return Put(key, version)

    async def apply(self, change: Change[dict]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(change.value["call_s"]):
                await asyncio.Event().wait()
        self._note(f"{WROTE} {change.key} {change.version} {boot_time()}")


def readings(worker: str, notes: str) -> list[Reading]:
    found = (line.removeprefix(READ).split() for line in notes.splitlines() if line.startswith(READ))
    return [Reading(worker, key, int(version), int(count), float(at)) for key, version, count, at in found]


def effects(notes: str) -> list[Effect]:
    found = (line.removeprefix(WROTE).split() for line in notes.splitlines() if line.startswith(WROTE))
    return [Effect(key, int(version), float(at)) for key, version, at in found]


def waits(sent: Iterable[Sent], written: Iterable[Effect]) -> list[Wait]:
    """Pair each change with the first effect of its version or a newer one."""
    by_key = defaultdict[str, list[Effect]](list)
    for effect in written:
        by_key[effect.key].append(effect)
    return [
        Wait(one, min((effect.at for effect in by_key[one.key] if effect.version >= one.version), default=None))
        for one in sent
    ]


def judge(record: Record, limits: Limits) -> list[Silence]:
    """Find the longest silence during the fault, of keys without and with a claim of the victim.

    A change that the victim had received without a claim is apart: it cannot be written before its queue delivers it
    again, unless a newer change of its key comes.
    """
    open_waits = [
        wait
        for wait in waits(record.sent, record.effects)
        if wait.sent.at <= record.ended and (wait.written_at is None or wait.written_at >= record.began)
    ]
    received = received_by_victim(record)
    groups = defaultdict[str, list[Wait]](list)
    for wait in open_waits:
        if wait.sent.key in record.claimed:
            groups["claimed"].append(wait)
        elif (wait.sent.key, wait.sent.version) in received:
            groups["received"].append(wait)
        else:
            groups["other"].append(wait)
    if not record.claimed or not groups["claimed"]:
        raise NothingMeasuredError("no change waited for a claim of the worker that was killed or stopped")
    if not any(wait.sent.at >= record.began for wait in groups["other"]):
        raise NothingMeasuredError("no change to another key was sent during the fault")
    other_s = PATIENCE_S + limits.call_s
    probation_s = waves(len(record.claimed), limits.concurrency) * limits.call_s
    return [
        _silence("not claimed", groups["other"], other_s, record.judged_at),
        _silence("received, not claimed", groups["received"], limits.redelivery_s + other_s, record.judged_at),
        _silence("claimed", groups["claimed"], limits.lease_s + PATIENCE_S + probation_s, record.judged_at),
    ]


def received_by_victim(record: Record) -> set[tuple[str, int]]:
    """Find changes whose messages were with the victim when it died, or were delivered to it while it hung.

    The victim cannot note the latter. Their first note is that of a later delivery, to another worker.
    """
    first: dict[tuple[str, int], Reading] = {}
    for one in sorted(record.readings, key=lambda reading: reading.at):
        first.setdefault((one.key, one.version), one)
    return {
        change
        for change, one in first.items()
        if one.count > 1 or (one.worker == record.victim and one.at <= record.began)
    }


def longest_before(record: Record, moment: float) -> float:
    """Return the longest silence of changes that were written before a moment; 0.0 without any."""
    found = waits(record.sent, record.effects)
    return max(
        (w.written_at - w.sent.at for w in found if w.written_at is not None and w.written_at < moment), default=0.0
    )


def waves(changes: int, concurrency: int) -> int:
    """How many waves on probation it takes until so many changes have run: of 1, 2, 4, … up to `concurrency`."""
    count, size = 0, 1
    while changes > 0:
        changes, count, size = changes - size, count + 1, min(2 * size, concurrency)
    return count


def _silence(keys: str, group: Sequence[Wait], limit_s: float, now: float) -> Silence:
    return Silence(keys, len(group), max((wait.seconds(now) for wait in group), default=None), limit_s)
