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
from keywise.core.limits import Debounce

LIVE_BEFORE_BULK = 8
"""After this many live changes in a row, a waiting bulk change goes next."""


class Ticket(msgspec.Struct, gc=False):
    """A change and the delivery that carried it. Sinks see only the change, sources only the delivery."""

    change: Change[Any]
    delivery: Delivery
    """Replaced when the message is redelivered, because an ack with an old receipt does nothing."""
    source: int = 0
    extended_at: float = 0.0


class State(enum.Enum):
    """The state of a lane."""

    READY = 1
    HELD = 2
    """It waits until `due`."""
    BUSY = 3
    """One of its changes is being processed."""
    ISOLATED = 4
    """The last holder of the key died: the next attempt must run with nothing beside it."""


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


SettledTicket = tuple[Ticket, Outcome]
SettledByOutcome = dict[Outcome, list[Ticket]]
"""The tickets that ended in one batch, by outcome."""


class Lanes:
    """All lanes of one consumer, within a capacity. Live lanes go before bulk lanes, but do not starve them."""

    def __init__(self, capacity: int, *, bulk: Collection[int] = (), debounce: Debounce | None = None) -> None:
        self.capacity = capacity
        self._bulk = bulk
        self._debounce = debounce
        self._lanes: dict[str, Lane] = {}
        self._tickets: dict[tuple[int, str | int], Ticket] = {}
        self._ready: deque[str] = deque()
        self._ready_bulk: deque[str] = deque()
        """Keys here and in `_ready` may be outdated: `take` skips those whose lane is in another state by now."""
        self._isolated: deque[str] = deque()
        self._due: list[tuple[float, str]] = []
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

    @property
    def has_isolated(self) -> bool:
        return bool(self._isolated)

    def tickets(self) -> list[Ticket]:
        """All tickets: waiting, held or being processed."""
        return list(self._tickets.values())

    def counts(self) -> tuple[int, int, int, int]:
        """How many deliveries are live, bulk, being processed, and held."""
        busy = sum(lane.state is State.BUSY for lane in self._lanes.values())
        held = sum(len(lane.waiting) for lane in self._lanes.values() if lane.state is State.HELD)
        return len(self._tickets) - self._bulk_tickets, self._bulk_tickets, busy, held

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Put tickets into their lanes. A redelivery of a message that is already here only updates its receipt."""
        known, lanes, is_simple = self._tickets, self._lanes, not self._bulk and self._debounce is None
        for ticket in tickets:
            identity, key = (ticket.source, ticket.delivery.id), ticket.change.key
            if identity in known:
                known[identity].delivery = ticket.delivery
                known[identity].extended_at = ticket.extended_at
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
            is_bulk = self._is_turn_of_bulk(bulk_left)
            line = self._ready_bulk if is_bulk else ready
            if not line:
                break
            lane = lanes.get(line.popleft())
            if lane is None or lane.state is not State.READY or lane.is_bulk is not is_bulk:
                continue  # Outdated: the lane was finished, held, or became live meanwhile.
            taken.append(self._start(lane))
            bulk_left -= is_bulk
            self._live_in_row = 0 if is_bulk else self._live_in_row + 1
        return taken

    def take_isolated(self) -> Ticket | None:
        """Take one change whose last holder died; None if there is none."""
        while self._isolated:
            lane = self._lanes.get(self._isolated.popleft())
            if lane is not None and lane.state is State.ISOLATED:
                return self._start(lane)
        return None

    def finish(self, ticket: Ticket, outcome: Outcome, upto: Order) -> list[SettledTicket]:
        """The key is committed up to an order: settle this change and all its followers at or below that order."""
        key = ticket.change.key
        lane = self._lanes[key]
        settled = [(ticket, outcome)]
        if not lane.waiting and not self._bulk_tickets:
            # The common case, without the general bookkeeping below.
            del self._lanes[key], self._tickets[ticket.source, ticket.delivery.id]
            return settled
        settled += ((other, outcome_of_follower(other, upto)) for other in lane.waiting if is_at_or_below(other, upto))
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

    def isolate(self, ticket: Ticket) -> None:
        """Put a taken change back into its lane; only `take_isolated` takes it from there."""
        lane = self._lanes[ticket.change.key]
        lane.waiting.append(ticket)
        lane.is_bulk = self._is_all_bulk(lane)
        lane.state = State.ISOLATED
        self._isolated.append(ticket.change.key)

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

    def evict_blocked(self) -> list[Ticket]:
        """Remove the waiting changes of blocked lanes that exceed half of the capacity, and return them.

        Bulk lanes may use only a quarter. Without this, a few blocked keys could fill the lanes, and healthy keys
        would wait for them.
        """
        leaving: list[Ticket] = []
        # A lane that has lost its live changes is a bulk lane: then there may be too many of those.
        while some := self._evict_excess():
            leaving += some
        return self._left(leaving)

    def _evict_excess(self) -> list[Ticket]:
        excess, bulk_excess = self._blocked() - self.capacity // 2, 0
        if self._bulk_tickets:
            bulk_excess = self._blocked(bulk_only=True) - self.capacity // 4
        if excess <= 0 and bulk_excess <= 0:
            return []
        leaving: list[Ticket] = []
        for key, lane in list(self._lanes.items()):
            if lane.state is State.READY:
                continue
            # Evict the oldest first: they will be stale when they come back, while the newest must be written.
            lane.waiting.sort(key=lambda ticket: ticket.change.order, reverse=True)
            while self._held_back(lane) and (excess > 0 or (lane.is_bulk and bulk_excess > 0)):
                leaving.append(lane.waiting.pop())
                excess, bulk_excess = excess - 1, bulk_excess - lane.is_bulk
            lane.is_bulk = self._is_all_bulk(lane)
            self._drop_if_empty(key, lane)
        return leaving

    def drain(self) -> list[Ticket]:
        """Remove all waiting changes and return them; those being processed stay."""
        leaving: list[Ticket] = []
        for key, lane in list(self._lanes.items()):
            leaving += lane.waiting
            lane.waiting = []
            self._drop_if_empty(key, lane)
        return self._left(leaving)

    def _is_turn_of_bulk(self, bulk_left: int) -> bool:
        if not self._ready_bulk or bulk_left <= 0:
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

    def _make_ready(self, key: str, lane: Lane) -> None:
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

    def _blocked(self, *, bulk_only: bool = False) -> int:
        """How many waiting changes of blocked lanes could be evicted: the sum of `_held_back`."""
        ready, held = State.READY, State.HELD
        # Inlined for speed: it runs before every receive, over perhaps thousands of lanes.
        return sum(
            len(lane.waiting) - (lane.is_gathering and lane.state is held)
            for lane in self._lanes.values()
            if lane.state is not ready and (lane.is_bulk or not bulk_only)
        )

    def _held_back(self, lane: Lane) -> int:
        """How many changes of a lane may be evicted.

        One change of a lane that is being debounced stays: an evicted one would start a new burst when it came back,
        and would be debounced again, for ever.
        """
        return len(lane.waiting) - (lane.is_gathering and lane.state is State.HELD)

    def _forget(self, settled: Sequence[SettledTicket]) -> None:
        for ticket, _ in settled:
            del self._tickets[ticket.source, ticket.delivery.id]
            if self._bulk_tickets and ticket.source in self._bulk:
                self._bulk_tickets -= 1

    def _left(self, tickets: list[Ticket]) -> list[Ticket]:
        self._forget([(ticket, Outcome.BUSY) for ticket in tickets])
        return tickets


def is_at_or_below(ticket: Ticket, upto: Order) -> bool:
    order = ticket.change.order
    return order <= upto and is_unversioned(order) == is_unversioned(upto)


def outcome_of_follower(ticket: Ticket, upto: Order) -> Outcome:
    return Outcome.DUPLICATE if ticket.change.order == upto else Outcome.SUPERSEDED
