"""Replays a dead letter: sends its message again, unless a newer version was applied."""

import math

from keywise.core.change import ChangeHeader, Delivery
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import LeaseTerms, LedgerPolicy, Refusal, RefusalReason
from keywise.core.errors import LetterError, MalformedError
from keywise.core.rules import decide_under
from keywise.core.source import HeaderSource
from keywise.flow.pipeline import OpenPipeline


async def replay(pipeline: OpenPipeline, number: int, letter: DeadLetter, *, older: bool = False) -> None:
    """Send the body of a dead letter to the first source, then delete the letter.

    A crash between the two steps leaves both. Replaying the letter again is then refused, or makes a duplicate, which
    does no harm.
    The new message counts as sent now, so the worker cannot see how old it is. The age is checked here: a letter that
    is older than the retention, of a key that the ledger has forgotten, is refused. `older=True` skips this check; the
    operator then vouches that nothing newer was applied.
    """
    try:
        change = pipeline.reader.read_one(letter.body, _delivery_of(letter))
    except MalformedError as error:
        raise LetterError(f"letter {number} cannot be read: {error}; it stays, drop it if it is of no use") from error
    header = ChangeHeader(change.key, change.order, sent_at=math.inf if older else letter.sent_at)
    refusal = await _judge(pipeline, header)
    if refusal is not None and refusal.reason is RefusalReason.FORGOTTEN:
        raise LetterError(
            f"letter {number} was sent longer ago than the retention, and {change.key!r} is forgotten, so something "
            "newer may have been applied; it stays; if nothing newer was applied, replay it with --older"
        )
    if refusal is not None and refusal.mark is not None:
        raise LetterError(_format_refusal(number, change.key, change.version, refusal.reason, refusal.mark[1]))
    [url, source], *_ = pipeline.sources
    if url.startswith("memory:"):
        raise LetterError(
            f"letter {number} stays: {pipeline.name} reads from {url}, a queue in memory that ends with this command"
        )
    if isinstance(source, HeaderSource) and (letter.headers or letter.routing_key):
        await source.send_again(letter.body, letter.headers or {}, letter.routing_key)
    else:
        await source.send([letter.body])
    await pipeline.admin.delete_dead_letters([number])


def _delivery_of(letter: DeadLetter) -> Delivery:
    """Return the delivery that the read function will get for the new message."""
    return Delivery("", "", letter.body, letter.sent_at, 1, letter.headers, letter.routing_key)


async def _judge(pipeline: OpenPipeline, header: ChangeHeader) -> Refusal | None:
    """Decide as the ledger would, without a claim. The answer may be outdated soon; the worker decides again."""
    entry, now = await pipeline.admin.inspect(header.key), await pipeline.admin.now()
    controls, terms = await pipeline.control_store.controls(), LeaseTerms("", 1.0, despite_pause=True)
    return decide_under(controls, entry, header, now, LedgerPolicy(retention_s=pipeline.settings.retention_s), terms)


def _format_refusal(number: int, key: str, version: int | None, reason: RefusalReason, mark: int) -> str:
    what = f"letter {number} has version {version} of {key!r}"
    if reason is RefusalReason.MIXED:
        return f"letter {number} of {key!r} cannot be ordered: some of its changes have a version and some have none"
    if version is None:
        return f"letter {number} stays: a change of {key!r} was applied, and unversioned changes are applied only once"
    applied = "is applied already" if reason is RefusalReason.DUPLICATE else f"is stale: its mark is version {mark}"
    return f"{what}, which {applied}; it stays, drop it with keywise dead drop {number}"
