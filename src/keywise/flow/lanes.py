"""The lanes of one consumer: one waiting line per key, from which the newest change is taken first.

Older changes of the key follow it and end with it. Nothing here awaits, reads a clock or does I/O:
each method decides, and the caller acts on its result.
"""

import enum
import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from keywise.core.change import Change, Delivery, Order, Outcome, is_unversioned
from keywise.core.entry import Level
from keywise.core.limits import Debounce
from keywise.flow.wakeup import Wakeup

LIVE_BEFORE_BULK = 8
"""After this many live changes in a row, a waiting bulk change goes next."""
BLOCKED_AFTER_S = 1.0
"""A lane is blocked once it has not been ready for this long. A lane that is at work for milliseconds is not."""


class Ticket(msgspec.Struct, gc=False):
    """A change and the delivery that carried it. Sinks see only the change, sources only the delivery."""

    change: Change[Any]
    delivery: Delivery
    """Replaced when the message is redelivered, because an ack with an old receipt does nothing."""
    source: int = 0
    extended_at: float = 0.0
    unanswered_at: float | None = None
    """When the first unanswered transaction with this change began. It may have stored a dead letter."""
    is_orphaned: bool = False
    """The source has given the message to another consumer, or is about to. A redelivery to this one ends that."""


class State(enum.Enum):
    """The state of a lane."""

    READY = 1
    HELD = 2
    """It waits until `due`."""
    BUSY = 3
    """One of its changes is being processed."""
    PROBATION = 4
    """A worker died with the key: its next change is claimed at a level, when there is a place for it."""


class Lane(msgspec.Struct, gc=False):
    """The waiting changes of one key."""

    waiting: list[Ticket]
    state: State = State.READY
    due: float = 0.0
    blocks_newer: bool = False
    """The lane is held for a reason that concerns the key (a pause, a rate limit), so newer changes wait as well."""
    is_gathering: bool = False
    """The lane is held by the debounce only."""
    is_bulk: bool = False
    """All its changes came from bulk sources."""
    first_at: float = math.inf
    """When the first change of the current burst arrived; infinite without a debounce."""
    last_at: float = 0.0
    level: Level = Level.USUAL
    """The level at which a lane on probation is claimed."""


SettledTicket = tuple[Ticket, Outcome]
SettledByOutcome = dict[Outcome, list[Ticket]]
"""The tickets that ended in one batch, by outcome."""


class Lanes:
    """All lanes of one consumer, within a capacity. Live lanes go before bulk lanes, but do not starve them."""

    def __init__(self, capacity: int, *, bulk: Collection[int] = (), debounce: Debounce | None = None) -> None:
        self.capacity = capacity
        self.arrivals = Wakeup()
        """Notified when the worker should look at the lanes again: a change has arrived, or may be taken."""
        self.departures = Wakeup()
        """Notified when there may be room for more deliveries, or fewer lanes are ready."""
        self._bulk = bulk
        self._debounce = debounce
        self._lanes: dict[str, Lane] = {}
        self._tickets: dict[tuple[int, str | int], Ticket] = {}
        self._ready: deque[str] = deque()
        self._ready_bulk: deque[str] = deque()
        """Keys here and in `_ready` may be outdated: `take` skips those whose lane is in another state by now."""
        self._probation: dict[Level, deque[str]] = {level: deque() for level in Level}
        """The keys on probation by their level; like `_ready`, it may be outdated."""
        self._due: list[tuple[float, str]] = []
        self._unready: dict[str, float] = {}
        """When each key was first taken, or began its debounce, since one of its changes last ended."""
        self._evicted: set[str] = set()
        """Keys of lanes from which changes were evicted; their sources hold these changes back."""
        self._freed: list[str] = []
        self.freed = Wakeup()
        """Notified when `take_freed` has keys to return."""
        self._live_in_row = 0
        self._bulk_tickets = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def room(self) -> int:
        return max(0, self.capacity - len(self._tickets))

    def room_for(self, source: int) -> int:
        """How many more deliveries of a source fit in.

        Bulk sources may use half of the capacity. Live sources leave an eighth of it to bulk, so that neither
        waits for the other.
        """
        if source in self._bulk:
            return max(0, min(self.room, max(1, self.capacity // 2) - self._bulk_tickets))
        if not self._bulk or self.capacity == 1:
            return self.room
        kept_free = max(1, self.capacity // LIVE_BEFORE_BULK) - self._bulk_tickets
        return max(0, self.room - max(0, kept_free))

    def ready_for(self, source: int) -> int:
        """How many lanes may be taken before a delivery of this source that arrives now, or a few less."""
        return len(self._ready) + (len(self._ready_bulk) if source in self._bulk else 0)

    def has_waiting(self, now: float) -> bool:
        """Whether a change waits that could be taken now, besides those that have to run alone."""
        self._wake(now)
        for line, is_bulk in ((self._ready, False), (self._ready_bulk, True)):
            while line and not self._is_ready(line[0], is_bulk=is_bulk):
                line.popleft()
            if line:
                return True
        return self.has_on_probation(Level.PROBATION) or self.has_on_probation(Level.SOLE)

    def has_on_probation(self, level: Level) -> bool:
        line = self._probation[level]
        while line and not self._is_on_probation(line[0], level):
            line.popleft()
        return bool(line)

    def tickets(self) -> list[Ticket]:
        """All tickets: waiting, held or being processed."""
        return list(self._tickets.values())

    def counts(self) -> tuple[int, int, int, int]:
        """How many deliveries are live, bulk, being processed, and held."""
        busy = sum(lane.state is State.BUSY for lane in self._lanes.values())
        held = sum(len(lane.waiting) for lane in self._lanes.values() if lane.state is State.HELD)
        return len(self._tickets) - self._bulk_tickets, self._bulk_tickets, busy, held

    def busy_keys(self) -> list[str]:
        """Return the keys whose changes are being processed."""
        return [key for key, lane in self._lanes.items() if lane.state is State.BUSY]

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Put tickets into their lanes. A redelivery of a message that is already here only updates its receipt."""
        known, lanes, is_simple = self._tickets, self._lanes, not self._bulk and self._debounce is None
        for ticket in tickets:
            identity, key = (ticket.source, ticket.delivery.id), ticket.change.key
            if identity in known:
                known[identity].delivery = ticket.delivery
                known[identity].extended_at = ticket.extended_at
                known[identity].is_orphaned = False
                continue
            known[identity] = ticket
            if key in lanes:
                self._join(ticket, lanes[key])
            elif is_simple:
                lanes[key] = Lane([ticket])
                self._ready.append(key)
            else:
                # BUSY keeps `_join` from scheduling the empty lane; `_go_on` then makes it ready, or holds it
                # for the debounce. It counts as bulk until a live ticket joins.
                lanes[key] = lane = Lane([], State.BUSY, is_bulk=True)
                self._join(ticket, lane)
                self._go_on(key, lane)

    def take(self, limit: int, now: float, bulk_limit: int | None = None) -> list[Ticket]:
        """Take the newest change of each ready lane, never two of one key; lanes that have waited longest go first."""
        self._wake(now)
        taken: list[Ticket] = []
        ready, lanes, bulk_left = self._ready, self._lanes, limit if bulk_limit is None else bulk_limit
        while len(taken) < limit:
            is_bulk = bool(self._ready_bulk) and self._is_turn_of_bulk(bulk_left)
            line = self._ready_bulk if is_bulk else ready
            if not line:
                break
            key = line.popleft()
            lane = lanes.get(key)
            if lane is None or lane.state is not State.READY or lane.is_bulk is not is_bulk:
                continue  # Outdated: the lane was finished, held, or became live meanwhile.
            # Keep the first time: a key whose claim is refused twice a second must count as blocked too.
            self._unready.setdefault(key, now)
            taken.append(self._start(lane))
            bulk_left -= is_bulk
            self._live_in_row = 0 if is_bulk else self._live_in_row + 1
        if taken:
            self.departures.notify()  # A source may wait until fewer lanes are ready.
        return taken

    def take_on_probation(self, level: Level, limit: int = 1) -> list[Ticket]:
        """Take the newest changes of keys that wait at a level, at most so many."""
        taken: list[Ticket] = []
        while len(taken) < limit and self.has_on_probation(level):
            taken.append(self._start(self._lanes[self._probation[level].popleft()]))
        return taken

    def finish(self, ticket: Ticket, outcome: Outcome, upto: Order) -> list[SettledTicket]:
        """The key is committed up to an order: settle this change and all its followers at or below that order.

        The order of a removed row is above it.
        """
        key = ticket.change.key
        lane = self._lanes[key]
        self._note_end(key)
        settled = [(ticket, outcome)]
        if not lane.waiting and not self._bulk_tickets:
            # The common case, without the general bookkeeping below.
            del self._lanes[key], self._tickets[ticket.source, ticket.delivery.id]
            return settled
        ended = [other for other in lane.waiting if is_at_or_below(other, upto)]
        settled += ((other, outcome_of_follower(other, upto, outcome)) for other in ended)
        lane.waiting = [other for other in lane.waiting if not is_at_or_below(other, upto)]
        self._forget(settled)
        self._free(key, lane)
        return settled

    def dead_letter(self, ticket: Ticket) -> list[SettledTicket]:
        """Settle only this change, as dead; the next newest change of its lane may be taken."""
        self.leave(ticket)
        return [(ticket, Outcome.DEAD)]

    def leave(self, ticket: Ticket) -> None:
        """Remove a taken change that goes back to its source; the next newest change of its lane may be taken."""
        self._note_end(ticket.change.key)
        self._forget([(ticket, Outcome.BUSY)])
        self._free(ticket.change.key, self._lanes[ticket.change.key])

    def hold(self, ticket: Ticket, due: float, *, blocks_newer: bool = False) -> None:
        """Put a taken change back into its lane, and hold the lane until `due`.

        A newer change of the key ends the hold, unless `blocks_newer` is set.
        """
        key, lane = ticket.change.key, self._lanes[ticket.change.key]
        overtaken = any(other.change.order > ticket.change.order for other in lane.waiting)
        lane.waiting.append(ticket)
        lane.is_bulk = self._is_all_bulk(lane)
        if overtaken and not blocks_newer:
            # A newer change arrived while this one was processed, and the reason to wait does not concern it.
            self._go_on(key, lane)
            return
        self._hold(key, lane, due, blocks_newer)

    def put_on_probation(self, ticket: Ticket, level: Level) -> None:
        """Put a taken change back into its lane; only `take_on_probation` takes it from there."""
        lane = self._lanes[ticket.change.key]
        lane.waiting.append(ticket)
        lane.is_bulk = self._is_all_bulk(lane)
        lane.state, lane.level = State.PROBATION, level
        self._probation[level].append(ticket.change.key)

    def next_due(self) -> float | None:
        """When the next held lane becomes ready; None if no lane is held."""
        # The heap is cleaned lazily: an entry of a lane that was released or rescheduled is corrected here.
        while self._due:
            due, key = self._due[0]
            lane = self._lanes.get(key)
            if lane is None or lane.state is not State.HELD or lane.due < due:
                heapq.heappop(self._due)
            elif lane.due > due:
                # The lane was held again meanwhile, until later.
                heapq.heapreplace(self._due, (lane.due, key))
            else:
                return due
        return None

    def blocked(self, now: float) -> int:
        """How many waiting changes of blocked lanes could be evicted."""
        return sum(_held_back(lane) for _, lane in self._blocked(now))

    def next_blocked(self, now: float) -> float | None:
        """When another lane becomes blocked, unless it is ready by then; None if no lane waits."""
        return min((due for since in self._unready.values() if (due := since + BLOCKED_AFTER_S) > now), default=None)

    def evict_blocked(self, now: float) -> list[Ticket]:
        """Remove the waiting changes of blocked lanes that exceed half of the capacity, and return them.

        Bulk lanes may use only a quarter. Without this, a few blocked keys could fill the lanes, and healthy keys
        would wait for them.
        """
        half, quarter = self.capacity // 2, self.capacity // 4
        if len(self._tickets) <= (quarter if self._bulk_tickets else half):
            return []
        blocked = self._blocked(now)
        every = [lane for _, lane in blocked]
        leaving = self._shed_bulk(every, quarter)
        leaving += _shed(every, sum(map(_held_back, every)) - half)
        leaving += self._shed_bulk(every, quarter)  # A lane whose live changes have left is a bulk lane now.
        self._evicted.update(ticket.change.key for ticket in leaving)
        for key, lane in blocked if leaving else ():
            self._drop_if_empty(key, lane)
        return self._left(leaving)

    def _shed_bulk(self, lanes: Sequence[Lane], room: int) -> list[Ticket]:
        if not self._bulk_tickets:
            return []
        for lane in lanes:
            lane.is_bulk = self._is_all_bulk(lane)
        bulk = [lane for lane in lanes if lane.is_bulk]
        return _shed(bulk, sum(map(_held_back, bulk)) - room)

    def take_freed(self) -> list[str]:
        """Return the keys whose evicted changes may come back now, because a change of theirs has ended."""
        freed, self._freed = self._freed, []
        return freed

    def drain(self) -> list[Ticket]:
        """Remove all waiting changes and return them; those being processed stay."""
        leaving: list[Ticket] = []
        # No lane of this consumer will notice when these keys are free, so their changes may come back now.
        self._freed += self._evicted
        self._evicted.clear()
        for key, lane in list(self._lanes.items()):
            leaving += lane.waiting
            lane.waiting = []
            self._drop_if_empty(key, lane)
        return self._left(leaving)

    def _is_ready(self, key: str, *, is_bulk: bool) -> bool:
        lane = self._lanes.get(key)
        return lane is not None and lane.state is State.READY and lane.is_bulk is is_bulk

    def _is_on_probation(self, key: str, level: Level) -> bool:
        lane = self._lanes.get(key)
        return lane is not None and lane.state is State.PROBATION and lane.level is level

    def _is_turn_of_bulk(self, bulk_left: int) -> bool:
        if bulk_left <= 0:
            return False
        return not self._ready or self._live_in_row >= LIVE_BEFORE_BULK

    def _join(self, ticket: Ticket, lane: Lane) -> None:
        key, is_bulk = ticket.change.key, ticket.source in self._bulk
        self._bulk_tickets += is_bulk
        lane.waiting.append(ticket)
        if self._debounce is not None:
            # A ticket is created when its delivery is read, so `extended_at` is still the time of arrival.
            lane.first_at = min(lane.first_at, ticket.extended_at)
            lane.last_at = ticket.extended_at
        if lane.is_bulk and not is_bulk:
            lane.is_bulk = False
            if lane.state is State.READY:
                self._ready.append(key)
        newest = all(ticket.change.order >= other.change.order for other in lane.waiting)
        if lane.state is State.HELD and newest and not lane.blocks_newer:
            # The lane is held for the retry of an older change; the newer one need not wait for it.
            self._go_on(key, lane)

    def _start(self, lane: Lane) -> Ticket:
        lane.state, lane.first_at = State.BUSY, math.inf
        waiting = lane.waiting
        if len(waiting) == 1:
            return waiting.pop()
        newest = max(range(len(waiting)), key=lambda index: waiting[index].change.order)
        return waiting.pop(newest)

    def _wake(self, now: float) -> None:
        while (due := self.next_due()) is not None and due <= now:
            _, key = heapq.heappop(self._due)
            self._make_ready(key, self._lanes[key])

    def _free(self, key: str, lane: Lane) -> None:
        if not lane.waiting:
            del self._lanes[key]
            return
        lane.is_bulk = self._is_all_bulk(lane)
        self._go_on(key, lane)

    def _is_all_bulk(self, lane: Lane) -> bool:
        """Live changes may have been evicted or drained from a lane while a bulk one was processed."""
        return bool(self._bulk) and all(ticket.source in self._bulk for ticket in lane.waiting)

    def _go_on(self, key: str, lane: Lane) -> None:
        """Make the lane ready, or hold it for the debounce if it has changes of a new burst."""
        if self._debounce is None or lane.first_at == math.inf:
            self._make_ready(key, lane)
        else:
            self._hold(key, lane, self._debounce.due(lane.first_at, lane.last_at), blocks_newer=False)
            lane.is_gathering = True
            self._unready.setdefault(key, lane.first_at)

    def _make_ready(self, key: str, lane: Lane) -> None:
        if lane.is_gathering and lane.state is State.HELD:
            # The debounce is over. It was no sign of trouble, so the time that it took does not count.
            self._unready.pop(key, None)
        lane.state = State.READY
        (self._ready_bulk if lane.is_bulk else self._ready).append(key)

    def _hold(self, key: str, lane: Lane, due: float, blocks_newer: bool) -> None:
        # A hold that only moves to a later time needs no second heap entry: `next_due` corrects the first.
        if lane.state is not State.HELD or due < lane.due:
            heapq.heappush(self._due, (due, key))
        lane.state, lane.due, lane.blocks_newer, lane.is_gathering = State.HELD, due, blocks_newer, False

    def _drop_if_empty(self, key: str, lane: Lane) -> None:
        if not lane.waiting and lane.state is not State.BUSY:
            del self._lanes[key]
            self._unready.pop(key, None)
            self._evicted.discard(key)

    def _note_end(self, key: str) -> None:
        """A change of the key has ended, so the key is not blocked, and its evicted changes may come back."""
        self._unready.pop(key, None)
        if self._evicted and key in self._evicted:
            self._evicted.discard(key)
            self._freed.append(key)
            self.freed.notify()

    def _blocked(self, now: float) -> list[tuple[str, Lane]]:
        """Lanes not ready for at least `BLOCKED_AFTER_S`, or held for at least as much longer."""
        lanes, ready, held = self._lanes, State.READY, State.HELD
        before, after = now - BLOCKED_AFTER_S, now + BLOCKED_AFTER_S
        return [
            (key, lane)
            for key, since in self._unready.items()
            if (lane := lanes[key]).state is not ready
            and (since <= before or (lane.state is held and lane.due >= after))
        ]

    def _forget(self, settled: Sequence[SettledTicket]) -> None:
        for ticket, _ in settled:
            del self._tickets[ticket.source, ticket.delivery.id]
            if self._bulk_tickets and ticket.source in self._bulk:
                self._bulk_tickets -= 1

    def _left(self, tickets: list[Ticket]) -> list[Ticket]:
        self._forget([(ticket, Outcome.BUSY) for ticket in tickets])
        return tickets


def _held_back(lane: Lane) -> int:
    """How many changes of a lane may be evicted.

    One change of a lane that is being debounced stays: an evicted one would start a new burst when it came back,
    and would be debounced again, for ever.
    """
    return len(lane.waiting) - (lane.is_gathering and lane.state is State.HELD)


def _shed(lanes: Sequence[Lane], excess: int) -> list[Ticket]:
    """Remove so many changes from blocked lanes: the oldest first, the newest of a lane only if nothing else is left.

    Older changes will be stale when they come back, while the newest must be written. A lane that keeps its newest
    change also notices soon when its key is free.
    """
    leaving: list[Ticket] = []
    if excess <= 0:
        return leaving
    for lane in lanes:
        lane.waiting.sort(key=lambda ticket: ticket.change.order, reverse=True)
    for kept in (1, 0):
        for lane in lanes:
            while _held_back(lane) > kept and len(leaving) < excess:
                leaving.append(lane.waiting.pop())
    return leaving


def is_at_or_below(ticket: Ticket, upto: Order) -> bool:
    order = ticket.change.order
    return order <= upto and is_unversioned(order) == is_unversioned(upto)


def outcome_of_follower(ticket: Ticket, upto: Order, survivor: Outcome) -> Outcome:
    """Return how a follower ends. If the mark refused its survivor, nothing was committed while the follower waited."""
    if ticket.change.order == upto:
        return Outcome.DUPLICATE
    is_refused = survivor in (Outcome.STALE, Outcome.DUPLICATE, Outcome.REMOVED)
    return Outcome.STALE if is_refused else Outcome.SUPERSEDED
