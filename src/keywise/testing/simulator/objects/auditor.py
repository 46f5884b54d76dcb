"""Judges every step of simulated object ingest by a book of its own, and what is left at the end."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from keywise.core.change import ChangeHeader, Order, is_same_version
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Advance, Claim, Commit, Refusal, RefusalReason
from keywise.core.ledger import Failure
from keywise.core.record import Record
from keywise.ingest.object_note import ContentNote
from keywise.testing.run_log import RunLog

if TYPE_CHECKING:
    from keywise.testing.simulator.objects.world import ObjectsWorld

DEATHS_MAX = 30
"""An object with which more workers died at one place should be a dead letter by then."""


class KnownObject(msgspec.Struct):
    """What the auditor knows of one object."""

    reached: tuple[Order, int] | None = None
    """The order that was under way last, and the place that it must resume at."""
    token: int = 0
    """The token of the last grant."""
    deaths: int = 0
    """How many claims were taken over since the last progress or end."""
    failures: int = 0
    run: int = 0
    """How often the object was begun at its beginning."""
    began_at: float = 0.0
    """When the last run began."""


class ObjectsAudit(RunLog):
    """Judges every step of an `ObjectsWorld`."""

    def __init__(self, world: "ObjectsWorld") -> None:
        super().__init__(world.now)
        self._world = world
        self._known: dict[str, KnownObject] = {}
        self._run_of: dict[int, tuple[str, int]] = {}
        """By token, the key and the run that a claim belongs to."""
        self._claims: Counter[tuple[str, int]] = Counter()
        """How many claims each run had."""
        self._issued: dict[tuple[str, int, bool], Counter[int]] = {}
        """How often the calls of a run began with each ordinal, written or deleted."""
        self._applied: Counter[tuple[str, int, int]] = Counter()

    def known(self, key: str) -> KnownObject:
        return self._known.setdefault(key, KnownObject())

    def granted(self, claim: Claim) -> None:
        known = self.known(claim.key)
        self.note(f"{claim.key} {claim.order} is granted at {claim.position}, extent {claim.extent}")
        if claim.token == known.token:
            self.violate(f"{claim.key} is granted under the token of the last holder")
        known.deaths += claim.took_over
        known.token = claim.token
        if claim.order is None:
            return
        if (
            known.reached is not None
            and claim.order < known.reached[0]
            and is_same_version(claim.order, known.reached[0])
        ):
            self.violate(f"{claim.key} is granted at {claim.order}, before its restart at {known.reached[0]}")
        resumes = known.reached is not None and known.reached[0] == claim.order
        place = known.reached[1] if known.reached is not None and resumes else None
        if (claim.position.place if claim.position is not None else None) != place:
            self.violate(f"{claim.key} {claim.order} is granted at {claim.position}, and has come to {place}")
        if claim.crashes > known.deaths or claim.level > known.deaths:
            self.violate(
                f"{claim.key} is blamed for {claim.crashes} crashes at level {claim.level}, not {known.deaths}"
            )
        if claim.attempts > known.failures:
            self.violate(f"{claim.key} is blamed for {claim.attempts} attempts, and {known.failures} have failed")
        if known.deaths > DEATHS_MAX:
            self.violate(f"{known.deaths} workers died with {claim.key}, and it is no dead letter")
        if not resumes:
            known.reached = None
            self._begin(claim, known)
        self._run_of[claim.token] = (claim.key, known.run)
        self._claims[claim.key, known.run] += 1

    def refused(self, header: ChangeHeader, refusal: Refusal) -> None:
        """A claim was refused. An object that started again must not wait for itself."""
        entry = self._world.entry(header.key)
        if refusal.reason is not RefusalReason.DEFERRED or header.order is None or entry.advanced is None:
            return
        is_own = entry.tried == entry.advanced and is_same_version(header.order, entry.advanced)
        if is_own and (entry.unknown is None or entry.unknown <= entry.advanced):
            self.violate(f"{header.key} {header.order} waits for its own restart at {entry.advanced}")

    def advanced(self, advance: Advance, *, is_accepted: bool, is_once: bool) -> None:
        claim, order, place = advance.claim, advance.order, advance.position.place
        assert order is not None, "only an object has positions"
        known = self.known(claim.key)
        is_behind = known.reached is not None and order < known.reached[0]
        kept = known.reached[1] if known.reached is not None and known.reached[0] == order else -1
        self.note(f"{claim.key} {order} comes to {place}: {'kept' if is_accepted else 'refused'}")
        if not is_accepted:
            entry = self._world.entry(claim.key)
            if entry.token == claim.token == known.token and not entry.abandoned and place > kept and not is_behind:
                self.violate(f"{claim.key} may not come to {place}, and nobody else holds it")
            return
        if claim.token != known.token:
            self.violate(f"an old token brings {claim.key} to {place}")
            return
        if is_behind:
            self.violate(f"{claim.key} {order} comes to {place}, and has started again since")
            return
        if place < kept or (is_once and place == kept):
            self.violate(f"{claim.key} comes from {kept} to {place}")
        if known.reached is not None and known.reached[0] < order:
            if place > 0 or advance.restart is None:
                self.violate(f"{claim.key} starts again at {place}")
            self._begin(claim, known)
            self._claims[claim.key, known.run] = 1
        known.reached = (order, place)
        if place > max(kept, 0):
            known.deaths = known.failures = 0

    def _begin(self, claim: Claim, known: KnownObject) -> None:
        known.run += 1
        known.began_at = self._now()
        self._run_of[claim.token] = (claim.key, known.run)
        self._claims[claim.key, known.run] = 0

    def committed(self, commit: Commit) -> None:
        claim, world = commit.claim, self._world
        known, entry = self.known(claim.key), world.entry(claim.key)
        self.note(f"{claim.key} {claim.order} is committed with {commit.note!r}")
        if entry.advanced is not None and claim.order is not None and entry.advanced <= claim.order:
            self.violate(f"{claim.key} {claim.order} is committed, and keeps the position of {entry.advanced}")
        if claim.token != known.token:
            return
        note, name = ContentNote.of(entry), world.name_of(claim.key)
        if entry.deleted and world.store.is_lasting(name, known.began_at):
            self.violate(f"{claim.key} is deleted, and was in the store all the time")
        content = world.store.contents.get(note.etag)
        if content is not None and content.replaced_at is not None and content.replaced_at < known.began_at:
            self.violate(f"{claim.key} is committed as {note.etag}, which was replaced before it was read")
        if content is not None and note.records != len(content.records):
            self.violate(f"{claim.key} is committed with {note.records} records, and has {len(content.records)}")
        if claim.suspicions and not entry.suspicions and not commit.repairs:
            self.violate(f"{claim.key} is no longer suspect, and was not repaired")
        known.reached, known.deaths, known.failures = None, 0, 0

    def failed(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self.known(failure.claim.key).failures += failure.counts_attempt

    def dead_lettered(self, claim: Claim, letter: DeadLetter) -> None:
        world, known = self._world, self.known(claim.key)
        self.note(f"{claim.key} {claim.order} is a dead letter: {letter.cause}")
        has_died = known.deaths >= world.crashes_max
        has_failed = known.failures >= world.attempts_max - 1
        if not has_died and not has_failed:
            self.violate(
                f"{claim.key} is a dead letter ({letter.cause}) after {known.deaths} deaths, {known.failures} failures"
            )
        known.deaths = known.failures = 0

    def issued(self, records: Sequence[Record[Any]], claims: Sequence[Claim]) -> None:
        """A call is about to write records outside of a transaction: at most one portion per claim is repeated."""
        firsts: dict[tuple[str, int], Record[Any]] = {}
        for record, claim in zip(records, claims, strict=True):
            firsts.setdefault(self._run_of[claim.token], record)
        for run, record in firsts.items():
            written = self._issued.setdefault((*run, record.deleted), Counter())
            written[record.ordinal] += 1
            repeated = written.total() - len(written)
            if repeated > self._claims[run] - 1:
                self.violate(f"{run[0]}: {repeated} portions are repeated by {self._claims[run]} claims")

    def applied_once(self, token: int, record: Record[Any]) -> None:
        run = self._run_of.get(token)
        if run is None:
            self.violate(f"record {record.ordinal} of {record.object} is written without a claim")
            return
        self._applied[*run, record.ordinal] += 1
        if self._applied[*run, record.ordinal] > 1:
            self.violate(f"record {record.ordinal} of {record.object} {record.order} is written twice")

    # The end.

    def check_end(self) -> None:
        world = self._world
        if world.queue:
            self.violate(f"not drained: {len(world.queue)} messages")
        for name in sorted({content.name for content in world.store.contents.values()}):
            self._check_object(name)

    def _check_object(self, name: str) -> None:
        world, uri = self._world, self._world.uri_of(name)
        entry, (wanted, note) = world.entry(uri), world.wanted(name)
        held = {
            ordinal: body for (one, ordinal), (_, deleted, body) in world.records.items() if one == uri and not deleted
        }
        if held != wanted:
            self.violate(f"{uri} ends as {_shown(held)}, the truth is {_shown(wanted)}")
        if ContentNote.of(entry) != note or entry.deleted != (not note.etag):
            self.violate(f"{uri} is remembered as {entry.note!r}, deleted {entry.deleted}, the truth is {note}")
        extent = 0 if world.finds_records else note.records
        if entry.extent != extent:
            self.violate(f"{uri} has the extent {entry.extent}, and {extent} records")
        if entry.suspicions:
            self.violate(f"{uri} ends suspect")
        for ordinal in sorted(world.letters_wanted(name) - self._letters(uri, note.etag)):
            self.violate(f"record {ordinal} of {uri} is bad, and no dead letter")

    def _letters(self, uri: str, etag: str) -> set[int]:
        """The ordinals of the records of this content that are dead letters."""
        found = set[int]()
        for _, letter in self._world.letters():
            headers = letter.headers or {}
            if headers.get("keywise-object") != uri:
                continue
            if headers.get("etag", "") == etag or etag.encode() in letter.body:
                found.add(int(headers["ordinal"]))
        return found


def _shown(records: dict[int, bytes]) -> str:
    return f"{len(records)} records {sorted(records.items())[:3]}…"
