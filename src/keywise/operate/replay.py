"""Replays a dead letter: sends its message again, unless a newer version was applied."""

import math

from keywise.core.change import ChangeHeader, Delivery
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import LeaseTerms, LedgerPolicy, Refusal, RefusalReason
from keywise.core.errors import AdminError, LetterError, MalformedError
from keywise.core.record import OBJECT_HEADER, RECORDS
from keywise.core.rules import decide_under
from keywise.core.source import HeaderSource
from keywise.flow.pipeline import OpenPipeline


class Replayer:
    """Replays dead letters. Several letters with records of one object announce that object once."""

    def __init__(self, *, older: bool = False, from_start: bool = False) -> None:
        """`older` vouches that nothing newer was applied; `from_start` reads objects again from their beginning."""
        self._older = older
        self._from_start = from_start
        self._announced: set[tuple[str, str]] = set()
        """The pipelines and URIs of the objects that were announced again."""

    async def replay(self, pipeline: OpenPipeline, number: int, letter: DeadLetter) -> None:
        """Send the message of a letter again, and delete the letter; see `replay`.

        A letter that has a record announces the whole object again. The letter of an object sends its announcement
        again, and the work resumes at its position, unless `from_start` is set.
        """
        if pipeline.objects is None:
            await replay(pipeline, number, letter, older=self._older)
        elif uri := _object_of(letter):
            await self._announce(pipeline, number, letter, uri)
        elif letter.key and self._from_start:
            # The key may have only the beginning of the URI; the announcement has the whole.
            await self._announce(pipeline, number, letter, pipeline.reader.read_one(letter.body).value.uri)
        elif letter.key:
            await replay(pipeline, number, letter, older=self._older)
        else:
            # A notification that could not be read: its dialect, which may be a corrected one by now, reads it again.
            await _send(pipeline, number, letter)

    async def _announce(self, pipeline: OpenPipeline, number: int, letter: DeadLetter, key: str) -> None:
        assert pipeline.objects is not None, "only objects are announced"
        _check_queue(pipeline, number, letter)
        if (pipeline.name, key) not in self._announced:
            try:
                await pipeline.objects.announce(pipeline, key)
            except AdminError as error:
                raise LetterError(f"letter {number} stays: {error}") from error
            self._announced.add((pipeline.name, key))
        await pipeline.admin.delete_dead_letters([number])


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
        raise LetterError(
            f"letter {number} cannot be read: {error}; it stays; if it is of no use, drop it with keywise dead drop "
            f"{number}"
        ) from error
    header = ChangeHeader(change.key, change.order, sent_at=math.inf if older else letter.sent_at)
    refusal = await _judge(pipeline, header)
    if refusal is not None and refusal.reason is RefusalReason.FORGOTTEN:
        raise LetterError(
            f"letter {number} was sent longer ago than the retention, and {change.key!r} is forgotten, so something "
            "newer may have been applied; it stays; if nothing newer was applied, replay it with --older"
        )
    if refusal is not None and refusal.mark is not None:
        raise LetterError(_format_refusal(number, change.key, change.version, refusal.reason, refusal.mark[1]))
    await _send(pipeline, number, letter)


async def _send(pipeline: OpenPipeline, number: int, letter: DeadLetter) -> None:
    _check_queue(pipeline, number, letter)
    [_, source], *_ = pipeline.sources
    if isinstance(source, HeaderSource) and (letter.headers or letter.routing_key):
        await source.send_again(letter.body, letter.headers or {}, letter.routing_key)
    else:
        await source.send([letter.body])
    await pipeline.admin.delete_dead_letters([number])


def _check_queue(pipeline: OpenPipeline, number: int, letter: DeadLetter) -> None:
    """Raise `LetterError` if no message can be sent that outlives this process."""
    [url, _], *_ = pipeline.sources
    if url.startswith("memory:"):
        raise LetterError(
            f"letter {number} stays: {pipeline.name} reads from {url}, a queue in memory that ends with this command"
        )
    if url.startswith(RECORDS):
        objects = url.removeprefix(RECORDS)
        raise LetterError(
            f"letter {number} stays: it has a record of an object of {objects}; read the object again with keywise "
            f"force {_object_of(letter)} --pipeline {objects}, then drop the letter"
        )


def _object_of(letter: DeadLetter) -> str:
    """Return the URI of the object that a letter has a record of; empty if it has none."""
    return (letter.headers or {}).get(OBJECT_HEADER, "")


def _delivery_of(letter: DeadLetter) -> Delivery:
    """Return the delivery that the read function will get for the new message."""
    return Delivery("", "", letter.body, letter.sent_at, 1, letter.headers, letter.routing_key)


async def _judge(pipeline: OpenPipeline, header: ChangeHeader) -> Refusal | None:
    """Decide as the ledger would, without a claim. The answer may be outdated soon; the worker decides again."""
    entry, now = await pipeline.admin.inspect(header.key), await pipeline.admin.now()
    controls, terms = await pipeline.control_store.controls(), LeaseTerms("", 1.0, despite_pause=True)
    return decide_under(controls, entry, header, now, LedgerPolicy(retention_s=pipeline.settings.retention_s), terms)


def _format_refusal(number: int, key: str, version: int | None, reason: RefusalReason, mark: int) -> str:
    if reason is RefusalReason.MIXED:
        what = f"letter {number} of {key!r} cannot be ordered: some of its changes have a version and some have none"
    elif version is None:
        what = f"a change of {key!r} was applied, and unversioned changes such as letter {number} are applied only once"
    else:
        applied = "is applied already" if reason is RefusalReason.DUPLICATE else f"is stale: its mark is version {mark}"
        what = f"letter {number} has version {version} of {key!r}, which {applied}"
    return f"{what}; it stays, drop it with keywise dead drop {number}"
