"""How the batches of a pipeline are committed: chosen once, at start, by what source, ledger and sink allow."""

import enum

from keywise.core.sink import is_atomic
from keywise.core.source import Source, TransactionalSource
from keywise.flow.pipeline import Pipeline


class CommitStrategy(enum.StrEnum):
    """How batches go; decided once, at start, and printed."""

    QUEUE_TRANSACTION = "queue_transaction"
    LEDGER_TRANSACTION = "ledger_transaction"
    CLAIMED_TRANSACTION = "claimed_transaction"
    LEASED = "leased"


def choose_strategy(pipeline: Pipeline, source: Source) -> CommitStrategy:
    """The strongest strategy that source, ledger and sink allow together."""
    sink = pipeline.sink
    if not is_atomic(sink):
        return CommitStrategy.LEASED
    if sink.runs_user_code:
        return CommitStrategy.CLAIMED_TRANSACTION
    has_to_wait = pipeline.debounce is not None or pipeline.rate is not None
    can_join = isinstance(source, TransactionalSource) and source.database is sink.database
    if can_join and not has_to_wait:
        return CommitStrategy.QUEUE_TRANSACTION
    return CommitStrategy.LEDGER_TRANSACTION
