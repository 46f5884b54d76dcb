"""How the batches of a pipeline are committed: chosen once, at start, by what source, ledger and sink allow."""

import enum

from keywise.core.source import Source
from keywise.flow.pipeline import Pipeline, is_atomic


class Way(enum.StrEnum):
    """How batches go; decided once, at start, and printed."""

    ONE_TRANSACTION = "one transaction"
    CLAIM_IN_TRANSACTION = "claim in the transaction"
    CLAIMED_TRANSACTION = "claimed, then one transaction"
    LEASED = "leased"


def way_of(pipeline: Pipeline, source: Source) -> Way:
    """The strongest way that source, ledger and sink allow together."""
    sink = pipeline.sink
    if not is_atomic(sink):
        return Way.LEASED
    if sink.runs_user_code:
        return Way.CLAIMED_TRANSACTION
    has_to_wait = pipeline.debounce is not None or pipeline.rate is not None
    if source.database is sink.database and not has_to_wait:
        return Way.ONE_TRANSACTION
    return Way.CLAIM_IN_TRANSACTION
