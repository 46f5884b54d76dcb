"""Variants of the replay of a dead letter that apply what is old, or lose what is not."""

from keywise.core.change import ChangeHeader
from keywise.core.dead_letter import DeadLetter
from keywise.core.entry import Refusal
from keywise.core.sink import Grade
from keywise.flow.pipeline import OpenPipeline
from keywise.operate import replay
from keywise.testing.simulator import replays
from mutants.mutant import Mutant

_judge = replay._judge


async def _age_is_forgotten(pipeline: OpenPipeline, header: ChangeHeader) -> Refusal | None:
    return await _judge(pipeline, ChangeHeader(header.key, header.order))


async def _dropped_first(pipeline: OpenPipeline, number: int, letter: DeadLetter) -> None:
    change = pipeline.reader.read_one(letter.body)
    if await _judge(pipeline, ChangeHeader(change.key, change.order, sent_at=letter.sent_at)) is None:
        await pipeline.admin.delete_dead_letters([number])
        await pipeline.sources[0][1].send([letter.body])


REPLAYS = (
    Mutant("an old letter of a forgotten key is replayed", 14, replay, "_judge", _age_is_forgotten, Grade.ATOMIC),
    Mutant("a letter is dropped before it is sent", 13, replays, "replay", _dropped_first),
)
