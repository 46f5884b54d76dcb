"""A failed attempt at a shard, the sweep, the catch-up or the notice: it is reported, and tried again later."""

from keywise.core import events
from keywise.core.entry import Certainty, Claim
from keywise.core.errors import KeywiseError
from keywise.core.failures import cause_of_error
from keywise.core.ledger import Failure
from keywise.core.tracebacks import traceback_of
from keywise.flow.pipeline import OpenPipeline


def report_failure(pipeline: OpenPipeline, claim: Claim, error: Exception) -> Failure:
    """Emit that an attempt has failed, and return the failure for the ledger.

    The event has a traceback only if the error is not one of ours: then it is of user code, such as an origin.
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
