"""A failed attempt at a shard, the sweep or the notice: it is reported, and some worker tries again later."""

from keywise.core import events
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import KeywiseError
from keywise.core.failures import cause_of_error
from keywise.core.ledger import Failure
from keywise.core.tracebacks import traceback_of
from keywise.flow.pipeline import OpenPipeline


def report_failure(pipeline: OpenPipeline, claim: Claim, error: Exception) -> Failure:
    """Emit that an attempt has failed, and return it as the ledger keeps it.

    The traceback of one of our own errors says nothing to the user; that of an origin of the user's does.
    """
    attempts = claim.attempts + 1
    retry_s = pipeline.retry_s(attempts)
    traceback = "" if isinstance(error, KeywiseError) else traceback_of(error)
    pipeline.emit(
        events.Failed(
            pipeline=pipeline.name,
            key=claim.key,
            cause=cause_of_error(error),
            attempts=attempts,
            retry_s=retry_s,
            traceback=traceback,
        )
    )
    return Failure(claim, Certainty.CLEAN, retry_s)
