"""The press: what editors did to the documents, and how a queue hands the news of it over.

Every edit is a new version. A queue delivers some of them twice, many out of order, and a few very late.
The seed decides everything, so two runs see the same events.
"""

import itertools
import random
import uuid
from collections.abc import Iterable, Iterator, Sequence

import msgspec

SEED = 2024
DUPLICATES = 0.08
REORDERED = 0.15
STRAGGLERS = 0.01
VERBS = (
    "Apply for",
    "Renew",
    "Register",
    "Report",
    "Pay for",
    "Cancel",
    "Replace",
    "Check",
    "Appeal about",
    "Transfer",
)
THINGS = (
    *("a passport", "a driving licence", "a boat", "a birth", "a garden waste bin", "a parking permit", "a blue badge"),
    *("a school place", "a library card", "a fishing licence", "a marriage", "a planning decision", "a market stall"),
)
PLACES = (
    "in the north",
    "in the south",
    "by post",
    "online",
    "from abroad",
    "as a company",
    "for a friend",
    "in person",
)


class Event(msgspec.Struct, frozen=True):
    """One message: the whole state of a document after one act of an editor."""

    content_id: str
    payload_version: int
    document_type: str
    title: str
    text: str

    @property
    def is_gone(self) -> bool:
        return self.document_type in ("gone", "redirect")


class Page(msgspec.Struct, frozen=True):
    """A document as the public sees it."""

    version: int
    title: str
    text: str

    @classmethod
    def of(cls, event: Event) -> "Page":
        return cls(event.payload_version, event.title, event.text)


Shelf = dict[str, Page]
"""All documents that can be found, by their content id."""


def deliveries(count: int, documents: int, seed: int = SEED) -> list[Event]:
    """This many events in the order in which the queue hands them over."""
    rng = random.Random(seed)
    arriving: list[tuple[float, int, Event]] = []
    tickets = itertools.count()
    for published_at, event in _published(rng, documents):
        for _ in range(2 if rng.random() < DUPLICATES else 1):
            arriving.append((published_at + _delay(rng), next(tickets), event))
        if len(arriving) >= count:
            break
    return [event for _, _, event in sorted(arriving[:count])]


def bursts(events: Sequence[Event], seed: int = SEED) -> Iterator[Sequence[Event]]:
    """The same events in handfuls and floods."""
    rng = random.Random(seed)
    start = 0
    while start < len(events):
        size = rng.choice((5, 40, 200, 1500))
        yield events[start : start + size]
        start += size


def truth(events: Iterable[Event]) -> Shelf:
    """How the documents must end up: the newest version of each, and nothing that is gone."""
    return {key: Page.of(event) for key, event in newest(events).items() if not event.is_gone}


def newest(events: Iterable[Event]) -> dict[str, Event]:
    found: dict[str, Event] = {}
    for event in events:
        known = found.setdefault(event.content_id, event)
        if event.payload_version > known.payload_version:
            found[event.content_id] = event
    return found


def _published(rng: random.Random, documents: int) -> Iterator[tuple[float, Event]]:
    """PipelineAdmin of editors for ever, with the time of each; the act's number is the document's version."""
    content_ids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(documents)]
    titles = [f"{rng.choice(VERBS)} {rng.choice(THINGS)} {rng.choice(PLACES)}" for _ in content_ids]
    is_live = [False] * documents
    unpublished = list(range(documents))
    versions = itertools.count(1)
    now = 0.0
    while True:
        now += rng.expovariate(0.5)
        if unpublished and rng.random() < 0.5:
            document = unpublished.pop()
        else:
            # Some documents are edited much more often than others.
            document = int(documents * rng.random() ** 1.5)
        for step, document_type in enumerate(_acts(rng, is_live[document])):
            version = next(versions)
            gone = document_type in ("gone", "redirect")
            text = "" if gone else f"Edition {version}. {titles[document]}: {rng.choice(THINGS)}, {rng.choice(PLACES)}."
            yield now + step * 0.1, Event(content_ids[document], version, document_type, titles[document], text)
            is_live[document] = not gone


def _acts(rng: random.Random, is_live: bool) -> list[str]:
    """One change of mind often becomes several messages in rapid succession."""
    if not is_live:
        return ["guide"] * rng.choice((1, 1, 2, 3))
    choice = rng.random()
    if choice < 0.15:
        return [rng.choice(("gone", "redirect"))]
    if choice < 0.25:
        return ["gone", "guide"]
    if choice < 0.35:
        return ["guide", "redirect"]
    return ["guide"] * rng.choice((1, 2, 3, 4))


def _delay(rng: random.Random) -> float:
    if rng.random() < STRAGGLERS:
        return rng.uniform(500, 5000)
    return rng.expovariate(1 / 3) if rng.random() < REORDERED else 0.0
