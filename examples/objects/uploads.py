"""What happens to the log files in the bucket, and how it is announced: twice, late and out of order.

The seed decides everything, so two runs have the same files and the same notifications.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote_plus

import msgspec
from examples.objects.place import BUCKET

TWICE, OUT_OF_ORDER, LATE = 0.15, 0.3, 0.05
"""Shares of the notifications that come twice, after some that were sent later, and very late."""
FIRST_SECOND = 1_800_000_000
LARGE, LARGE_FILES = "archive/", 3
PART_LINES = 100
SERVICES = ("web", "mail", "search", "pay+ments", "café")


class Upload(msgspec.Struct, frozen=True):
    """One write of a log file, or its deletion."""

    name: str
    number: int
    """Counts all of them."""
    lines: int | None
    """How many lines it has; None for a deletion."""

    @property
    def sequencer(self) -> str:
        """As S3 makes them: a time in hexadecimal."""
        return f"{(FIRST_SECOND << 32) + self.number:018X}"

    def rows(self) -> list[str]:
        """Its lines. No two lines of all uploads are equal."""
        return [
            f'{{"file": "{self.name}", "upload": {self.number}, "line": {line}, "text": "served in {line % 97} ms"}}'
            for line in range(self.lines or 0)
        ]

    def content(self) -> bytes:
        return "".join(f"{row}\n" for row in self.rows()).encode()


def uploads(small_files: int, large_lines: int, seed: int) -> list[Upload]:
    """All that happens to the files, in its order."""
    rng = random.Random(seed)
    names = [f"{rng.choice(SERVICES)}/{day:03} of 2026.ndjson" for day in range(small_files)]
    waiting = [(name, sizes) for name in names if (sizes := _small_sizes(rng))]
    waiting += [(f"{LARGE}{number}.ndjson", _large_sizes(rng, large_lines)) for number in range(LARGE_FILES)]
    found: list[Upload] = []
    while waiting:
        name, sizes = rng.choice(waiting)
        found.append(Upload(name, len(found) + 1, sizes.pop(0)))
        waiting = [one for one in waiting if one[1]]
    return found


def truth(some: Iterable[Upload]) -> dict[str, list[str]]:
    """The lines of each file that exists in the end."""
    last = {one.name: one for one in some}
    return {name: one.rows() for name, one in last.items() if one.lines is not None}


def notifications(some: Sequence[Upload], seed: int) -> dict[int, list[bytes]]:
    """The messages to send after each upload, by its number. The last number has all that are left."""
    rng, end = random.Random(seed), some[-1].number
    due: dict[int, list[Upload]] = {}
    for one in some:
        for _ in range(2 if rng.random() < TWICE else 1):
            due.setdefault(min(one.number + _delay(rng, end), end), []).append(one)
    return {number: list(_messages(rng, events)) for number, events in due.items()}


def _small_sizes(rng: random.Random) -> list[int | None]:
    """Written, then overwritten with less or more, deleted, or deleted and written again."""
    sizes: list[int | None] = [rng.randint(1, 80)]
    for _ in range(rng.choice((0, 1, 2, 4))):
        if sizes[-1] is None or rng.random() < 0.6:
            sizes.append(rng.randint(1, 80))
        else:
            sizes.append(None)
    return sizes


def _large_sizes(rng: random.Random, lines: int) -> list[int | None]:
    # Deleted and written again, so that a deletion that comes late is dangerous.
    return [lines, round(lines * rng.uniform(0.3, 0.6)), None, round(lines * rng.uniform(0.8, 1.2))]


def _delay(rng: random.Random, end: int) -> int:
    kind = rng.random()
    if kind < LATE:
        return rng.randint(end // 4, end)
    return rng.randint(1, 20) if kind < LATE + OUT_OF_ORDER else 0


def _messages(rng: random.Random, events: Sequence[Upload]) -> Iterator[bytes]:
    """One message may announce several objects."""
    shuffled = rng.sample(events, len(events))
    while shuffled:
        size = rng.randint(1, 3)
        yield msgspec.json.encode({"Records": [_record(one) for one in shuffled[:size]]})
        shuffled = shuffled[size:]


def _record(one: Upload) -> dict[str, Any]:
    event = "ObjectRemoved:Delete" if one.lines is None else "ObjectCreated:Put"
    described: dict[str, Any] = {"key": quote_plus(one.name, safe="/"), "sequencer": one.sequencer}
    if one.lines is not None:
        described["size"] = len(one.content())
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "eventTime": "2027-01-15T08:00:00.000Z",
        "eventName": event,
        "s3": {"bucket": {"name": BUCKET}, "object": described},
    }
