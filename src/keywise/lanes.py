"""The waiting lines of one consumer: one lane per key, the newest change first, older ones follow it.

Nothing here awaits, reads a clock or talks to anybody: the consumer asks what to do, and then does it.
"""

import enum
import heapq
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from keywise.change import Change, Delivery, Order, Outcome, is_unversioned


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
    ALONE = 4
    """Its last holder died: the next try must have nothing beside it."""


class Lane(msgspec.Struct, gc=False):
    """The changes of one key that wait here."""

    waiting: list[Ticket]
    state: State = State.READY
    due: float = 0.0


Ended = tuple[Ticket, Outcome]
Endings = dict[Outcome, list[Ticket]]
"""Everything that ended in one batch, by outcome."""


class Lanes:
    """All lanes of one consumer, within a capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lanes: dict[str, Lane] = {}
        self._tickets: dict[tuple[int, str | int], Ticket] = {}
        self._ready: deque[str] = deque()
        self._alone: deque[str] = deque()
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def room(self) -> int:
        return max(0, self.capacity - len(self._tickets))

    @property
    def has_alone(self) -> bool:
        return bool(self._alone)

    def tickets(self) -> list[Ticket]:
        """Everything that is held, worked on or waiting."""
        return list(self._tickets.values())

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Join the lanes. A message that is here already only brings its newer receipt."""
        known, lanes = self._tickets, self._lanes
        for ticket in tickets:
            identity, key = (ticket.source, ticket.delivery.id), ticket.change.key
            if identity in known:
                known[identity].delivery = ticket.delivery
                known[identity].extended_at = ticket.extended_at
                continue
            known[identity] = ticket
            if key in lanes:
                self._join(ticket, lanes[key])
            else:
                lanes[key] = Lane([ticket])
                self._ready.append(key)

    def take(self, limit: int, now: float) -> list[Ticket]:
        """The newest change of each ready lane, longest-waiting lanes first: never two of one key."""
        self._wake(now)
        taken: list[Ticket] = []
        ready, lanes = self._ready, self._lanes
        while ready and len(taken) < limit:
            lane = lanes[ready.popleft()]
            if lane.state is State.READY:
                taken.append(self._start(lane))
        return taken

    def take_alone(self) -> Ticket | None:
        """One change whose last holder died."""
        while self._alone:
            lane = self._lanes.get(self._alone.popleft())
            if lane is not None and lane.state is State.ALONE:
                return self._start(lane)
        return None

    def finish(self, ticket: Ticket, outcome: Outcome, upto: Order) -> list[Ended]:
        """The key is committed up to an order: this change and all its followers at or below it have ended."""
        key = ticket.change.key
        lane = self._lanes[key]
        if not lane.waiting:
            del self._lanes[key], self._tickets[ticket.source, ticket.delivery.id]
            return [(ticket, outcome)]
        ended = [(ticket, outcome)]
        ended += ((other, _follower(other, upto)) for other in lane.waiting if _is_at_or_below(other, upto))
        lane.waiting = [other for other in lane.waiting if not _is_at_or_below(other, upto)]
        self._forget(ended)
        self._free(key, lane)
        return ended

    def bury(self, ticket: Ticket) -> list[Ended]:
        """Only this change has ended; the next newest of its lane has its turn."""
        ended = [(ticket, Outcome.DEAD)]
        self._forget(ended)
        self._free(ticket.change.key, self._lanes[ticket.change.key])
        return ended

    def hold(self, ticket: Ticket, due: float) -> None:
        """The change goes back to its lane, and the lane waits."""
        key, lane = ticket.change.key, self._lanes[ticket.change.key]
        overtaken = any(other.change.order > ticket.change.order for other in lane.waiting)
        lane.waiting.append(ticket)
        if overtaken:
            # Something newer joined meanwhile, and the reason to wait does not concern it.
            lane.state = State.READY
            self._ready.append(key)
            return
        lane.state, lane.due = State.HELD, due
        heapq.heappush(self._due, (due, key))

    def quarantine(self, ticket: Ticket) -> None:
        """The change goes back to its lane, to be taken alone."""
        lane = self._lanes[ticket.change.key]
        lane.waiting.append(ticket)
        lane.state = State.ALONE
        self._alone.append(ticket.change.key)

    def next_due(self) -> float | None:
        """When the first held lane may go on; None if none is held."""
        while self._due:
            due, key = self._due[0]
            lane = self._lanes.get(key)
            if lane is not None and lane.state is State.HELD and lane.due == due:
                return due
            heapq.heappop(self._due)
        return None

    def surplus(self) -> list[Ticket]:
        """Waiting changes above half of the capacity that a blocked key may use; they leave the lanes."""
        excess = self._blocked() - self.capacity // 2
        leaving: list[Ticket] = []
        for key, lane in list(self._lanes.items()):
            if lane.state is State.READY:
                continue
            while lane.waiting and len(leaving) < excess:
                leaving.append(lane.waiting.pop())
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

    def _join(self, ticket: Ticket, lane: Lane) -> None:
        lane.waiting.append(ticket)
        newest = all(ticket.change.order >= other.change.order for other in lane.waiting)
        if lane.state is State.HELD and newest:
            # What the lane waits for belongs to an older change.
            lane.state = State.READY
            self._ready.append(ticket.change.key)

    def _start(self, lane: Lane) -> Ticket:
        lane.state = State.BUSY
        waiting = lane.waiting
        if len(waiting) == 1:
            return waiting.pop()
        newest = max(range(len(waiting)), key=lambda index: waiting[index].change.order)
        return waiting.pop(newest)

    def _wake(self, now: float) -> None:
        while (due := self.next_due()) is not None and due <= now:
            _, key = heapq.heappop(self._due)
            self._lanes[key].state = State.READY
            self._ready.append(key)

    def _free(self, key: str, lane: Lane) -> None:
        if lane.waiting:
            lane.state = State.READY
            self._ready.append(key)
        else:
            del self._lanes[key]

    def _drop_if_empty(self, key: str, lane: Lane) -> None:
        if not lane.waiting and lane.state is not State.BUSY:
            # A name left in the ready line would meet no lane, so a ready lane is taken out of it too.
            del self._lanes[key]
            if lane.state is State.READY:
                self._ready.remove(key)

    def _blocked(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values() if lane.state is not State.READY)

    def _forget(self, ended: Sequence[Ended]) -> None:
        for ticket, _ in ended:
            del self._tickets[ticket.source, ticket.delivery.id]

    def _left(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            del self._tickets[ticket.source, ticket.delivery.id]
        return tickets


class Fold(msgspec.Struct):
    """A batch with one change per key, and who follows whom."""

    survivors: list[Ticket]
    followers: dict[str, list[Ticket]]
    upto: dict[str, Order] = {}
    """The order of the survivor, for each key with followers."""

    def followed(self, apart: Container[str]) -> Iterator[Ended]:
        """What ends together with the survivors that were committed: all but those of some keys."""
        for key, others in self.followers.items():
            if key not in apart:
                upto = self.upto[key]
                yield from ((other, _follower(other, upto)) for other in others)


def fold(tickets: Sequence[Ticket]) -> Fold:
    """The newest change of each key, for a batch that waits for nothing."""
    newest: dict[str, Ticket] = {}
    followers: dict[str, list[Ticket]] = {}
    for ticket in tickets:
        change = ticket.change
        known = newest.setdefault(change.key, ticket)
        if known is ticket:
            continue
        older = ticket
        if change.order > known.change.order:
            newest[change.key], older = ticket, known
        followers.setdefault(change.key, []).append(older)
    upto = {key: newest[key].change.order for key in followers}
    for key, tickets_of_key in followers.items():
        # A change that cannot be compared with the survivor follows nobody; it stays for the next batch.
        followers[key] = [ticket for ticket in tickets_of_key if _is_at_or_below(ticket, upto[key])]
    return Fold(list(newest.values()), followers, upto)


def grouped(ended: Iterable[Ended]) -> Endings:
    """What ended, by outcome."""
    endings: Endings = {}
    for ticket, outcome in ended:
        endings.setdefault(outcome, []).append(ticket)
    return endings


def _is_at_or_below(ticket: Ticket, upto: Order) -> bool:
    order = ticket.change.order
    return order <= upto and is_unversioned(order) == is_unversioned(upto)


def _follower(ticket: Ticket, upto: Order) -> Outcome:
    return Outcome.DUPLICATE if ticket.change.order == upto else Outcome.SUPERSEDED
