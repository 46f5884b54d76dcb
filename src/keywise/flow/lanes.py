"""The waiting lines of one consumer: one lane per key, the newest change first, older ones follow it.

Nothing here awaits, reads a clock or talks to anybody: the consumer asks what to do, and then does it.
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
"""So many live changes go before a bulk one that waits as well."""


class Ticket(msgspec.Struct, gc=False):
    """A change and the delivery that carried it; only the consumer sees both."""

    change: Change[Any]
    delivery: Delivery
    """Replaced when the message comes again: an ack with an old receipt does nothing."""
    source: int = 0
    extended_at: float = 0.0


class State(enum.Enum):
    """Where a lane stands."""

    READY = 1
    HELD = 2
    """Not before `due`."""
    BUSY = 3
    """One of its changes is being worked on."""
    ISOLATED = 4
    """Its last holder died: the next try must have nothing beside it."""


class Lane(msgspec.Struct, gc=False):
    """The changes of one key that wait here."""

    waiting: list[Ticket]
    state: State = State.READY
    due: float = 0.0
    blocks_newer: bool = False
    """What it is held for concerns the key, so that a newer change has to wait as well."""
    is_gathering: bool = False
    """It is held for the rest of a burst, and soon goes on by itself."""
    is_bulk: bool = False
    """Nothing of it came from a live source."""
    first_at: float = math.inf
    """When the first change arrived that is gathered, if bursts are gathered."""
    last_at: float = 0.0


SettledTicket = tuple[Ticket, Outcome]
SettledByOutcome = dict[Outcome, list[Ticket]]
"""Everything that ended in one batch, by outcome."""


class Lanes:
    """All lanes of one consumer, within a capacity; live lanes go before bulk lanes, but not for ever."""

    def __init__(self, capacity: int, *, bulk: Collection[int] = (), debounce: Debounce | None = None) -> None:
        self.capacity = capacity
        self._bulk = bulk
        self._debounce = debounce
        self._lanes: dict[str, Lane] = {}
        self._tickets: dict[tuple[int, str | int], Ticket] = {}
        self._ready: deque[str] = deque()
        self._ready_bulk: deque[str] = deque()
        """Names here and in the other line may be outdated; the lane itself knows."""
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
        """How many deliveries of a source find room. Bulk leaves half of it to live ones, and those a part to bulk."""
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
        """Everything that is held, worked on or waiting."""
        return list(self._tickets.values())

    def counts(self) -> tuple[int, int, int, int]:
        """How many deliveries are live, bulk, worked on, and held."""
        busy = sum(lane.state is State.BUSY for lane in self._lanes.values())
        held = sum(len(lane.waiting) for lane in self._lanes.values() if lane.state is State.HELD)
        return len(self._tickets) - self._bulk_tickets, self._bulk_tickets, busy, held

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Join the lanes. A message that is here already only brings its newer receipt."""
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
                lanes[key] = lane = Lane([], State.BUSY, is_bulk=True)
                self._join(ticket, lane)
                self._go_on(key, lane)

    def take(self, limit: int, now: float, bulk_limit: int | None = None) -> list[Ticket]:
        """The newest change of each ready lane, longest-waiting lanes first: never two of one key."""
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
                continue
            taken.append(self._start(lane))
            bulk_left -= is_bulk
            self._live_in_row = 0 if is_bulk else self._live_in_row + 1
        return taken

    def take_isolated(self) -> Ticket | None:
        """One change whose last holder died."""
        while self._isolated:
            lane = self._lanes.get(self._isolated.popleft())
            if lane is not None and lane.state is State.ISOLATED:
                return self._start(lane)
        return None

    def finish(self, ticket: Ticket, outcome: Outcome, upto: Order) -> list[SettledTicket]:
        """The key is committed up to an order: this change and all its followers at or below it have ended."""
        key = ticket.change.key
        lane = self._lanes[key]
        settled = [(ticket, outcome)]
        if not lane.waiting and not self._bulk_tickets:
            del self._lanes[key], self._tickets[ticket.source, ticket.delivery.id]
            return settled
        settled += ((other, outcome_of_follower(other, upto)) for other in lane.waiting if is_at_or_below(other, upto))
        lane.waiting = [other for other in lane.waiting if not is_at_or_below(other, upto)]
        self._forget(settled)
        self._free(key, lane)
        return settled

    def dead_letter(self, ticket: Ticket) -> list[SettledTicket]:
        """Only this change has ended; the next newest of its lane has its turn."""
        self.leave(ticket)
        return [(ticket, Outcome.DEAD)]

    def leave(self, ticket: Ticket) -> None:
        """A change that was taken goes away for now; the next newest of its lane has its turn."""
        self._forget([(ticket, Outcome.BUSY)])
        self._free(ticket.change.key, self._lanes[ticket.change.key])

    def hold(self, ticket: Ticket, due: float, *, blocks_newer: bool = False) -> None:
        """The change goes back to its lane, and the lane waits; one that blocks newer changes is for them too."""
        key, lane = ticket.change.key, self._lanes[ticket.change.key]
        overtaken = any(other.change.order > ticket.change.order for other in lane.waiting)
        lane.waiting.append(ticket)
        if overtaken and not blocks_newer:
            # Something newer joined meanwhile, and the reason to wait does not concern it.
            self._go_on(key, lane)
            return
        self._hold(key, lane, due, blocks_newer)

    def isolate(self, ticket: Ticket) -> None:
        """The change goes back to its lane, to be taken alone."""
        lane = self._lanes[ticket.change.key]
        lane.waiting.append(ticket)
        lane.state = State.ISOLATED
        self._isolated.append(ticket.change.key)

    def next_due(self) -> float | None:
        """When the first held lane may go on; None if none is held."""
        while self._due:
            due, key = self._due[0]
            lane = self._lanes.get(key)
            if lane is None or lane.state is not State.HELD or lane.due < due:
                heapq.heappop(self._due)
            elif lane.due > due:
                # It was put off meanwhile.
                heapq.heapreplace(self._due, (lane.due, key))
            else:
                return due
        return None

    def evict_blocked(self) -> list[Ticket]:
        """Waiting changes above half of the room that blocked keys may use; they leave the lanes."""
        excess, bulk_excess = self._blocked() - self.capacity // 2, 0
        if self._bulk_tickets:
            bulk_excess = self._blocked(bulk_only=True) - self.capacity // 4
        if excess <= 0 and bulk_excess <= 0:
            return []
        leaving: list[Ticket] = []
        for key, lane in list(self._lanes.items()):
            if lane.state is State.READY:
                continue
            # The oldest leave: they come back stale, while the newest would be a write of its own.
            lane.waiting.sort(key=lambda ticket: ticket.change.order, reverse=True)
            while self._held_back(lane) and (excess > 0 or (lane.is_bulk and bulk_excess > 0)):
                leaving.append(lane.waiting.pop())
                excess, bulk_excess = excess - 1, bulk_excess - lane.is_bulk
            self._drop_if_empty(key, lane)
        return self._left(leaving)

    def drain(self) -> list[Ticket]:
        """All waiting changes leave the lanes; what is worked on stays."""
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
            # When the delivery was read is when it arrived here.
            lane.first_at = min(lane.first_at, ticket.extended_at)
            lane.last_at = ticket.extended_at
        if lane.is_bulk and not is_bulk:
            lane.is_bulk = False
            if lane.state is State.READY:
                self._ready.append(key)
        newest = all(ticket.change.order >= other.change.order for other in lane.waiting)
        if lane.state is State.HELD and newest and not lane.blocks_newer:
            # What the lane waits for belongs to an older change.
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
        lane.is_bulk = bool(self._bulk) and all(ticket.source in self._bulk for ticket in lane.waiting)
        self._go_on(key, lane)

    def _go_on(self, key: str, lane: Lane) -> None:
        """Nothing stands in the way of the newest change any more, but more of a burst may be gathered."""
        if self._debounce is None or lane.first_at == math.inf:
            self._make_ready(key, lane)
        else:
            self._hold(key, lane, self._debounce.due(lane.first_at, lane.last_at), blocks_newer=False)
            lane.is_gathering = True

    def _make_ready(self, key: str, lane: Lane) -> None:
        lane.state = State.READY
        (self._ready_bulk if lane.is_bulk else self._ready).append(key)

    def _hold(self, key: str, lane: Lane, due: float, blocks_newer: bool) -> None:
        if lane.state is not State.HELD or due < lane.due:
            heapq.heappush(self._due, (due, key))
        lane.state, lane.due, lane.blocks_newer, lane.is_gathering = State.HELD, due, blocks_newer, False

    def _drop_if_empty(self, key: str, lane: Lane) -> None:
        if not lane.waiting and lane.state is not State.BUSY:
            del self._lanes[key]

    def _blocked(self, *, bulk_only: bool = False) -> int:
        ready, held = State.READY, State.HELD
        # Every receive asks, and there may be thousands of lanes.
        return sum(
            len(lane.waiting) - (lane.is_gathering and lane.state is held)
            for lane in self._lanes.values()
            if lane.state is not ready and (lane.is_bulk or not bulk_only)
        )

    def _held_back(self, lane: Lane) -> int:
        """How many of a lane stand in the way of others. The newest of a burst does not: if it left, it would
        be gathered anew when it came back, and so for ever."""
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
