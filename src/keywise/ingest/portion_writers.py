"""Writers of portions: in one transaction with the position, or by calls of a sink between two steps of the ledger."""

from collections.abc import Sequence
from typing import Any, Protocol

from keywise.core import events
from keywise.core.change import Outcome
from keywise.core.database import SingleWriterDatabase
from keywise.core.dead_letter import DeadLetterRequest
from keywise.core.entry import Advance, Certainty
from keywise.core.errors import KeywiseError
from keywise.core.failures import cause_of_error, is_permanent
from keywise.core.limits import Snooze
from keywise.core.record import Record, RecordTable
from keywise.core.sink import AtomicSink, Sink, SinkResult
from keywise.core.tracebacks import traceback_of
from keywise.core.transaction import Transaction
from keywise.core.transaction_context import transaction_of
from keywise.flow.dead_letters import DeadLetterStep
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.flow.transactional import write_all
from keywise.ingest.parts import PartSettings
from keywise.ingest.portion import Portion, PortionState


class ClaimLostError(KeywiseError):
    """The ledger has refused a step: another worker has the key, or this step was done before."""


class WriteFailedError(KeywiseError):
    """A portion could not be written; the result says how its attempt ends."""

    def __init__(self, result: SinkResult) -> None:
        super().__init__(result.cause)
        self.result = result


class LongTailError(KeywiseError):
    """The tails of several objects are too long for one transaction: each object has to be written alone."""


class PortionWriter(Protocol):
    """Writes portions. It raises one of the errors above if that fails, and lets `UnavailableError` pass."""

    @property
    def fails_clean(self) -> bool:
        """Whether a portion that has failed left no write behind whose outcome is unknown."""

    @property
    def finds_records(self) -> bool:
        """Whether the sink finds the records of an object by itself, so that no extent has to be kept."""

    async def write(self, portions: Sequence[Portion]) -> None:
        """Write portions of different objects; the state and the claim of each say what became of it.

        Of several portions, some may stay open; at least one is written.
        A last portion is only written, and not committed, while records behind its end are left.
        """


class AtomicPortionWriter:
    """Writes records and position in one transaction of the ledger, so that each record is written once."""

    fails_clean = True

    def __init__(self, pipeline: OpenPipeline, sink: AtomicSink, heartbeat: Heartbeat, settings: PartSettings) -> None:
        self._pipeline = pipeline
        self._sink = sink
        self._table = sink if isinstance(sink, RecordTable) else None
        self.finds_records = self._table is not None
        self._heartbeat = heartbeat
        self._settings = settings
        database = pipeline.ledger.database
        self._is_exclusive = isinstance(database, SingleWriterDatabase) and database.has_one_writer

    async def write(self, portions: Sequence[Portion]) -> None:
        ledger, claims = self._pipeline.ledger, [one.claim for one in portions]
        with self._heartbeat.limit(claims, is_exclusive=self._is_exclusive):
            async with transaction_of(ledger.database, ledger.transaction()) as transaction:
                await self._write_records(transaction, portions)
                is_whole = await self._delete_tails(transaction, portions)
                if letters := [(None, letter) for one in portions for letter in one.letters]:
                    await transaction.dead_letter(letters)
                last = [one for one in portions if is_whole and one.content is not None]
                others = [one for one in portions if not is_whole or one.content is None]
                advances = [one.advance for one in others]
                self._heartbeat.end(one.claim for one in last)
                # At the end, so that the rows of the ledger are locked for a short time.
                refused = [*await transaction.advance(advances)] if advances else []
                refused += await transaction.commit([one.commit() for one in last]) if last else []
                if refused:
                    raise ClaimLostError("the claim is lost, or this part is already written")
        self._heartbeat.advanced(advances)
        for one in last:
            one.state = PortionState.COMMITTED
        for one in others:
            one.state = PortionState.WRITTEN
            one.claim = self._heartbeat.current(one.claim)
        report_letters(self._pipeline, portions)

    async def _write_records(self, transaction: Transaction, portions: Sequence[Portion]) -> None:
        records = [record for one in portions for record in one.records]
        if not records:
            return
        gaps: list[Record[Any]] = []
        for index, error in (await write_all(transaction, self._sink, records)).items():
            if not is_permanent(error) or records[index].deleted:
                raise WriteFailedError(_failed(error)) from error
            gaps += _refuse(portions, records[index], cause_of_error(error), traceback_of(error))
        for one in portions:
            one.check_refused(self._settings)
        for error in (await write_all(transaction, self._sink, gaps)).values():
            raise WriteFailedError(_failed(error)) from error

    async def _delete_tails(self, transaction: Transaction, portions: Sequence[Portion]) -> bool:
        """Delete the records behind the ends of objects; False if some are left."""
        tails = [(one.maker.uri, one.tail) for one in portions if one.tail is not None]
        if self._table is None or not tails:
            return True
        limit = self._settings.part_records
        deleted = await self._table.delete_tails(transaction, tails, limit)
        if deleted < limit:
            return True
        if len(portions) > 1:
            raise LongTailError("the tails of these objects are long")
        # Each transaction has to come to a new place.
        portions[0].place += deleted
        return False


class LeasedPortionWriter:
    """Reserves ordinals, calls a plain or conditional sink, and keeps the position."""

    fails_clean = False
    finds_records = False

    def __init__(self, pipeline: OpenPipeline, sink: Sink, heartbeat: Heartbeat, settings: PartSettings) -> None:
        self._steps = LedgerSteps(pipeline, heartbeat)
        self._sink = sink
        self._heartbeat = heartbeat
        self._settings = settings

    async def write(self, portions: Sequence[Portion]) -> None:
        await self._steps.advance(portions, [one.reservation for one in portions])
        with self._heartbeat.limit([one.claim for one in portions]):
            await self._apply(portions)
            await self._steps.store_letters(portions)
        # At once, and not with the next reservation: a worker that dies in each part has to come to the end.
        if followed := [one for one in portions if one.content is None]:
            await self._steps.advance(followed, [one.advance for one in followed])
        for one in portions:
            one.state = PortionState.WRITTEN
        await self._steps.commit([one for one in portions if one.content is not None])

    async def _apply(self, portions: Sequence[Portion]) -> None:
        gaps = await self._call(portions, [record for one in portions for record in one.records])
        for one in portions:
            one.check_refused(self._settings)
        await self._call(portions, gaps)

    async def _call(self, portions: Sequence[Portion], records: Sequence[Record[Any]]) -> list[Record[Any]]:
        """Apply records; return the deletions that those which the sink refuses make necessary."""
        claims, gaps = {one.maker.uri: one.claim for one in portions}, list[Record[Any]]()
        for start in range(0, len(records), self._sink.batch_max):
            some = records[start : start + self._sink.batch_max]
            results = await self._sink.apply(some, [claims[record.object] for record in some])
            for record, result in zip(some, results, strict=True):
                if result.outcome in (Outcome.APPLIED, Outcome.SUPERSEDED):
                    continue
                if record.deleted or not _is_refusal(result):
                    raise WriteFailedError(result)
                gaps += _refuse(portions, record, result.cause, result.traceback)
        return gaps


class LedgerSteps:
    """The steps of the ledger around portions that are written outside of its transactions."""

    def __init__(self, pipeline: OpenPipeline, heartbeat: Heartbeat) -> None:
        self._pipeline = pipeline
        self._heartbeat = heartbeat

    async def advance(self, portions: Sequence[Portion], advances: Sequence[Advance]) -> None:
        """Keep one position for each portion, and note it in the claim of the portion."""
        with self._heartbeat.limit([one.claim for one in portions]):
            ledger = self._pipeline.ledger
            if await self._pipeline.retry_until_reachable(LEDGER, lambda: ledger.advance(advances)):
                raise ClaimLostError("the claim is lost")
        self._heartbeat.advanced(advances)
        for one in portions:
            one.claim = self._heartbeat.current(one.claim)

    async def store_letters(self, portions: Sequence[Portion]) -> None:
        requests = [DeadLetterRequest(letter) for one in portions for letter in one.letters]
        if requests:
            await self._pipeline.retry_until_reachable(LEDGER, DeadLetterStep(self._pipeline, requests))
            report_letters(self._pipeline, portions)

    async def commit(self, last: Sequence[Portion]) -> None:
        """Commit the last portions of objects."""
        if not last:
            return
        ledger, heartbeat = self._pipeline.ledger, self._heartbeat
        commits = [one.commit(overdue=heartbeat.has_ended(one.claim)) for one in last]
        heartbeat.end(one.claim for one in last)
        refused = await self._pipeline.retry_until_reachable(LEDGER, lambda: ledger.commit(commits))
        lost = {claim.token for claim in refused}
        for one in last:
            one.state = PortionState.LOST if one.claim.token in lost else PortionState.COMMITTED


def report_letters(pipeline: OpenPipeline, portions: Sequence[Portion]) -> None:
    for one in portions:
        for letter in one.letters:
            pipeline.emit(
                events.DeadLettered(
                    pipeline=pipeline.name,
                    key=letter.key,
                    version=letter.version,
                    cause=letter.cause,
                    traceback=letter.traceback,
                )
            )


def _refuse(portions: Sequence[Portion], record: Record[Any], cause: str, traceback: str) -> list[Record[Any]]:
    """Make a dead letter of a refused record; return the deletion of what an earlier content has in its place."""
    owner = _owner(portions, record)
    owner.refuse(record, cause, traceback)
    return owner.maker.deletions([record.ordinal], record.order) if owner.has_former(record.ordinal) else []


def _owner(portions: Sequence[Portion], record: Record[Any]) -> Portion:
    return next(one for one in portions if one.maker.uri == record.object)


def _is_refusal(result: SinkResult) -> bool:
    """Whether the sink will never take a record, and has not written it."""
    return result.outcome is Outcome.FAILED and result.permanent and result.certainty is Certainty.CLEAN


def _failed(error: Exception) -> SinkResult:
    if isinstance(error, Snooze):
        return SinkResult(Outcome.BUSY, str(error), wait_s=error.delay_s)
    return SinkResult(Outcome.FAILED, cause_of_error(error), traceback=traceback_of(error))
