"""A small content management system: what editors do, as bursts of events that each say the whole state of a document.

Content and links are separate acts inside it, so one change of mind becomes several events in rapid succession.
Translations have the same content id, and events of their own, which are no business of a search in English.
"""

import itertools
import random
import uuid
from collections.abc import Iterator

import msgspec

LOCALES = ("en", "cy")
VERBS = ("Apply for", "Renew", "Register", "Report", "Pay for", "Cancel", "Replace", "Check")
THINGS = (
    "a passport",
    "a driving licence",
    "a boat",
    "a birth",
    "a parking permit",
    "a school place",
    "a market stall",
)
GONE = ("gone", "redirect")
DUPLICATES = 0.1


class Event(msgspec.Struct, frozen=True):
    """One message of the publishing queue: the whole state of one document in one language."""

    content_id: str
    locale: str
    payload_version: int
    """The number of the event, over all documents."""
    document_type: str
    title: str
    text: str
    links: list[str]

    @property
    def is_gone(self) -> bool:
        return self.document_type in GONE


class Cms:
    """All documents as their editors see them."""

    def __init__(self, documents: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)
        self.ids = [str(uuid.UUID(int=self._rng.getrandbits(128), version=4)) for _ in range(documents)]
        self.newest: dict[str, Event] = {}
        """Of each document, in English."""
        self._states = {
            (content_id, locale): Event(content_id, locale, 0, "gone", self._title(), "", [])
            for content_id in self.ids
            for locale in LOCALES
        }

    @property
    def truth(self) -> dict[str, int]:
        """The version of each document that can be found."""
        return {key: event.payload_version for key, event in self.newest.items() if not event.is_gone}

    def first_editions(self) -> Iterator[list[Event]]:
        """Every document is published once."""
        for content_id in self.ids:
            yield self._delivered([self._edited(content_id, "en", "guide")])

    def burst(self) -> list[Event]:
        """What one editor does within a second, as a queue delivers it: some of it twice, some out of order."""
        # A few documents are edited much more often than others.
        content_id = self.ids[int(len(self.ids) * self._rng.random() ** 2)]
        locale = "en" if self._rng.random() < 0.8 else "cy"
        kinds = self._acts(is_live=not self._states[content_id, locale].is_gone)
        return self._delivered([self._edited(content_id, locale, kind) for kind in kinds])

    def _acts(self, *, is_live: bool) -> list[str]:
        choice = self._rng.random()
        if is_live and choice < 0.1:
            return [self._rng.choice(GONE)]
        if is_live and choice < 0.2:
            return ["gone", "guide"]
        # The text is saved a few times, and each time the links after it.
        return ["guide"] * (2 * self._rng.randint(1, 6))

    def _edited(self, content_id: str, locale: str, kind: str) -> Event:
        before, number = self._states[content_id, locale], next(self._numbers)
        text, links = before.text, before.links
        if number % 2:
            text = f"Edition {number} of “{before.title}”."
        else:
            links = self._rng.sample(self.ids, min(3, len(self.ids)))
        event = Event(content_id, locale, number, kind, before.title, text, links)
        self._states[content_id, locale] = event
        if locale == "en":
            self.newest[content_id] = event
        return event

    def _delivered(self, events: list[Event]) -> list[Event]:
        twice = [event for event in events if self._rng.random() < DUPLICATES]
        return self._rng.sample([*events, *twice], len(events) + len(twice))

    def _title(self) -> str:
        return f"{self._rng.choice(VERBS)} {self._rng.choice(THINGS)}"
