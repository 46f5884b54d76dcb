"""The notice: a message to a queue or a URL, sent when a run has ended, if its start has asked for it."""

import asyncio
from functools import partial

import msgspec
from msgspec.structs import replace

from keywise.core.controls import ReindexRun
from keywise.core.entry import Claim, Refusal
from keywise.core.errors import AdminError, DatabaseError, KeywiseError, UnavailableError
from keywise.core.url import filled, has_secret, redacted
from keywise.flow.pipeline import LEDGER, OpenPipeline
from keywise.reindex.attempts import report_failure
from keywise.reindex.report import report_run
from keywise.reindex.run_state import replace_run
from keywise.reindex.shards import GONE, NOTICE, ShardLedger

RECEIVER = "receiver of the notice"
"""The name of the receiver in `Unavailable` events."""


async def check_receiver(pipeline: OpenPipeline, url: str) -> None:
    """Raise `AdminError` if a notice cannot be sent to a URL; it is asked before the run starts."""
    if has_secret(url):
        raise AdminError(
            f"{redacted(url)} has a password or a token, which the ledger would keep in clear text; write ${{NAME}} in "
            "its place, and set that variable for this command and for the workers"
        )
    if url.startswith("memory:"):
        raise AdminError(f"{url} is a queue in the memory of one process, so the notice would reach nothing else")
    if redacted(filled(url)) in [name for name, _ in pipeline.sources]:
        raise AdminError(
            f"{redacted(url)} is a source of pipeline {pipeline.name!r}, which would read the notice as a message; "
            "name another queue"
        )
    try:
        async with pipeline.connect_notifier(url) as notifier:
            await notifier.check()
    except (UnavailableError, DatabaseError) as error:
        raise AdminError(f"a notice to {redacted(url)} cannot be sent: {error}; nothing was started") from error


def is_notice_due(run: ReindexRun) -> bool:
    """Whether a run has ended and its notice is still to be sent."""
    return bool(run.notify) and not run.is_active and not run.is_notified


async def send_notice(pipeline: OpenPipeline, shards: ShardLedger, run: ReindexRun) -> None:
    """Send the notice of a run, unless another worker does; an attempt that fails is repeated later.

    It is sent under a claim, so by one worker. If that worker dies before it has recorded that the notice was sent,
    another one sends it again.
    """
    claim = await pipeline.retry_until_reachable(LEDGER, partial(shards.claim, NOTICE, run.generation))
    if isinstance(claim, Refusal) and claim.mark is None:
        return  # Another worker sends it, or the next attempt is not due.
    if isinstance(claim, Refusal) or await _send(pipeline, shards, run, claim):
        await replace_run(pipeline, run, replace(run, is_notified=True))


async def _send(pipeline: OpenPipeline, shards: ShardLedger, run: ReindexRun, claim: Claim) -> bool:
    """Send the notice under a claim; return whether it was sent and recorded."""
    heartbeat = asyncio.create_task(shards.renew_claims())
    try:
        if (body := await _body(pipeline, shards, run)) is None:
            await shards.release(claim)
            return False
        async with pipeline.connect_notifier(run.notify) as notifier:
            await notifier.notify(body)
        return await shards.commit(claim)
    except UnavailableError as error:
        await shards.release(claim)
        await pipeline.back_off(RECEIVER, error, 1)
    except KeywiseError as error:
        # The receiver refuses the notice, or a variable of its URL is not set here.
        await shards.fail(report_failure(pipeline, claim, error))
    finally:
        heartbeat.cancel()
        shards.stop_renewing(claim)
    return False


async def _body(pipeline: OpenPipeline, shards: ShardLedger, run: ReindexRun) -> bytes | None:
    """Return the notice as JSON; docs/how-to/reindex.md lists its fields. None if the next run has begun."""
    report = await report_run(pipeline, shards)
    if report is None or (report.run.generation, report.run.started_at) != (run.generation, run.started_at):
        return None
    run = report.run
    return msgspec.json.encode(
        {
            "pipeline": pipeline.name,
            "generation": run.generation,
            "state": run.state.value,
            "started_at": run.started_at,
            "ended_at": run.ended_at,
            "counts": report.counts,
            "gone": report.swept.get(GONE, 0),
            "by": run.by,
            "why": run.why,
        }
    )
