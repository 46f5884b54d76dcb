"""Watches what simulated workers do with the messages that they hold: hide them, ack them, give them back."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Delivery
from keywise.core.rules import PAUSE_LOOK_S
from keywise.flow.lanes import BLOCKED_AFTER_S
from keywise.testing.virtual_loop import Process

if TYPE_CHECKING:
    from keywise.testing.simulator.world import World

Receipt = str | int


class DeliveryAudit:
    """Who has received which message, and when it was last asked for to stay hidden."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._receipts: dict[tuple[str, Receipt], tuple[object, float]] = {}
        """The newest one of each message that a worker has, and when it came."""
        self._held: dict[str, dict[Receipt, float]] = {}
        self._handed: dict[Process, set[Receipt]] = {}
        self._extending: Counter[str] = Counter()
        self._awake_since: dict[str, float] = {}
        """When a process could last see to its messages: it was paused, or waited for the source, until then."""
        self._paused_since: dict[str, float] = {}
        """When a process was last paused."""
        self._waiting_since: dict[tuple[str, str], float] = {}
        """Since when a worker has messages of a key without an end of one of them."""
        self._in_lane_at: dict[tuple[str, Receipt], float] = {}
        """When a message was last seen in a lane of a worker."""
        self._paused_at: dict[str, float] = {}
        """When a key was last seen paused by an operator."""

    def handed(self, process: Process, deliveries: list[Delivery]) -> None:
        """They are on their way to a worker, or lost."""
        self._handed.setdefault(process, set()).update(delivery.id for delivery in deliveries)

    def is_in_hands(self, key: str) -> bool:
        """Whether a worker may have a message of a key, even one that somebody else has acked."""
        bodies, sent = self._world.bodies, self._world.sent_by_body
        ids = {id for process, ids in self._handed.items() if not process.is_dead for id in ids}
        return any(sent[bodies[int(id)]].key == key for id in ids)

    def received(self, process: Process, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self._receipts[process.name, delivery.id] = (delivery.receipt, self._world.now())
            sent = self._world.sent_by_body[delivery.body]
            if not sent.malformed:
                self._waiting_since.setdefault((process.name, sent.key), self._world.now())
        self._hidden(process, deliveries)

    def extending(self, process: Process, deliveries: list[Delivery]) -> None:
        self._extending[process.name] += 1
        held = self._held.get(process.name, {})
        self._hidden(process, [delivery for delivery in deliveries if delivery.id in held])

    def extended(self, process: Process) -> None:
        self._extending[process.name] -= 1
        self.awake(process)

    def awake(self, process: Process) -> None:
        self._awake_since[process.name] = self._world.now()

    def paused(self, process: Process) -> None:
        self._paused_since[process.name] = self._world.now()

    def acking(self, process: Process, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            receipt, at = self._receipts.get((process.name, delivery.id), (None, 0.0))
            sent = self._world.sent_by_body[delivery.body]
            # An ack that comes later may have been delayed by a pause: its change has ended long ago.
            is_prompt = self._world.now() - self._last_seen(process, delivery) < BLOCKED_AFTER_S
            if not sent.malformed and is_prompt:
                self._waiting_since[process.name, sent.key] = self._world.now()
            # What came in this very moment was too late for an ack that was on its way out; a pause is no time either.
            if receipt != delivery.receipt and self._has_run_since(process, at):
                self._world.auditor.violate(f"message {delivery.id} acked with an old receipt")
            # A message that is gone already may have been set aside, and its letter sent again as another message.
            is_replayed = delivery.body in self._world.auditor.letters.revived
            is_gone = int(delivery.id) not in self._world.messages()
            if not self._world.auditor.has_ended(delivery.body) and not (is_replayed and is_gone):
                self._world.auditor.violate(f"message {delivery.id} acked before its change has ended")
        self.giving_back(process, deliveries)

    def shared(self, limit: int, deliveries: list[Delivery], source: MemorySource) -> None:
        """Messages that are due again have at most half of a receive, and one more, while fresh ones wait."""
        first = sum(delivery.count == 1 for delivery in deliveries)
        if len(deliveries) == limit and first < limit // 2 and source._fresh():
            self._world.auditor.violate(f"{first} of {limit} messages are fresh, and fresh ones wait")

    def parking(self, process: Process, deliveries: Sequence[Delivery], keys: Sequence[str]) -> None:
        """What is worked on for a moment is not given back. A pause, a limit, a retry or an outage may last longer.

        A message may leave its lane some time before it is parked; what ended since then is no reason to keep it.
        """
        world, controls = self._world, self._world.ledger.working_set.controls
        if world.flow.rate is not None or world.flow.debounce is not None or world.blackout.holds_up(process.name):
            return
        for delivery, key in zip(deliveries, keys, strict=True):
            if self._waiting_since.get((process.name, key), 0.0) >= self._last_seen(process, delivery):
                continue
            entry = world.entries().get(key)
            is_held_up = controls.pauses_key(key) or (entry is not None and entry.attempts > 0)
            # A worker looks at a paused key now and then; until it does, the pause lasts for it.
            is_held_up = is_held_up or world.now() - self._paused_at.get(key, -math.inf) < PAUSE_LOOK_S
            waited_s = world.now() - self._waiting_since.get((process.name, key), 0.0)
            if waited_s < BLOCKED_AFTER_S / 2 and not is_held_up:
                world.auditor.violate(f"{process.name} gives {key} back after {waited_s:.3f} s")

    def _has_run_since(self, process: Process, moment: float) -> bool:
        name, now = process.name, self._world.now()
        is_just_awake = self._awake_since.get(name) == now and self._paused_since.get(name, math.inf) <= moment
        return moment < now and not is_just_awake

    def _last_seen(self, process: Process, delivery: Delivery) -> float:
        """When a message was last seen in a lane of a worker; before that, when the worker received it."""
        _, received_at = self._receipts.get((process.name, delivery.id), (None, 0.0))
        return max(received_at, self._in_lane_at.get((process.name, delivery.id), 0.0))

    def giving_back(self, process: Process, deliveries: list[Delivery]) -> None:
        held, handed = self._held.get(process.name, {}), self._handed.get(process, set())
        for delivery in deliveries:
            held.pop(delivery.id, None)
            handed.discard(delivery.id)

    def left(self, process: Process) -> None:
        """A worker that was told to stop has ended in time: it acked or gave back whatever it had."""
        if held := self._held.pop(process.name, None):
            self._world.auditor.violate(f"{process.name} left with messages {sorted(held, key=str)}")

    def tick(self) -> None:
        """What waits in a lane must not come back meanwhile, as far as its worker can help it."""
        now, visibility_s = self._world.now(), self._world.source.visibility_s
        controls = self._world.ledger.working_set.controls
        self._paused_at.update((key, now) for _, key in self._waiting_since if controls.pauses_key(key))
        for name, lanes in self._world.lanes():
            self._in_lane_at.update(((name, ticket.delivery.id), now) for ticket in lanes.tickets())
            if self._extending[name]:
                continue
            held, awake_since = self._held.get(name, {}), self._awake_since.get(name, 0.0)
            for ticket in lanes.tickets():
                since = max(held.get(ticket.delivery.id, now), awake_since)
                if now - since > visibility_s:
                    self._world.auditor.violate(f"{name} lets message {ticket.delivery.id} come back")

    def _hidden(self, process: Process, deliveries: list[Delivery]) -> None:
        held, now = self._held.setdefault(process.name, {}), self._world.now()
        held.update((delivery.id, now) for delivery in deliveries)
