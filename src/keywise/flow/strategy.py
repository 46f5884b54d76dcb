"""The commit strategy of a pipeline: chosen once, at start, from what its source, ledger and sink allow."""

import enum

from keywise.core.sink import is_atomic
from keywise.core.source import Source, TransactionalSource
from keywise.flow.pipeline import OpenPipeline


class CommitStrategy(enum.StrEnum):
    """How a batch is claimed, written and committed; `keywise run` prints it at start."""

    QUEUE_TRANSACTION = "queue_transaction"
    """Receive, decide, write, mark and ack in one transaction; no lease."""
    LEDGER_TRANSACTION = "ledger_transaction"
    """Decide, write and mark in one transaction, then ack; no lease."""
    CLAIMED_TRANSACTION = "claimed_transaction"
    """Claim first, then run handlers and commit in one transaction, then ack."""
    LEASED = "leased"
    """Claim, call the sink outside of any transaction, commit, then ack."""


def choose_strategy(pipeline: OpenPipeline, source: Source) -> CommitStrategy:
    """Return the strongest strategy that the source, the ledger and the sink allow together."""
    sink = pipeline.sink
    if not is_atomic(sink):
        return CommitStrategy.LEASED
    if sink.runs_user_code or pipeline.objects is not None:
        # User code may crash the process; only a claim records that it was running. An object takes many transactions,
        # and only a claim keeps how far it has come.
        return CommitStrategy.CLAIMED_TRANSACTION
    # Debounced and rate-limited changes wait in lanes, outside of the queue's transaction.
    has_to_wait = pipeline.debounce is not None or pipeline.rate is not None
    can_join = isinstance(source, TransactionalSource) and source.database is sink.database
    if can_join and not has_to_wait:
        return CommitStrategy.QUEUE_TRANSACTION
    return CommitStrategy.LEDGER_TRANSACTION
