"""Variants of the way that work goes: what is tried together, when it stops, and what is made of an answer."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from keywise.core.change import Change
from keywise.core.entry import Claim, Commit, Entry
from keywise.core.ledger import Ledger
from keywise.core.sink import APPLIED, Grade
from keywise.flow.consumer import Consumer
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.lanes import Lanes, Ticket
from keywise.flow.leased.disposition import NOT_STARTED, Execution, Ran
from keywise.flow.leased.executors import Job, TransactionExecutor
from keywise.flow.leased.worker import LeasedWorker
from keywise.flow.repair import Repairer
from keywise.flow.transactional import QueueBatch, QueueTransactionWorker
from mutants.mutant import Mutant

_DONE = Ran(APPLIED, committed=True)
_execute_in, _execute_slice = TransactionExecutor._execute_in, TransactionExecutor._execute_slice
_finish = LeasedWorker._finish
_transact, _end, _refetched, _begin = (
    QueueTransactionWorker._transact,
    QueueTransactionWorker._end,
    Repairer._refetched,
    Heartbeat.begin,
)


class _Agreeable:
    """A transaction that never tells that a commit was refused."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        await self._transaction.commit(commits)
        return []


async def _refusal_ignored(self: TransactionExecutor, transaction: Any, jobs: list[Job]) -> dict[int, Execution]:
    return await _execute_in(self, _Agreeable(transaction), jobs)


async def _refused_is_committed(self: TransactionExecutor, jobs: Sequence[Job]) -> dict[int, Execution]:
    executions = await _execute_slice(self, jobs)
    return {token: _DONE if one == Ran(APPLIED) else one for token, one in executions.items()}


async def _lost_is_committed(self: TransactionExecutor, jobs: Sequence[Job]) -> dict[int, Execution]:
    executions = await _execute_slice(self, jobs)
    return {token: _DONE if one is NOT_STARTED else one for token, one in executions.items()}


async def _reads_ahead_blindly(
    self: QueueTransactionWorker, index: int, prefetched: QueueBatch, batch: ExitStack, *, careful: bool
) -> None:
    async def end(*arguments: Any) -> Any:
        vars(self).pop("_read", None)
        return await _end(self, *arguments)

    if prefetched.deliveries:
        vars(self).update(_read=lambda *_: prefetched, _end=end)
    try:
        await _transact(self, index, prefetched, batch, careful=careful)
    finally:
        vars(self).pop("_read", None)
        vars(self).pop("_end", None)


def _never_overdue(self: LeasedWorker, job: Job, execution: Execution) -> None:
    _finish(self, job, replace(execution, overdue=False) if isinstance(execution, Ran) else execution)


def _failed_together(self: LeasedWorker, job: Job) -> list[Job]:
    return self._claimed.take_beside(lambda one: True, self._executor.batch_max - 1, is_bulk=job.is_bulk)


async def _work_on_and_on(self: LeasedWorker, *, live_only: bool) -> None:
    while (job := await self._claimed.get(live_only=live_only)) is not None:
        await self._work_on([job, *self._beside(job)])


async def _nothing_is_unknown(self: Repairer, key: str, entry: Entry) -> Change[Any] | None:
    return await _refetched(self, key, replace(entry, unknown=None))


async def _begin_unnoticed(self: Heartbeat, ledger: Ledger, claim: Claim) -> bool:
    return claim.token in self._held if claim.order is None else await _begin(self, ledger, claim)


def _keep_all(self: Lanes) -> list[Ticket]:
    return []


async def _never_extend(self: Consumer) -> None:
    return None


FLOWS = (
    Mutant(
        "a refused commit in a transaction is ignored",
        9,
        TransactionExecutor,
        "_execute_in",
        _refusal_ignored,
        Grade.ATOMIC,
    ),
    Mutant(
        "a refused change counts as done", 5, TransactionExecutor, "_execute_slice", _refused_is_committed, Grade.ATOMIC
    ),
    Mutant(
        "a lost transaction counts as done", 5, TransactionExecutor, "_execute_slice", _lost_is_committed, Grade.ATOMIC
    ),
    Mutant(
        "what was read ahead is worked on later",
        5,
        QueueTransactionWorker,
        "_transact",
        _reads_ahead_blindly,
        Grade.ATOMIC,
    ),
    Mutant("a holder does not see its deadline pass", 7, LeasedWorker, "_finish", _never_overdue),
    Mutant("a change that failed takes others along", 17, LeasedWorker, "_beside", _failed_together),
    Mutant("new work begins after the stop", 18, LeasedWorker, "_work_until_stopped", _work_on_and_on),
    Mutant("a repair goes below an unknown write", 6, Repairer, "_refetched", _nothing_is_unknown),
    Mutant("a repair begins unnoticed", 18, Heartbeat, "begin", _begin_unnoticed),
    Mutant("a drain gives nothing back", 15, Lanes, "drain", _keep_all),
    Mutant("held messages are not kept hidden", 5, Consumer, "_extend", _never_extend),
)
