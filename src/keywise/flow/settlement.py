"""Settlement acks, releases, parks and extends deliveries, and builds their dead letters and events.

Only this module and `QueueTransactionWorker` ack.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from keywise.core import events
from keywise.core.change import Delivery, Outcome
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import RefusalReason
from keywise.core.errors import UnavailableError
from keywise.core.failures import storable
from keywise.core.source import OutcomeSource, ParkingSource, Source
from keywise.flow.coalesce import group_by_outcome
from keywise.flow.intake import Malformed, ReadBatch
from keywise.flow.lanes import SettledByOutcome, SettledTicket, Ticket
from keywise.flow.pipeline import OpenPipeline


class Settlement:
    """Ends the deliveries of one pipeline."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        self.pipeline = pipeline
        self._parking = [source if isinstance(source, ParkingSource) else None for _, source in pipeline.sources]
        self._noting = [source if isinstance(source, OutcomeSource) else None for _, source in pipeline.sources]
        self._notes_any = any(self._noting)

    def letter(self, ticket: Ticket, cause: str, traceback: str = "") -> DeadLetter:
        change = ticket.change
        letter = self.unread_letter(Malformed(ticket.delivery, cause, traceback), ticket.source)
        return replace(letter, key=change.key, version=change.version)

    def unread_letter(self, unread: Malformed, source: int) -> DeadLetter:
        """Return the dead letter of a delivery that could not be read; most have no key."""
        (name, _), delivery = self.pipeline.sources[source], unread.delivery
        return DeadLetter(
            storable(unread.cause),
            delivery.body,
            headers=delivery.headers,
            sent_at=delivery.sent_at,
            source=name,
            routing_key=delivery.routing_key.replace("\0", "\\x00"),
            traceback=unread.traceback,
            key=unread.key,
        )

    def failed(self, ticket: Ticket, cause: str, attempts: int, retry_s: float, traceback: str = "") -> events.Failed:
        return events.Failed(
            pipeline=self.pipeline.name,
            key=ticket.change.key,
            version=ticket.change.version,
            cause=cause,
            attempts=attempts,
            retry_s=retry_s,
            traceback=traceback,
        )

    def refused(self, ticket: Ticket, reason: RefusalReason, wait_s: float) -> events.Refused:
        key, version = ticket.change.key, ticket.change.version
        return events.Refused(pipeline=self.pipeline.name, key=key, version=version, reason=reason.value, wait_s=wait_s)

    def dead_lettered(self, ticket: Ticket, cause: str, traceback: str = "") -> events.DeadLettered:
        key, version = ticket.change.key, ticket.change.version
        return events.DeadLettered(
            pipeline=self.pipeline.name, key=key, version=version, cause=cause, traceback=traceback
        )

    def report_settled(self, settled: SettledByOutcome) -> None:
        for outcome, tickets in settled.items():
            is_applied = outcome is Outcome.APPLIED
            names_all = not is_applied or self.pipeline.settings.history == "all"
            self.pipeline.emit(
                events.Settled(
                    pipeline=self.pipeline.name,
                    outcome=outcome,
                    changes=len(tickets),
                    headers=[ticket.change for ticket in tickets] if names_all else (),
                    firsts=len(tickets) if is_applied else sum(ticket.delivery.count == 1 for ticket in tickets),
                    sent_at=tickets[0].delivery.sent_at,
                )
            )

    def report_unread(self, read_batch: ReadBatch) -> None:
        name = self.pipeline.name
        for _, cause, traceback, key in read_batch.malformed:
            self.pipeline.emit(events.DeadLettered(pipeline=name, key=key, cause=cause, traceback=traceback))
        for ticket, cause in read_batch.last:
            self.pipeline.emit(self.dead_lettered(ticket, cause))
        if dead := read_batch.dead:
            self.pipeline.emit(events.Settled(pipeline=self.pipeline.name, outcome=Outcome.DEAD, changes=len(dead)))
        for reason, count in Counter(reason for _, reason in read_batch.ignored).items():
            self.pipeline.emit(events.Ignored(pipeline=self.pipeline.name, reason=reason, changes=count))
        if read_batch.misdirected is not None:
            cause, advice = read_batch.misdirected
            self.pipeline.emit(events.Misdirected(pipeline=name, cause=cause, advice=advice))

    async def ack_unread(self, index: int, read_batch: ReadBatch) -> None:
        """Ack the deliveries of a batch that are not processed."""
        if (noting := self._noting[index]) is not None:
            noting.note_outcome(read_batch.dead, Outcome.DEAD)
            noting.note_outcome((delivery for delivery, _ in read_batch.ignored), None)
        await self._at(index, lambda source: source.ack(read_batch.unread))

    async def release_unread(self, index: int, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries that are not processed; the source redelivers them later."""
        await self._at(index, lambda source: self._release_for_longer(source, deliveries))

    async def settle(self, settled: Sequence[SettledTicket]) -> None:
        """Ack changes that have ended. A lost ack does no harm: the message comes back as a duplicate."""
        by_outcome = group_by_outcome(settled)
        self.report_settled(by_outcome)
        if self._notes_any:
            self._note(by_outcome)
        await self._each_source((ticket for ticket, _ in settled), lambda source, some: source.ack(_deliveries(some)))

    def _note(self, settled: SettledByOutcome) -> None:
        for outcome, tickets in settled.items():
            for index, noting in enumerate(self._noting):
                if noting is not None:
                    noting.note_outcome([one.delivery for one in tickets if one.source == index], outcome)

    async def release(self, tickets: Iterable[Ticket], delay_s: float) -> None:
        """Release deliveries; the source redelivers them after the delay, to this or to another worker."""
        await self._each_source(tickets, lambda source, some: source.release(_deliveries(some), delay_s))

    async def return_evicted(self, tickets: Iterable[Ticket]) -> None:
        """Release waiting changes of blocked keys. Each time a message comes again, it stays away for longer.

        A source that can park them gets their keys, for `recall`.
        """
        await self._each_source(tickets, self._park)

    async def recall(self, keys: Sequence[str]) -> None:
        """Bring back the messages of these keys that were given back, from sources that can park them."""
        for index, parking in enumerate(self._parking):
            if parking is not None and keys:
                await self._at(index, partial(self._recall, keys, parking))

    async def _park(self, source: Source, tickets: Sequence[Ticket]) -> None:
        deliveries, parking = _deliveries(tickets), self._parking[tickets[0].source]
        if parking is None:
            await self._release_for_longer(source, deliveries)
        else:
            keys = [ticket.change.key for ticket in tickets]
            await parking.park(deliveries, keys, [self.pipeline.settings.evict_s(one.count) for one in deliveries])

    async def _recall(self, keys: Sequence[str], parking: ParkingSource, _: Source) -> None:
        await parking.recall(keys)

    async def _release_for_longer(self, source: Source, deliveries: Iterable[Delivery]) -> None:
        """Release deliveries: the more often one was delivered, the longer it stays away.

        If some releases fail, the others are still tried, and the first error is raised.
        """
        by_delay: dict[float, list[Delivery]] = {}
        for one in deliveries:
            by_delay.setdefault(self.pipeline.settings.evict_s(one.count), []).append(one)
        errors: list[UnavailableError] = []
        for delay_s, some in by_delay.items():
            try:
                await source.release(some, delay_s)
            except UnavailableError as error:
                # The worker forgets all of them now. A source without a visibility timeout would hold the rest.
                errors.append(error)
        if errors:
            raise errors[0]

    async def snooze(self, ticket: Ticket, wait_s: float) -> None:
        """Release a change that its handler has put off."""
        key, version = ticket.change.key, ticket.change.version
        self.pipeline.emit(events.Snoozed(pipeline=self.pipeline.name, key=key, version=version, wait_s=wait_s))
        await self.release([ticket], wait_s)

    async def extend(self, tickets: Iterable[Ticket], age: float) -> None:
        """Extend deliveries whose last extension is older than the fraction `age` of the visibility timeout.

        A ticket whose delivery the source refuses to extend is orphaned from then on.
        """
        now, limits = self.pipeline.clock(), [source.visibility_s for _, source in self.pipeline.sources]
        due = [t for t in tickets if (s := limits[t.source]) is not None and now - t.extended_at >= s * age]
        for ticket in due:
            ticket.extended_at = now
        await self._each_source(due, self._extend)

    async def _extend(self, source: Source, tickets: Sequence[Ticket]) -> None:
        refused = await source.extend(_deliveries(tickets), source.visibility_s or 0.0)
        receipts = {(one.id, one.receipt) for one in refused}
        for ticket in tickets if receipts else ():
            # A redelivery that came while the source answered has a receipt of its own, and is not concerned.
            if (ticket.delivery.id, ticket.delivery.receipt) in receipts:
                ticket.is_orphaned = True

    async def _each_source(
        self, tickets: Iterable[Ticket], act: Callable[[Source, list[Ticket]], Awaitable[None]]
    ) -> None:
        """Call `act` once per source, with its tickets. A source that cannot be reached redelivers them itself."""
        by_source: dict[int, list[Ticket]] = {}
        for ticket in tickets:
            by_source.setdefault(ticket.source, []).append(ticket)
        if len(by_source) == 1:
            [(index, some)] = by_source.items()
            await self._at(index, lambda source: act(source, some))
            return
        async with asyncio.TaskGroup() as group:
            # Concurrently: a receipt may expire while its ack waits for the answer of another source.
            for index, some in by_source.items():
                group.create_task(self._at(index, lambda source, some=some: act(source, some)))  # type: ignore[misc]

    async def _at(self, index: int, act: Callable[[Source], Awaitable[None]]) -> None:
        name, source = self.pipeline.sources[index]
        try:
            await act(source)
        except UnavailableError as error:
            self.pipeline.count_unavailable(name, error, 0.0)
        else:
            self.pipeline.report_answer(name)


def _deliveries(tickets: Iterable[Ticket]) -> list[Delivery]:
    return [ticket.delivery for ticket in tickets]
