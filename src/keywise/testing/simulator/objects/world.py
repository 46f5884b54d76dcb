"""A simulated run of object ingest: objects change while workers read them, and workers die, stop or are cut off."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import msgspec

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.source import MemorySource
from keywise.core import rules
from keywise.core.change import Delivery, Order
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import EMPTY, Entry, LedgerPolicy
from keywise.core.record import Record
from keywise.core.settings import Settings
from keywise.core.sink import Grade, SinkResult
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest.announcement_reader import AnnouncementReader
from keywise.ingest.announcement_source import AnnouncementSource
from keywise.ingest.formats import NdjsonFormat
from keywise.ingest.notification import Announcement, ObjectEvent, ObjectSelection
from keywise.ingest.object_note import ContentNote
from keywise.ingest.open_objects import OpenObjects
from keywise.ingest.parts import PartSettings
from keywise.ingest.reader import ReadPlan
from keywise.ingest.versions import VersionScale
from keywise.testing.fault_injector import FaultInjector, draw_rate
from keywise.testing.lossy_link import LossyLink
from keywise.testing.simulated_world import ConsumerWorld
from keywise.testing.simulator.objects.auditor import ObjectsAudit
from keywise.testing.simulator.objects.links import (
    FLAKY,
    FLAKY_AT_END,
    POISONED,
    REFUSED,
    CalledSink,
    ObjectsLedger,
    ObjectsQueue,
    SimulatedTable,
    TransactionSink,
)
from keywise.testing.simulator.objects.store import BAD_RECORD, LinkedStore, ObjectContent, RecordBody, SimulatedStore
from keywise.testing.virtual_loop import Process, outside

FAULTS_S = 120.0
REST_MAX_S = 6000.0
ROOT = "sim://bucket"
LARGE_BYTES = 2**20
"""A size that some notifications claim, so that the object counts as long before it is read."""
SETTINGS = Settings(
    lease_s=10.0,
    margin_s=1.0,
    runtime_max_s=25.0,
    horizon_s=60.0,
    repair_s=4.0,
    concurrency=4,
    prefetch=40,
    batch_max=10,
    attempts_max=4,
    crashes_max=2,
    backoff_s=0.2,
    backoff_max_s=2.0,
    poll_s=1.0,
    drain_s=30.0,
    redelivery_s=300.0,
)
PARTS = PartSettings(part_bytes=90, part_records=3)
SELECTION = ObjectSelection(ROOT)


class Notice(msgspec.Struct, frozen=True):
    """What a notification says of one object."""

    name: str
    version: int
    deleted: bool = False
    size: int | None = None


class ObjectsWorld(ConsumerWorld):
    """A few workers, a store, and objects of up to ten parts that change while they are read."""

    processes = (2, 3)
    restart_max_s = 2.0
    faults_s = FAULTS_S
    rest_max_s = REST_MAX_S
    auditor: ObjectsAudit

    def __init__(self, seed: int, grade: Grade) -> None:
        super().__init__(f"objects {grade.value} {seed}")
        rng = self.rng
        self.grade = grade
        self.faults = FaultInjector(rng)
        self.faults.lost_rate, self.faults.slow_rate = draw_rate(rng, 0.1), draw_rate(rng, 0.06)
        self.faults.pause_rate, self.faults.crash_rate = draw_rate(rng, 0.06), draw_rate(rng, 0.03)
        self._stop_rate, self.late_rate = draw_rate(rng, 0.02), draw_rate(rng, 0.2)
        self._lag_rate, self._away_rate = draw_rate(rng, 0.4), draw_rate(rng, 0.02)
        self._broken_rate, self._pause_rate = draw_rate(rng, 0.1), draw_rate(rng, 0.02)
        self._late_max_s = rng.choice((3.0, 40.0, 200.0))
        """How late notifications are sent in this run."""
        self.finds_records = grade is Grade.ATOMIC and rng.random() < 0.7
        """Whether the atomic sink is a table of records, and not a handler."""
        self.database = MemoryDatabase(clock=self.store_now, rng=random.Random(rng.random()))
        self.source = MemorySource(MemoryDatabase(clock=self.now), "queue", visibility_s=20.0)
        self.queue = self.source.database.queue("queue")
        self.policy = LedgerPolicy(intents=grade is Grade.PLAIN, redelivery_s=SETTINGS.redelivery_s)
        self.store = SimulatedStore(self.now, rng)
        self.records: dict[tuple[str, int], tuple[Order, bool, bytes]] = self.database.table("records")
        """By URI and ordinal, what the sink holds: the order, whether it is a deletion, and the body."""
        self.auditor = ObjectsAudit(self)
        self._versions = 0
        self._gathered: list[Notice] = []
        """What the next message announces too."""
        self._under_way = 0
        """How many notifications and replays are about to be sent."""

    @property
    def entries(self) -> dict[str, Entry]:
        return self.database.scope("sim").entries

    def entry(self, key: str) -> Entry:
        return self.entries.get(key, EMPTY)

    # The run.

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        names = [f"object-{number}" for number in range(self.rng.randint(2, 5))]
        return [*(self._change_object(name) for name in names), self._pause_sometimes(names)]

    def disturb(self) -> None:
        self.disturb_processes("stop", self._stop_rate, self.stop)
        if self.faults.happens("store away", self._away_rate):
            self.store.away_until = self.now() + self.rng.uniform(1.0, 90.0)
        if self.faults.happens("store refuses", self._away_rate / 2):
            self.store.refuses_until = self.now() + self.rng.uniform(1.0, 30.0)

    def is_at_rest(self) -> bool:
        is_suspect = any(rules.suspect_since(entry, self.policy) is not None for entry in self.entries.values())
        return not self.queue and not self._under_way and not is_suspect

    async def check_end(self) -> None:
        self.auditor.check_end()

    # The workload.

    async def _change_object(self, name: str) -> None:
        """Put, replace and delete one object some times, and announce each change, perhaps late or twice."""
        rng = self.rng
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.4:
                await self._until_under_way(name)
            notices = [self._change(name) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
            if rng.random() < 0.5:
                self._announce(notices)
            else:
                for notice in notices:
                    self._announce([notice])
            if rng.random() < 0.3:
                self._announce([rng.choice(notices)])
            await asyncio.sleep(rng.uniform(0.0, rng.choice((2.0, 60.0))))
        self._send_gathered()

    async def _until_under_way(self, name: str) -> None:
        """Wait for the worst moment for a change: a worker has written a part of the object."""
        for _ in range(40):
            position = self.entry(self.uri_of(name)).position
            if position is not None and position.place > 0:
                return
            await asyncio.sleep(0.5)

    def _change(self, name: str) -> Notice:
        self._versions += 1
        if name in self.store.objects and self.rng.random() < 0.3:
            self.store.delete(name)
            self.auditor.note(f"{name} is deleted, version {self._versions}")
            return Notice(name, self._versions, deleted=True)
        content = self._content(name)
        is_late = self.faults.happens("read-after-write lag", self._lag_rate)
        self.store.put(content, self.rng.uniform(0.0, 20.0) if is_late else 0.0)
        self.auditor.note(f"{name} is put, version {self._versions}, {len(content.records)} records as {content.etag}")
        size = self.rng.choice((None, len(content.body), LARGE_BYTES))
        return Notice(name, self._versions, size=size)

    def _content(self, name: str) -> ObjectContent:
        rng, etag = self.rng, f"e{self._versions}"
        count = rng.choice((0, 1, 2, 3, 4, rng.randint(3, 12), rng.randint(3, 30)))
        records = [msgspec.json.encode(RecordBody(etag, ordinal)) for ordinal in range(count)]
        bad, refused = frozenset[int](), frozenset[int]()
        if count and rng.random() < 0.25:
            bad = frozenset(rng.sample(range(count), min(count, 2)))
            records = [BAD_RECORD if ordinal in bad else record for ordinal, record in enumerate(records)]
        elif count and rng.random() < 0.2:
            refused = frozenset(rng.sample(range(count), min(count, 2)))
        content = ObjectContent(name, etag, records, bad, refused, rng.choice((0.0, 0.0, rng.uniform(0.05, 4.0))))
        content.dies_at_each_part = rng.random() < 0.2
        if content.good and rng.random() < 0.15:
            content.failures_left = dict.fromkeys(rng.sample([*content.good], 1), SETTINGS.attempts_max - 1)
        if content.good and rng.random() < 0.15:
            content.poison, content.poison_kills = rng.choice([*content.good]), rng.random() < 0.5
        return content

    def _announce(self, notices: list[Notice]) -> None:
        """Send a message with these notices, and perhaps with some of other objects."""
        self._gathered += notices
        if self.rng.random() < 0.7:
            self._send_gathered()

    def _send_gathered(self) -> None:
        if self._gathered:
            late_s = self.rng.uniform(0.0, self.rng.choice((0.0, 0.0, self._late_max_s)))
            self._send_later(msgspec.json.encode(self._gathered), late_s)
        self._gathered = []

    def _send_later(self, body: bytes, late_s: float) -> None:
        self._under_way += 1
        outside(self.loop, self._send(body, late_s))

    async def _send(self, body: bytes, late_s: float) -> None:
        await asyncio.sleep(late_s)
        await self.source.send([body])
        self._under_way -= 1

    async def _pause_sometimes(self, names: list[str]) -> None:
        """An operator pauses everything, or one object, for a while."""
        while self.now() < FAULTS_S:
            await asyncio.sleep(5.0)
            if self.faults.happens("operator pauses", self._pause_rate * 5):
                keys = self.rng.choice((EVERYTHING, f"{ROOT}/{self.rng.choice(names)}"))
                ledger = ObjectsLedger(LossyLink(self, Process(self.loop, "operator")), self)._server
                await ledger.pause(Pause(keys, keys == EVERYTHING))
                await asyncio.sleep(self.rng.uniform(1.0, 20.0))
                await ledger.resume(keys, keys == EVERYTHING)

    # What the records do to those who write them.

    async def meet_killer(self, process: Process, record: Record[Any]) -> None:
        if record.deleted:
            return
        content, ordinal = self.store.content_of(record.body)
        if content.poison == ordinal and content.poison_kills and not content.is_healed:
            await self.die(process)

    def fault_of(self, record: Record[Any], *, counts: bool) -> SinkResult | None:
        """Return how the write of a record fails, or None; it counts if no other record can be the reason."""
        if record.deleted:
            return None
        content, ordinal = self.store.content_of(record.body)
        if ordinal in content.refused:
            return REFUSED
        if content.poison == ordinal and not content.is_healed:
            return POISONED
        if content.failures_left.get(ordinal):
            content.failures_left[ordinal] -= counts
            return self.rng.choice((FLAKY, FLAKY_AT_END))
        return None

    def heal(self, letter: DeadLetter) -> None:
        """An object has become a dead letter: what made it fail is repaired, and the letter is replayed."""
        for content in self.store.contents.values():
            if f"{ROOT}/{content.name}" == letter.key:
                content.is_healed = True
        self._send_later(letter.body, self.rng.uniform(0.0, 20.0))

    # Processes.

    def pipeline(self, process: Process) -> OpenPipeline:
        link = LossyLink(self, process)
        ledger: Any = ObjectsLedger(link, self)
        queue: Any = ObjectsQueue(link, self.source)
        store = LinkedStore(link, self.store, self.faults, self._broken_rate)
        plan = ReadPlan(NdjsonFormat(), PARTS, compression="none")
        return OpenPipeline(
            name="sim",
            sources=[("queue", AnnouncementSource(queue, read_notices, SELECTION, ledger.fix_scale))],
            ledger=ledger,
            admin=ledger,
            control_store=ledger,
            history_store=ledger,
            sink=self._sink(link),
            reader=AnnouncementReader(),
            objects=OpenObjects(store, SELECTION, plan),
            settings=SETTINGS,
            owner=process.name,
            clock=self.now,
            wall=self.store_now,
            rng=random.Random(self.rng.random()),
        )

    def _sink(self, link: LossyLink) -> Any:
        if self.grade is not Grade.ATOMIC:
            return CalledSink(self, link)
        return SimulatedTable(self, link) if self.finds_records else TransactionSink(self, link)

    # What should be there at the end.

    crashes_max, attempts_max = SETTINGS.crashes_max, SETTINGS.attempts_max

    def uri_of(self, name: str) -> str:
        return f"{ROOT}/{name}"

    def name_of(self, uri: str) -> str:
        return SELECTION.name_of(uri)

    def letters(self) -> list[tuple[float, DeadLetter]]:
        return [*self.database.scope("sim").letters.values()]

    def letters_wanted(self, name: str) -> frozenset[int]:
        """Return the ordinals of the records of an object that should be dead letters."""
        content = self.store.objects.get(name)
        return content.bad | content.refused if content is not None else frozenset()

    def wanted(self, name: str) -> tuple[dict[int, bytes], ContentNote]:
        """Return the records of an object that the sink should hold, and what the ledger should remember."""
        content = self.store.objects.get(name)
        if content is None:
            return {}, ContentNote()
        bad = len(content.bad) + len(content.refused)
        return content.good, ContentNote(content.etag, len(content.records), bad)


def read_notices(delivery: Delivery) -> list[Announcement]:
    """The dialect of the simulated store: a list of notices."""
    return [
        ObjectEvent(
            f"{ROOT}/{one.name}", "bucket", one.name, one.deleted, one.version, VersionScale.FUNCTION, size=one.size
        )
        for one in msgspec.json.decode(delivery.body, type=list[Notice])
    ]
