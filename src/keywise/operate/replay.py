"""Sends a dead letter again, if it is still news."""

import math

from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import LeaseTerms, LedgerPolicy, Refusal, RefusalReason
from keywise.core.errors import LetterError, MalformedError
from keywise.core.rules import decide_under
from keywise.flow.pipeline import Pipeline


async def replay(pipeline: Pipeline, number: int, letter: DeadLetter, *, older: bool = False) -> None:
    """Send its body to the first source, then forget the letter: a crash between the two only duplicates.

    It counts as sent now. So where its key was forgotten, its own age decides, unless `older` says that
    somebody knows better.
    """
    try:
        change = pipeline.reader.read_one(letter.body)
    except MalformedError as error:
        raise LetterError(f"letter {number} cannot be read: {error}; it stays, drop it if it is of no use") from error
    want = ChangeHeader(change.key, change.order, sent_at=math.inf if older else letter.sent_at)
    refusal = await _judge(pipeline, want)
    if refusal is not None and refusal.reason is RefusalReason.FORGOTTEN:
        raise LetterError(
            f"letter {number} was sent longer ago than the retention, and {change.key!r} is forgotten: "
            "nobody can tell whether something newer was applied; it stays, --older sends it all the same"
        )
    if refusal is not None and refusal.mark is not None:
        raise LetterError(_format_refusal(number, change.key, change.version, refusal.reason, refusal.mark[1]))
    [url, source], *_ = pipeline.sources
    if url.startswith("memory:"):
        raise LetterError(f"letter {number} would end with this command: {pipeline.name} reads from {url}; it stays")
    await source.send([letter.body])
    await pipeline.admin.delete_dead_letters([number])


async def _judge(pipeline: Pipeline, want: ChangeHeader) -> Refusal | None:
    entry, now = await pipeline.admin.inspect(want.key), await pipeline.admin.now()
    controls, terms = await pipeline.control_store.controls(), LeaseTerms("", 1.0, despite_pause=True)
    return decide_under(controls, entry, want, now, LedgerPolicy(retention_s=pipeline.settings.retention_s), terms)


def _format_refusal(number: int, key: str, version: int | None, reason: RefusalReason, mark: int) -> str:
    what = f"letter {number} has version {version} of {key!r}"
    if reason is RefusalReason.MIXED:
        return f"letter {number} of {key!r} cannot be ordered: some of its changes have a version and some have none"
    if version is None:
        return f"letter {number} is refused: {key!r} was applied already, and without a version that is once; it stays"
    applied = "is applied already" if reason is RefusalReason.DUPLICATE else f"is stale: its mark is version {mark}"
    return f"{what}, which {applied}; it stays, drop it with keywise dead drop {number}"
