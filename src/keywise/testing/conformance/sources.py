"""What every source promises: a message comes until it is acked, and to one consumer at a time."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from keywise.core.change import Delivery
from keywise.core.source import Source
from keywise.testing.conformance.promise import Promises, same

LATER_S = 1.0
"""So much past a moment, it has passed on the clock of any store."""


@dataclass(slots=True, kw_only=True)
class SourceBench:
    """A fresh, empty queue, opened twice."""

    source: Any
    """The queue; an `TransactionalSource` if its `database` is set."""
    another: Source
    """A second consumer of the same queue, with a connection of its own."""
    advance: Callable[[float], None]
    """Let so many seconds pass on the clock of the queue."""
    transaction: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    """For an transactional source: a transaction of its database; it gives the connection that `queue_in` takes."""

    @property
    def visibility_s(self) -> float:
        return float(self.source.visibility_s)

    async def handed_over(self, *bodies: bytes) -> list[Delivery]:
        """Messages that were sent and are now held by the first consumer."""
        await self.source.send(bodies or [b"one"])
        return list(await self.source.receive(100, 0.0))

    async def come_back(self, *bodies: bytes) -> tuple[list[Delivery], list[Delivery]]:
        """Deliveries that the first consumer held for too long, and the same messages handed to the second."""
        old = await self.handed_over(*bodies)
        self.advance(self.visibility_s + LATER_S)
        new = list(await self.another.receive(100, 0.0))
        same("what comes back after the visibility", ids(new), ids(old))
        return old, new


MakeSource: TypeAlias = Callable[[], AbstractAsyncContextManager[SourceBench]]

SOURCE_PROMISES: Promises[SourceBench] = Promises()
"""Kept by every source."""
VISIBILITY_PROMISES: Promises[SourceBench] = Promises()
"""Kept by sources whose deliveries come back after a time."""

BODIES = [b"", b"\x00", b"\xff\xfe\x80", bytes(range(256)), b'{"key": "a"}', "日本".encode(), b"x" * (1 << 20)]


def ids(deliveries: Sequence[Delivery]) -> list[str | int]:
    return sorted((one.id for one in deliveries), key=str)


async def taken(source: Source, limit: int = 100) -> list[Delivery]:
    return list(await source.receive(limit, 0.0))


@SOURCE_PROMISES.add()
async def bodies_arrive_as_they_were_sent(bench: SourceBench) -> None:
    """A body is any bytes: none, NULs, no valid text, a megabyte."""
    await bench.source.send(BODIES)
    same("the set of bodies", sorted(one.body for one in await taken(bench.source)), sorted(BODIES))


@SOURCE_PROMISES.add()
async def every_message_has_an_id_of_its_own(bench: SourceBench) -> None:
    """Two messages never share an id, even if their bodies are equal."""
    await bench.source.send([b"same"] * 50)
    await bench.source.send([b"same"] * 50)
    same("the number of ids", len(set(ids(await taken(bench.source)))), 100)


@SOURCE_PROMISES.add()
async def an_empty_queue_gives_nothing(bench: SourceBench) -> None:
    """A receive without a wait returns at once, with nothing if there is nothing."""
    same("what an empty queue gave", await taken(bench.source), [])


@SOURCE_PROMISES.add()
async def a_receive_keeps_its_limit(bench: SourceBench) -> None:
    """A receive gives at most as many deliveries as it was asked for, and the next one gives the rest."""
    await bench.source.send([b"%d" % number for number in range(10)])
    first, rest = await taken(bench.source, 4), await taken(bench.source)
    same("the number of deliveries with limit 4", len(first), 4)
    same("the rest", len(rest), 6)
    same("the number of messages handed over", len({one.id for one in (*first, *rest)}), 10)


@SOURCE_PROMISES.add()
async def a_receive_waits_for_the_first_message(bench: SourceBench) -> None:
    """A waiting receive returns when a message is sent, long before its wait is over."""
    waiting = asyncio.create_task(bench.source.receive(10, 60.0))
    await bench.source.send([b"late"])
    try:
        async with asyncio.timeout(20.0):
            same("what a waiting receive got", [one.body for one in await waiting], [b"late"])
    except TimeoutError:
        raise AssertionError("a waiting receive had not returned 20 s after a message was sent") from None


@SOURCE_PROMISES.add()
async def a_delivery_is_hidden_from_everybody_else(bench: SourceBench) -> None:
    """While one consumer holds a delivery, no receive gives its message, here or elsewhere."""
    await bench.handed_over(b"one", b"two")
    same("what another consumer got", await taken(bench.another), [])
    same("what the same consumer got again", await taken(bench.source), [])


@SOURCE_PROMISES.add()
async def an_acked_message_never_comes_back(bench: SourceBench) -> None:
    """Acked is forgotten; an ack may be repeated."""
    held = await bench.handed_over(b"one", b"two", b"three")
    await bench.source.ack(held)
    await bench.source.ack(held)
    bench.advance((bench.source.visibility_s or 0.0) + LATER_S)
    same("what came after the ack", [*await taken(bench.source), *await taken(bench.another)], [])
    same("the depth", await bench.source.depth(), 0)


@SOURCE_PROMISES.add()
async def an_ack_concerns_its_own_message_only(bench: SourceBench) -> None:
    """The neighbours of an acked message stay, and stay hidden."""
    first, second, third = await bench.handed_over(b"one", b"two", b"three")
    await bench.source.ack([second])
    same("the depth", await bench.source.depth(), 2)
    await bench.source.release([first, third], 0.0)
    same("what is left", ids(await taken(bench.another)), ids([first, third]))


@SOURCE_PROMISES.add()
async def a_released_message_comes_back_at_once(bench: SourceBench) -> None:
    """A release without delay lets the message come to anybody, with a new receipt and a higher count."""
    [held] = await bench.handed_over(b"body")
    await bench.source.release([held], 0.0)
    again = await taken(bench.another)
    same("what came back", [(one.id, one.body, one.sent_at) for one in again], [(held.id, held.body, held.sent_at)])
    same("the count of the second hand-over", again[0].count, held.count + 1)
    if again[0].receipt == held.receipt:
        raise AssertionError(f"both hand-overs have the receipt {held.receipt!r}")


@SOURCE_PROMISES.add()
async def a_released_message_stays_away_for_its_delay(bench: SourceBench) -> None:
    """A release with a delay keeps the message from everybody for so long, and not longer."""
    [held] = await bench.handed_over()
    await bench.source.release([held], 30.0)
    bench.advance(30.0 - LATER_S * 5)
    same("what came before the delay was over", [*await taken(bench.source), *await taken(bench.another)], [])
    bench.advance(LATER_S * 6)
    same("what came after the delay", ids(await taken(bench.source)), [held.id])


@SOURCE_PROMISES.add()
async def a_delayed_message_comes_when_it_is_due(bench: SourceBench) -> None:
    """A message that is sent with a delay comes after it, not before; others do not wait for it."""
    await bench.source.send([b"later"], delay_s=30.0)
    await bench.source.send([b"now"])
    same("what came first", [one.body for one in await taken(bench.source)], [b"now"])
    bench.advance(30.0 + LATER_S)
    due = [one.body for one in await taken(bench.source) if one.body != b"now"]
    same("what came after the delay", due, [b"later"])


@SOURCE_PROMISES.add()
async def the_depth_counts_what_is_not_acked(bench: SourceBench) -> None:
    """A message counts from its sending to its ack, also while somebody holds it."""
    same("the depth of a new queue", await bench.source.depth(), 0)
    await bench.source.send([b"1", b"2", b"3"])
    same("the depth after sending three", await bench.source.depth(), 3)
    held = await taken(bench.source, 2)
    same("the depth while two are held", await bench.another.depth(), 3)
    await bench.source.ack(held)
    same("the depth after acking two", await bench.another.depth(), 1)


@SOURCE_PROMISES.add()
async def a_call_about_nothing_does_nothing(bench: SourceBench) -> None:
    """Every method takes an empty sequence."""
    await bench.source.send([])
    await bench.source.ack([])
    await bench.source.extend([], 10.0)
    await bench.source.release([], 10.0)
    same("the depth", await bench.source.depth(), 0)


@SOURCE_PROMISES.add()
async def two_consumers_never_share_a_delivery(bench: SourceBench) -> None:
    """Consumers that receive at the same time get different messages, and together all of them."""
    await bench.source.send([b"%d" % number for number in range(300)])
    mine, theirs = await asyncio.gather(_drained(bench.source), _drained(bench.another))
    if both := set(mine) & set(theirs):
        raise AssertionError(f"both consumers hold {len(both)} messages, such as {min(both, key=str)!r}")
    same("the number of messages that were handed over", len(mine) + len(theirs), 300)
    same("the number of different ones", len({*mine, *theirs}), 300)


async def _drained(source: Source) -> list[str | int]:
    found: list[str | int] = []
    while deliveries := await source.receive(7, 0.0):
        found += (one.id for one in deliveries)
        if len(found) > 1000:
            raise AssertionError("messages are handed over again and again, though somebody holds them")
    return found


@VISIBILITY_PROMISES.add()
async def a_forgotten_delivery_comes_back(bench: SourceBench) -> None:
    """A delivery that is neither acked nor extended comes back after the visibility, as often as it takes."""
    [held] = await bench.handed_over(b"body")
    receipts = {held.receipt}
    for count in (2, 3):
        bench.advance(bench.visibility_s - LATER_S * 5)
        same("what came before the visibility was over", await taken(bench.another), [])
        bench.advance(LATER_S * 6)
        came_back = await taken(bench.another)
        same("the number of messages after the visibility", len(came_back), 1)
        again = came_back[0]
        same(
            "its id, body and time of sending", (again.id, again.body, again.sent_at), (held.id, b"body", held.sent_at)
        )
        same("its count", again.count, count)
        receipts.add(again.receipt)
    same("the number of different receipts", len(receipts), 3)


@VISIBILITY_PROMISES.add()
async def returned_and_fresh_messages_keep_the_limit_together(bench: SourceBench) -> None:
    """The limit of a receive holds for messages that came back and fresh ones together."""
    await bench.handed_over(b"1", b"2", b"3")
    bench.advance(bench.visibility_s + LATER_S)
    await bench.source.send([b"4", b"5", b"6"])
    sizes = [len(await taken(bench.source, 2)) for _ in range(4)]
    same("the sizes of receives with limit 2", sizes, [2, 2, 2, 0])


@VISIBILITY_PROMISES.add()
async def an_ack_that_comes_too_late_does_nothing(bench: SourceBench) -> None:
    """Once a message was handed over again, an ack with the old receipt does nothing."""
    old, new = await bench.come_back(b"one", b"two")
    await bench.source.ack(old)
    same("the depth after an ack with old receipts", await bench.another.depth(), 2)
    await bench.another.ack(new)
    same("the depth after the ack with the new ones", await bench.another.depth(), 0)


@VISIBILITY_PROMISES.add()
async def an_extended_delivery_stays_hidden(bench: SourceBench) -> None:
    """An extension counts from now, and hides for exactly as long as it says."""
    [held] = await bench.handed_over()
    bench.advance(bench.visibility_s / 2)
    await bench.source.extend([held], bench.visibility_s * 3)
    bench.advance(bench.visibility_s * 3 - LATER_S * 5)
    same("what came before the extension was over", await taken(bench.another), [])
    bench.advance(LATER_S * 6)
    same("what came after the extension", ids(await taken(bench.another)), [held.id])


@VISIBILITY_PROMISES.add()
async def an_extension_that_comes_too_late_does_nothing(bench: SourceBench) -> None:
    """A delivery that already came back to somebody else is left alone by an extension with the old receipt."""
    old, _ = await bench.come_back()
    await bench.source.extend(old, bench.visibility_s * 10)
    bench.advance(bench.visibility_s + LATER_S)
    same("what came after the visibility of the second holder", ids(await taken(bench.source)), ids(old))


@VISIBILITY_PROMISES.add()
async def a_release_that_comes_too_late_does_nothing(bench: SourceBench) -> None:
    """A delivery that already came back to somebody else is not taken from them by a release."""
    old, _ = await bench.come_back()
    await bench.source.release(old, 0.0)
    same("what came though the second holder has it", await taken(bench.source), [])
