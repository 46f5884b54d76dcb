"""Variants of the lanes, the consumer, the heartbeat and the repair that act too early, too late or not at all."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keywise.adapters.memory.database import Message
from keywise.adapters.memory.source import MemorySource
from keywise.core.change import Outcome
from keywise.core.entry import Certainty, Claim, Entry, Level
from keywise.core.errors import UnavailableError
from keywise.core.settings import Settings
from keywise.core.sink import AtomicSink, Grade
from keywise.core.transaction import Transaction
from keywise.flow import transactional as transacted
from keywise.flow.coalesce import Coalesced
from keywise.flow.consumer import Consumer
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Lane, Lanes, SettledByOutcome, SettledTicket, State, Ticket
from keywise.flow.leased import disposition
from keywise.flow.leased import worker as leased_worker
from keywise.flow.leased.disposition import Disposition, Execution, Ran
from keywise.flow.leased.executors import FinishedJob, Job
from keywise.flow.leased.repairs import RepairLoop
from keywise.flow.leased.worker import LeasedWorker
from keywise.flow.repair import Repairer
from keywise.flow.settlement import Settlement
from keywise.flow.transactional import BatchResult, LedgerTransactionWorker, QueueTransactionWorker
from mutants.mutant import Mutant

_take, _finish, _add = Lanes.take, Lanes.finish, Lanes.add
_claim, _conclude, _finish_job, _hold = (
    LeasedWorker._claim,
    LeasedWorker._conclude,
    LeasedWorker._finish,
    Heartbeat.hold,
)
_batch, _end = LedgerTransactionWorker._batch, QueueTransactionWorker._end


def _two_of_one_key(self: Lanes, limit: int, now: float, bulk_limit: int | None = None) -> list[Ticket]:
    taken = _take(self, limit, now, bulk_limit)
    for ticket in list(taken):
        if waiting := self._lanes[ticket.change.key].waiting:
            taken.append(waiting.pop())
    return taken


def _no_coalescing(tickets: Sequence[Ticket]) -> Coalesced:
    return Coalesced(list(tickets), {})


def _newer_ends_too(self: Lanes, ticket: Ticket, outcome: Outcome, upto: Any) -> list[SettledTicket]:
    return _finish(self, ticket, outcome, (2**62, 0, 0))


def _dead_lettered_together(self: Lanes, ticket: Ticket) -> list[SettledTicket]:
    return _finish(self, ticket, Outcome.DEAD, ticket.change.order)


def _old_receipt(self: Lanes, tickets: Sequence[Ticket]) -> None:
    _add(self, [ticket for ticket in tickets if (ticket.source, ticket.delivery.id) not in self._tickets])


def _evict_nothing(self: Lanes, now: float) -> list[Ticket]:
    return []


def _blocked_at_once(self: Lanes, now: float) -> list[tuple[str, Lane]]:
    return [(key, lane) for key, lane in self._lanes.items() if lane.state is not State.READY]


def _due_first(self: MemorySource, limit: int) -> list[tuple[int, Message]]:
    return [*self._due(), *self._fresh()][:limit]


async def _followers_at_claim(self: LeasedWorker, tickets: Sequence[Ticket], level: Level) -> list[Job]:
    early: list[SettledTicket] = []
    for ticket in tickets:
        lane = self._lanes._lanes[ticket.change.key]
        early += ((other, Outcome.SUPERSEDED) for other in lane.waiting if other.change.order <= ticket.change.order)
    jobs = await _claim(self, tickets, level)
    await self._settlement.settle(early)
    return jobs


async def _ack_first(self: LeasedWorker, finished: list[FinishedJob]) -> None:
    done = (Disposition.COMMIT, Disposition.ACK_ONLY)
    await self._settlement.settle([(one.ticket, Outcome.APPLIED) for one in finished if one.disposition in done])
    await _conclude(self, finished)


async def _ack_before_transaction(self: LedgerTransactionWorker, tickets: list[Ticket]) -> None:
    await self._settlement.settle([(ticket, Outcome.APPLIED) for ticket in tickets])
    await _batch(self, tickets)


async def _all_acked(self: QueueTransactionWorker, *arguments: Any) -> SettledByOutcome:
    *others, result = arguments
    done = replace(result, applied=[*result.applied, *(ticket for ticket, _ in result.waiting)], waiting=[])
    return await _end(self, *others, done)  # type: ignore[call-arg]


async def _malformed_acked(self: Consumer, index: int, read_batch: Any) -> None:
    await self._settlement.ack_unread(index, read_batch.unread)


def _unknown_is_clean(self: LeasedWorker, job: Job, execution: Execution) -> None:
    if isinstance(execution, Ran):
        execution = replace(execution, result=replace(execution.result, certainty=Certainty.CLEAN))
    _finish_job(self, job, execution)


def _retry_for_ever(execution: Execution, claim: Claim, settings: Settings) -> Disposition:
    found = disposition.dispose(execution, claim, settings)
    return Disposition.RETRY if found is Disposition.DEAD_LETTER else found


async def _failed_acked(self: LeasedWorker, finished: list[FinishedJob]) -> None:
    if finished[0].disposition not in (Disposition.RETRY, Disposition.DEAD_LETTER):
        await _conclude(self, finished)
        return
    claims = [one.claim for one in finished]
    await self._pipeline.retry_until_reachable("ledger", lambda: self._pipeline.ledger.release(claims))
    self._heartbeat.drop(claims)
    for one in finished:
        await self._settlement.settle(self._lanes.dead_letter(one.ticket))


async def _batch_fails_together(transaction: Any, sink: Any, changes: Sequence[Any]) -> dict[int, Exception]:
    try:
        async with transaction.savepoint():
            await sink.write(transaction, changes)
    except Exception as error:
        return dict.fromkeys(range(len(changes)), error)
    return {}


async def _marked_though_failed(
    settlement: Settlement,
    sink: AtomicSink,
    transaction: Transaction,
    decide: transacted.Decide,
    tickets: Sequence[Ticket],
    *,
    careful: bool,
) -> BatchResult:
    result = await _transact(settlement, sink, transaction, decide, tickets, careful=careful)
    failed = [ticket for ticket, _ in result.waiting]
    await transaction.mark([ticket.change for ticket in failed])
    return result


def _deadline_after_answer(self: Heartbeat, claims: Any, asked_at: float) -> None:
    _hold(self, claims, self._clock())


def _deadline_too_late(self: Heartbeat, asked_at: float) -> float:
    return asked_at + 2 * self._lease_s


async def _renew_blindly(self: Heartbeat, ledger: Any) -> None:
    for held in self._held.copy().values():
        held.deadline = self._deadline(self._clock())
        self._move(held)


async def _quiet(entry: Entry) -> bool:
    return True


async def _repair_at_once(self: Repairer) -> list[str]:
    self.due = self._next_due()
    self._is_quiet = _quiet  # type: ignore[method-assign]
    try:
        return await self._pipeline.admin.suspects(10, -1e9)
    except UnavailableError:
        return []


async def _no_repair(self: RepairLoop, key: str) -> None:
    return None


async def _repair_without_claim(self: RepairLoop, key: str) -> None:
    body = self._pipeline.refetch(key) if self._pipeline.refetch else None
    if body is not None:
        change = self._pipeline.reader.read_one(body)
        sink: Any = self._pipeline.sink
        await sink._link.call(lambda: sink._apply([change], [_NOBODY]))


_transact = transacted.transact


class _Nobody:
    token = 0
    order = (0, 0, 0)


_NOBODY = _Nobody()

ACTS = (
    Mutant("a batch takes two changes of one key", 2, Lanes, "take", _two_of_one_key),
    Mutant("a transaction takes two changes of one key", 2, transacted, "coalesce", _no_coalescing, Grade.ATOMIC),
    Mutant("a commit ends newer changes too", 4, Lanes, "finish", _newer_ends_too),
    Mutant("followers end with a poisonous survivor", 4, Lanes, "dead_letter", _dead_lettered_together),
    Mutant("followers are acked at the claim", 4, LeasedWorker, "_claim", _followers_at_claim),
    Mutant("acked before the commit", 5, LeasedWorker, "_conclude", _ack_first),
    Mutant("acked before the transaction", 5, LedgerTransactionWorker, "_batch", _ack_before_transaction, Grade.ATOMIC),
    Mutant("acked with an old receipt", 5, Lanes, "add", _old_receipt),
    Mutant("an unknown outcome is taken for a clean one", 6, LeasedWorker, "_finish", _unknown_is_clean),
    Mutant("the deadline is read after the answer", 7, Heartbeat, "hold", _deadline_after_answer),
    Mutant("the deadline is later than the lease", 7, Heartbeat, "_deadline", _deadline_too_late),
    Mutant("a refused renewal is not noticed", 7, Heartbeat, "beat", _renew_blindly),
    Mutant("a malformed delivery is just acked", 13, Consumer, "_set_aside", _malformed_acked),
    Mutant("a failed change is just acked", 13, LeasedWorker, "_conclude", _failed_acked),
    Mutant("a failed change is acked in its transaction", 13, QueueTransactionWorker, "_end", _all_acked, Grade.ATOMIC),
    Mutant("a failed change is marked", 3, transacted, "transact", _marked_though_failed, Grade.ATOMIC),
    Mutant("a change is retried for ever", 13, leased_worker, "dispose", _retry_for_ever),
    Mutant("a blocked key uses up the room", 15, Lanes, "evict_blocked", _evict_nothing),
    Mutant("messages that are due again keep out fresh ones", 15, MemorySource, "_shared", _due_first),
    Mutant("a key at work for a moment is blocked", 15, Lanes, "_blocked", _blocked_at_once),
    Mutant("a bad change takes its batch along", 17, transacted, "write_all", _batch_fails_together, Grade.ATOMIC),
    Mutant("repaired before the horizon", 6, Repairer, "suspects", _repair_at_once),
    Mutant("suspects are not repaired", 6, RepairLoop, "_repair", _no_repair),
    Mutant("repaired without a claim", 1, RepairLoop, "_repair", _repair_without_claim),
)
