"""Watches a simulated run from the servers' side and notes every broken promise."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from keywise.core.change import VERSION_MIN, Change, Order, is_unversioned
from keywise.core.entry import Claim, Entry, Level, Phase
from keywise.core.sink import Grade
from keywise.testing.run_log import RunLog
from keywise.testing.simulator.dead_letter_audit import Letters
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

TICK_S = 1.0
BLOCKED_MAX_S = 45.0
SLOW_RATE = 0.06
"""A receive that is slow both ways takes so long, and room is made between receives."""


class RunningCall(msgspec.Struct, eq=False):
    """A sink call that a process believes to be running."""

    process: Process
    keys: tuple[str, ...]
    claims: list[Claim]
    started: float


class Auditor(RunLog):
    """Knows what was sent, granted, written, committed and acked, and judges each step when it happens."""

    def __init__(self, world: "World") -> None:
        super().__init__(world.now)
        self._world = world
        self.letters = Letters(world, self)
        self.committed: dict[str, Order] = {}
        """The highest mark that a key ever had."""
        self._committed_at: dict[str, float] = {}
        self.sent_too_late: set[tuple[str, Order]] = set()
        """Old versions that were sent when their key could be forgotten already: they may be applied."""
        self.tries: Counter[tuple[str, Order]] = Counter()
        """Failed tries, as the handlers saw them."""
        self.deaths: Counter[tuple[str, Order]] = Counter()
        """Deaths and long pauses of processes that held a change alone."""
        self.kills: Counter[tuple[str, Order]] = Counter()
        """Deaths that a killer caused itself."""
        self.exclusions: Counter[str] = Counter()
        """Claims for the sake of a repair, by key."""
        self.excused_until = 0.0
        """Until then a jump of the store's clock may have ended leases early."""
        self._marks: dict[str, Order] = {}
        self._tokens: dict[int, float] = {}
        """Every token ever granted, with the end of its lease."""
        self._latest: dict[str, int] = {}
        self._lost: set[int] = set()
        """Tokens of claims whose answer never arrived: nobody works under them."""
        self._written: dict[str, Order] = {}
        self._deleted: dict[str, Order] = {}
        self._applied: Counter[tuple[str, Order]] = Counter()
        self._queued: set[int] = set()
        self._ends: dict[int, float] = {}
        """When the lease of a token ends if no clock jumps."""
        self._overdue: set[int] = set()
        """Tokens under which a call ended after the lease had."""
        self._unknown_at_claim: dict[int, Order | None] = {}
        """What may have been in the sink when a repair was claimed, by its token."""
        self._repairs_killed: Counter[str] = Counter()
        """Deaths at the repair of a key, since a change of it was claimed last."""
        self._calls: list[RunningCall] = []
        self._blocked_ticks: Counter[str] = Counter()

    # The ledger.

    def asked(self, keys: list[str]) -> None:
        if len(set(keys)) < len(keys):
            self.violate("two changes of one key in a batch")

    def granted(self, process: Process, claim: Claim, before: Entry | None, lease_s: float) -> None:
        now = self._world.store_now()
        seems_dead = before is not None and (before.token in self._lost or (before.token and self._is_excused(now)))
        if before is not None and seems_dead and (order := _alone_with(before)) is not None:
            self.deaths[claim.key, order] += 1
        if claim.token in self._tokens:
            self.violate(f"token of {claim.key} was given before")
        if before is not None and before.token and before.lease_until > now:
            self.violate(f"{claim.key} granted to {process.name} while {before.owner} held it")
        mark = self._marks.get(claim.key)
        if claim.order is not None and mark is not None and claim.order <= mark:
            self.violate(f"{claim.key} {_version(claim.order)} granted at or below its mark")
        if claim.order is not None:
            self._repairs_killed[claim.key] = 0
        else:
            self.exclusions[claim.key] += 1
            self._unknown_at_claim[claim.token] = before.unknown if before is not None else None
        if process.is_dead or process.is_paused:
            self._lost.add(claim.token)  # It asked before it fell, and nobody may ever hear the answer.
        self._tokens[claim.token] = now + lease_s
        self._ends[claim.token] = self._world.now() + lease_s
        self._latest[claim.key] = claim.token
        self.note(f"{process.name} claims {claim.key} {_version(claim.order)} token {claim.token & 0xFFFF:x}")

    def operator_claimed(self, claim: Claim) -> None:
        self._tokens[claim.token] = self._world.store_now() + self._world.settings.lease_s
        self._ends[claim.token] = self._world.now() + self._world.settings.lease_s
        self._latest[claim.key] = claim.token

    def claims_lost(self, claims: list[Claim]) -> None:
        self._lost.update(claim.token for claim in claims)

    def renewed(self, claims: list[Claim], lease_s: float) -> None:
        for claim in claims:
            if self._latest.get(claim.key) != claim.token:
                self.violate(f"{claim.key} renewed with an old token")
            self._tokens[claim.token] = self._world.store_now() + lease_s
            self._ends[claim.token] = self._world.now() + lease_s

    def refused(self, claims: list[Claim], before: dict[str, Entry], after: dict[str, Entry]) -> None:
        """A refused commit came after a write: where that can do harm, the key must be suspect."""
        for claim in claims:
            suspicions = before[claim.key].suspicions if claim.key in before else 0
            if self._world.has_suspects and (claim.key not in after or after[claim.key].suspicions <= suspicions):
                self.violate(f"a commit of {claim.key} was refused, and the key is not suspect")

    def committed_by(self, process: Process, claims: list[Claim], before: dict[str, Entry]) -> None:
        """After a commit: whoever raised a mark must have held the latest token."""
        for claim in claims:
            earlier = before.get(claim.key)
            if claim.token in self._overdue and (earlier is None or earlier.token != claim.token):
                self.violate(f"{claim.key} committed by {process.name}, whose claim had ended before its write")
            raised = claim.order is not None and (earlier is None or earlier.mark is None or claim.order > earlier.mark)
            if raised and self._latest.get(claim.key) != claim.token:
                self.violate(f"{claim.key} committed by {process.name} with an old token")

    def released(self, claims: list[Claim], before: dict[str, Entry], after: dict[str, Entry]) -> None:
        for claim in claims:
            earlier, later = before.get(claim.key), after.get(claim.key)
            freed = earlier is not None and earlier.token and (later is None or later.token != earlier.token)
            if freed and earlier is not None and earlier.token != claim.token:
                self.violate(f"{claim.key} released by somebody who does not hold it")
            inherited = earlier.unknown if earlier is not None and earlier.token == claim.token else None
            if inherited is not None and (later is None or later.unknown is None):
                self.violate(f"{claim.key} released, and its unknown write is forgotten")

    def repair_finished(self, claim: Claim, before: Entry | None, after: Entry | None) -> None:
        """Only the holder ends a repair, and only what was there when it began is put right by it."""
        if (before is None or before.token != claim.token) and after != before:
            self.violate(f"{claim.key} repaired by somebody who does not hold it")
        elif before is not None and before.suspicions > claim.suspicions and (after is None or not after.suspicions):
            self.violate(f"{claim.key} is not suspect any more, though its suspicion grew during the repair")

    def pruned(self, before: dict[str, Entry], after: dict[str, Entry], retention_s: float) -> None:
        now = self._world.store_now()
        for key in before.keys() - after.keys():
            entry = before[key]
            if entry.token or entry.intent or entry.unknown or entry.suspicions:
                self.violate(f"{key} pruned while something was going on")
            if entry.updated_at >= now - retention_s:
                self.violate(f"{key} pruned before its retention")
            self._marks.pop(key, None)
            self.note(f"pruned {key}")

    def restored(self) -> None:
        """The ledger was set back by a restore: marks may fall once, tokens may not come again."""
        self._marks.clear()
        self._latest.clear()
        entries = self._world.entries()
        for key, entry in entries.items():
            self._latest[key] = entry.token
            if (order := _alone_with(entry)) is not None:
                self.deaths[key, order] += 1
        self._world.flow.forget()
        self.note("ledger restored from a backup")

    # The sink.

    def call_started(self, process: Process, changes: list[Change[Any]], claims: list[Claim]) -> RunningCall:
        world, now = self._world, self._world.store_now()
        keys = tuple(change.key for change in changes)
        self.asked(list(keys))
        entries = world.entries()
        is_claimed = all(claim.token for claim in claims)
        if not is_claimed:
            world.blackout.call_started(process, changes)
        for claim in claims if is_claimed else ():
            entry = entries.get(claim.key)
            holds = entry is not None and entry.token == claim.token and entry.lease_until > now
            if not holds and not self._is_excused(now):
                self.violate(f"{process.name} works on {claim.key} without a lease")
            beside = len(changes) > 1 or any(call.process is process for call in self._calls)
            if holds and entry is not None and entry.deaths is Level.ALONE and beside:
                self.violate(f"{claim.key} does not run alone")
        for call in self._calls:
            self._overlap(call, process, keys)
            for claim in call.claims if call.process is process else ():
                alone = entries.get(claim.key)
                if alone is not None and alone.token == claim.token and _must_be_alone(alone):
                    self.violate(f"{', '.join(keys)} begins beside {claim.key}, which has to run alone")
        call = RunningCall(process, keys, list(claims) if is_claimed else [], now)
        self._calls.append(call)
        if len(claims) > 1 and any(claim.attempts for claim in claims):
            self.violate(f"one of {', '.join(keys)} failed before, and takes others along")
        # A repair has begun when it reads the truth, before it writes; a change on probation, when it notes that.
        is_excused = any(claim.level is not Level.USUAL or claim.order is None for claim in claims)
        if world.was_told_to_stop(process) and not is_excused:
            self.violate(f"{process.name} begins to work though it was told to stop")
        # Repairs run beside the flow, in tasks of their own.
        if sum(one.process is process and not _is_repair(one) for one in self._calls) > world.settings.concurrency:
            self.violate(f"{process.name} runs more calls than its concurrency")
        if len(changes) > world.sink_batch_max:
            self.violate("a call carries more changes than the sink takes")
        return call

    def call_ended(self, call: RunningCall) -> None:
        if call in self._calls:
            self._calls.remove(call)
        ended = self._world.now()
        self._overdue.update(claim.token for claim in call.claims if ended > self._ends[claim.token])
        now = self._world.store_now()
        until = min((self._tokens[claim.token] for claim in call.claims), default=now)
        paused = self._world.paused_since(call.process, call.started)
        if now > until + 1e-6 and not paused and not self._is_excused(now):
            self.violate(f"a call on {', '.join(call.keys)} outlived its claim")

    def write(self, key: str, order: Order, deleted: bool) -> None:
        """A write was accepted by the sink."""
        entry = self._world.entries().get(key)
        is_excused = self._world.has_suspects and self._may_be_suspect(key, entry)
        newest, gone = self._written.get(key), self._deleted.get(key)
        self.note(
            f"sink holds {key} {_version(order)}{' deleted' if deleted else ''}{' (suspect)' if is_excused else ''}"
        )
        # The truth that a repair or an operator writes may be older than what was set aside: it counts from here.
        is_put_right = is_excused or order[1] == VERSION_MIN
        is_excused = is_put_right or self._world.is_zombie_write() or (key, order) in self.sent_too_late
        if not is_excused and newest is not None and order < newest:
            self.violate(f"{key}: {_version(order)} written after {_version(newest)}")
        if not is_excused and not deleted and gone is not None and order < gone:
            self.violate(f"{key}: {_version(order)} came back after its deletion at {_version(gone)}")
        self._applied[key, order] += 1
        if self._world.grade is Grade.ATOMIC and self._applied[key, order] > 1:
            self.violate(f"{key}: {_version(order)} applied twice")
        self._written[key] = order if is_put_right else max(order, newest or order)
        if deleted:
            self._deleted[key] = order if is_put_right else max(order, gone or order)
        elif is_put_right:
            self._deleted.pop(key, None)  # The truth is that the key is there: the deletion before it does not count.

    def _may_be_suspect(self, key: str, entry: Entry | None) -> bool:
        return (entry is not None and entry.suspicions > 0) or self._world.blackout.excuses(key)

    def repairing(self, change: Change[Any], claim: Claim) -> None:
        """A repair is about to write: not below what may be in the sink, while that can still be settled."""
        entry = self._world.entries().get(claim.key)
        if entry is None or entry.token != claim.token or entry.unknown is None:
            return
        if entry.unknown != self._unknown_at_claim.get(claim.token):
            return  # The journal of an outage arrived while the repair ran: the key stays suspect for another repair.
        if change.order < entry.unknown and self._world.store_now() < entry.unknown_until:
            self.violate(f"{claim.key} repaired to {_version(change.order)}, below {_version(entry.unknown)}")

    def repair_kills(self, key: str) -> None:
        self._repairs_killed[key] += 1
        if self._repairs_killed[key] > Level.ALONE + self._world.settings.crashes_max:
            self.violate(f"the repair of {key} kills one worker after another")

    # The source.

    def sent(self, key: str, rank: Order) -> None:
        """A message is in the queue now. A transaction that another process held open may have kept it out for long."""
        retention_s = self._world.settings.retention_s
        mark = self.committed.get(key)
        if retention_s is None or mark is None or rank >= mark:
            return
        if self._world.store_now() > self._committed_at[key] + retention_s:
            self.sent_too_late.add((key, rank))
            self.note(f"{key} {_version(rank)} is sent later than anything was to be")

    def purged(self, number: int) -> None:
        self._queued.discard(number)
        self.note(f"message {number} is taken out of the queue by hand")

    def has_ended(self, body: bytes) -> bool:
        """Something at or above it is committed, or it is a dead letter: it may be acked."""
        sent = self._world.sent_by_body[body]
        mark = self.committed.get(sent.key)
        if sent.malformed or body in self.letters.buried:
            return body in self.letters.buried
        return (mark is not None and mark >= sent.rank) or self._world.blackout.has_ended(sent.key, sent.rank)

    # After every step of a server.

    def look(self) -> None:
        """Compare with what was seen last: marks only grow, and whatever left the queue had ended."""
        if self._world.database.is_dirty:
            return  # It is looked at when the transaction has ended.
        for key, entry in self._world.entries().items():
            seen = self._marks.get(key)
            if entry.mark is None or entry.mark == seen:
                if seen is not None and entry.mark is None:
                    self.violate(f"{key}: its mark is gone")
                continue
            if seen is not None and is_unversioned(seen) != is_unversioned(entry.mark):
                self.violate(f"{key}: versioned and unversioned changes mix")
            if seen is not None and entry.mark < seen:
                self.violate(f"{key}: mark fell from {_version(seen)} to {_version(entry.mark)}")
            self._marks[key] = entry.mark
            self.committed[key] = max(entry.mark, self.committed.get(key, entry.mark))
            self._committed_at[key] = self._world.store_now()
            self.note(f"{key} committed at {_version(entry.mark)}")
        for key in self._marks.keys() - self._world.entries().keys():
            self.violate(f"{key}: its entry is gone")
            del self._marks[key]
        self.letters.look()
        self._look_at_queue()

    def tick(self) -> None:
        """Once a second: limits."""
        for name, consumer in self._world.consumers():
            lanes, now = consumer._lanes, consumer._pipeline.clock()
            if len(lanes) > lanes.capacity:
                self.violate(f"{name} holds {len(lanes)} deliveries, its limit is {lanes.capacity}")
            too_many = lanes.blocked(now) > lanes.capacity // 2 and not self._world.blackout.holds_up(name)
            self._blocked_ticks[name] = self._blocked_ticks[name] + 1 if too_many else 0
            # Giving back and receiving are two calls, each of which may be slow both ways.
            limit_s = BLOCKED_MAX_S * (2 if self._world.faults.rates.slow > SLOW_RATE else 1)
            if self._blocked_ticks[name] * TICK_S > limit_s:
                self.violate(f"{name}: blocked keys hold more than half of the prefetch")

    def process_fell(self, process: Process) -> None:
        """It was killed, or paused for so long that it seems so."""
        self._calls = [call for call in self._calls if call.process is not process or not process.is_dead]
        for key, entry in self._world.entries().items():
            if entry.owner == process.name and (order := _alone_with(entry)) is not None:
                self.deaths[key, order] += 1

    def transaction_cut(self, process: Process) -> None:
        """The claims of its handlers ended before they did, which counts as a try of each."""
        for key, entry in self._world.entries().items():
            if entry.owner == process.name and entry.tried is not None:
                self.tries[key, _raw(entry.tried)] += 1

    def _look_at_queue(self) -> None:
        queued = set(self._world.messages())
        for number in self._queued - queued:
            body = self._world.bodies[number]
            sent = self._world.sent_by_body[body]
            if self.has_ended(body):
                continue
            if sent.malformed:
                self.violate(f"malformed message {number} acked without a dead letter")
            else:
                self.violate(f"{sent.key} {sent.version} acked before anything at or above it was committed")
        self._queued = queued

    def _overlap(self, call: RunningCall, process: Process, keys: tuple[str, ...]) -> None:
        if call.process is process:
            same = set(call.keys) & set(keys)
        else:
            entries = self._world.entries()
            protected = self._world.grade is not Grade.PLAIN
            shared = set(call.keys) & set(keys)
            same = {key for key in shared if not (protected or self._may_be_suspect(key, entries.get(key)))}
        is_excused = self._is_excused(self._world.store_now()) or self._world.is_zombie_write()
        if same and not is_excused:
            self.violate(f"two calls at once on {', '.join(sorted(same))}")

    def _is_excused(self, now: float) -> bool:
        return now < self.excused_until


def _alone_with(entry: Entry) -> Order | None:
    """The order that the holder of a key runs alone, or None."""
    return _raw(entry.tried) if entry.deaths is Level.ALONE and entry.tried is not None else None


def _is_repair(call: RunningCall) -> bool:
    return any(claim.order is None for claim in call.claims)


def _must_be_alone(entry: Entry) -> bool:
    return entry.deaths is Level.ALONE and entry.phase is Phase.BEGUN


def _raw(order: Order) -> Order:
    """As the message says it, which knows nothing of eras."""
    return (0, *order[1:])


def _version(order: Order | None) -> str:
    return "-" if order is None else f"v{order[1]}"
