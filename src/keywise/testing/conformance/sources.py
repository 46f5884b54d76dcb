"""What every source promises: a message is delivered until it is acked, and to one consumer at a time."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from keywise.core.change import Delivery
from keywise.core.source import Source
from keywise.testing.conformance.promise import Promises, UncheckedError, same

LATER_S = 1.0
"""A margin after which a moment has passed on the clock of any store."""


@dataclass(slots=True, kw_only=True)
class SourceBench:
    """A fresh, empty queue, opened twice."""

    source: Any
    """The queue; a `TransactionalSource` if its `database` is set."""
    another: Source
    """A second consumer of the same queue, with a connection of its own."""
    advance: Callable[[float], None]
    """Move the clock of the queue ahead by so many seconds."""
    transaction: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    """For a transactional source: a transaction of its database, which yields the connection that `queue_in` takes."""
    reports_refusals: bool = True
    """False if the service does not say that it refused to extend a delivery."""

    @property
    def visibility_s(self) -> float:
        return float(self.source.visibility_s)

    async def handed_over(self, *bodies: bytes) -> list[Delivery]:
        """Send messages, and return their deliveries to the first consumer."""
        await self.source.send(bodies or [b"one"])
        return list(await self.source.receive(100, 0.0))

    async def come_back(self, *bodies: bytes) -> tuple[list[Delivery], list[Delivery]]:
        """Return deliveries that the first consumer held for too long, and those of the same messages to the second."""
        old = await self.handed_over(*bodies)
        self.advance(self.visibility_s + LATER_S)
        new = list(await self.another.receive(100, 0.0))
        same("what came back after the visibility timeout", ids(new), ids(old))
        return old, new


MakeSource: TypeAlias = Callable[[], AbstractAsyncContextManager[SourceBench]]

SOURCE_PROMISES: Promises[SourceBench] = Promises()
"""Kept by every source."""
VISIBILITY_PROMISES: Promises[SourceBench] = Promises()
"""Kept by sources whose deliveries come back after a visibility timeout."""
PARKING_PROMISES: Promises[SourceBench] = Promises()
"""Kept by sources that can bring back parked messages, and only by them."""

BODIES = [b"", b"\x00", b"\xff\xfe\x80", bytes(range(256)), b'{"key": "a"}', "日本".encode(), b"x" * (1 << 20)]


def ids(deliveries: Sequence[Delivery]) -> list[str | int]:
    return sorted((one.id for one in deliveries), key=str)


async def same_depth(what: str, source: Source, wanted: int) -> None:
    """Raise if a source counts another number of messages; some services do not count any."""
    if (depth := await source.depth()) is not None:
        same(what, depth, wanted)


async def taken(source: Source, limit: int = 100) -> list[Delivery]:
    return list(await source.receive(limit, 0.0))


@SOURCE_PROMISES.add()
async def bodies_arrive_as_they_were_sent(bench: SourceBench) -> None:
    """A body can be any bytes: empty, NULs, invalid text, a megabyte."""
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
    """A receive without a wait returns at once, even if the queue is empty."""
    same("what an empty queue returned", await taken(bench.source), [])


@SOURCE_PROMISES.add()
async def a_receive_keeps_its_limit(bench: SourceBench) -> None:
    """A receive returns at most as many deliveries as requested, and the next one returns the rest."""
    await bench.source.send([b"%d" % number for number in range(10)])
    first, rest = await taken(bench.source, 4), await taken(bench.source)
    same("the number of deliveries with limit 4", len(first), 4)
    same("the number of deliveries after that", len(rest), 6)
    same("the number of different messages", len({one.id for one in (*first, *rest)}), 10)


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
async def a_delivery_is_hidden_from_other_receives(bench: SourceBench) -> None:
    """While a consumer holds a delivery, no receive returns its message, on any connection."""
    await bench.handed_over(b"one", b"two")
    same("what another consumer got", await taken(bench.another), [])
    same("what the same consumer got again", await taken(bench.source), [])


@SOURCE_PROMISES.add()
async def an_acked_message_never_comes_back(bench: SourceBench) -> None:
    """An acked message is never delivered again; an ack may be repeated."""
    held = await bench.handed_over(b"one", b"two", b"three")
    await bench.source.ack(held)
    await bench.source.ack(held)
    bench.advance((bench.source.visibility_s or 0.0) + LATER_S)
    same("what came after the ack", [*await taken(bench.source), *await taken(bench.another)], [])
    await same_depth("the depth", bench.source, 0)


@SOURCE_PROMISES.add()
async def an_ack_concerns_its_own_message_only(bench: SourceBench) -> None:
    """An ack leaves other messages in the queue, and leaves them hidden."""
    first, second, third = await bench.handed_over(b"one", b"two", b"three")
    await bench.source.ack([second])
    await same_depth("the depth", bench.source, 2)
    await bench.source.release([first, third], 0.0)
    same("what is left", ids(await taken(bench.another)), ids([first, third]))


@SOURCE_PROMISES.add()
async def a_released_message_comes_back_at_once(bench: SourceBench) -> None:
    """A message released without a delay can be received at once, with a new receipt and a higher count."""
    [held] = await bench.handed_over(b"body")
    await bench.source.release([held], 0.0)
    again = await taken(bench.another)
    same("what came back", [(one.id, one.body, one.sent_at) for one in again], [(held.id, held.body, held.sent_at)])
    same("the count of the second delivery", again[0].count, held.count + 1)
    if again[0].receipt == held.receipt:
        raise AssertionError(f"both deliveries have the receipt {held.receipt!r}")


@SOURCE_PROMISES.add()
async def a_released_message_stays_away_for_its_delay(bench: SourceBench) -> None:
    """A message released with a delay is hidden from all consumers for that time, and not longer."""
    [held] = await bench.handed_over()
    await bench.source.release([held], 30.0)
    bench.advance(30.0 - LATER_S * 5)
    same("what came before the delay was over", [*await taken(bench.source), *await taken(bench.another)], [])
    bench.advance(LATER_S * 6)
    same("what came after the delay", ids(await taken(bench.source)), [held.id])


@SOURCE_PROMISES.add()
async def a_delayed_message_comes_when_it_is_due(bench: SourceBench) -> None:
    """A message sent with a delay is delivered after it, not before; other messages do not wait for it."""
    await bench.source.send([b"later"], delay_s=30.0)
    await bench.source.send([b"now"])
    same("what came first", [one.body for one in await taken(bench.source)], [b"now"])
    bench.advance(30.0 + LATER_S)
    due = [one.body for one in await taken(bench.source) if one.body != b"now"]
    same("what came after the delay", due, [b"later"])


@SOURCE_PROMISES.add()
async def the_depth_counts_what_is_not_acked(bench: SourceBench) -> None:
    """A message counts from the send to the ack, even while a consumer holds it."""
    if await bench.source.depth() is None:
        raise UncheckedError("the service does not count messages")
    await same_depth("the depth of a new queue", bench.source, 0)
    await bench.source.send([b"1", b"2", b"3"])
    await same_depth("the depth after sending three", bench.source, 3)
    held = await taken(bench.source, 2)
    await same_depth("the depth while two are held", bench.another, 3)
    await bench.source.ack(held)
    await same_depth("the depth after acking two", bench.another, 1)


@SOURCE_PROMISES.add()
async def a_call_about_nothing_does_nothing(bench: SourceBench) -> None:
    """Every method accepts an empty sequence."""
    await bench.source.send([])
    await bench.source.ack([])
    same("what an extension refused", [*await bench.source.extend([], 10.0)], [])
    await bench.source.release([], 10.0)
    await same_depth("the depth", bench.source, 0)


@SOURCE_PROMISES.add()
async def two_consumers_never_share_a_delivery(bench: SourceBench) -> None:
    """Consumers that receive at the same time get different messages, and together all of them."""
    await bench.source.send([b"%d" % number for number in range(300)])
    mine, theirs = await asyncio.gather(_drained(bench.source), _drained(bench.another))
    if both := set(mine) & set(theirs):
        raise AssertionError(f"both consumers hold {len(both)} messages, such as {min(both, key=str)!r}")
    same("the number of deliveries", len(mine) + len(theirs), 300)
    same("the number of different messages", len({*mine, *theirs}), 300)


async def _drained(source: Source) -> list[str | int]:
    found: list[str | int] = []
    while deliveries := await source.receive(7, 0.0):
        found += (one.id for one in deliveries)
        if len(found) > 1000:
            raise AssertionError("messages are delivered again and again, though a consumer holds them")
    return found


@VISIBILITY_PROMISES.add()
async def a_forgotten_delivery_comes_back(bench: SourceBench) -> None:
    """A delivery that is not extended comes back after the visibility timeout, each time, until the newest is acked."""
    [held] = await bench.handed_over(b"body")
    receipts = {held.receipt}
    for count in (2, 3):
        bench.advance(bench.visibility_s - LATER_S * 5)
        same("what came before the visibility timeout", await taken(bench.another), [])
        bench.advance(LATER_S * 6)
        came_back = await taken(bench.another)
        same("the number of messages after the visibility timeout", len(came_back), 1)
        again = came_back[0]
        same(
            "its id, body and time of sending", (again.id, again.body, again.sent_at), (held.id, b"body", held.sent_at)
        )
        same("its count", again.count, count)
        receipts.add(again.receipt)
    same("the number of different receipts", len(receipts), 3)
    await bench.another.ack([again])
    await same_depth("the depth after an ack with the newest receipt", bench.another, 0)


@VISIBILITY_PROMISES.add()
async def returned_and_fresh_messages_keep_the_limit_together(bench: SourceBench) -> None:
    """The limit of a receive holds for returned and fresh messages together."""
    await bench.handed_over(b"1", b"2", b"3")
    bench.advance(bench.visibility_s + LATER_S)
    await bench.source.send([b"4", b"5", b"6"])
    sizes = [len(await taken(bench.source, 2)) for _ in range(4)]
    same("the sizes of receives with limit 2", sizes, [2, 2, 2, 0])


@VISIBILITY_PROMISES.add()
async def an_ack_that_comes_too_late_does_nothing(bench: SourceBench) -> None:
    """Once a message was delivered again, an ack with the old receipt does nothing."""
    old, new = await bench.come_back(b"one", b"two")
    await bench.source.ack(old)
    await same_depth("the depth after an ack with old receipts", bench.another, 2)
    await bench.another.ack(new)
    await same_depth("the depth after the ack with the new ones", bench.another, 0)


@VISIBILITY_PROMISES.add()
async def an_extended_delivery_stays_hidden(bench: SourceBench) -> None:
    """An extension counts from now, and hides the message for exactly that time."""
    [held] = await bench.handed_over()
    bench.advance(bench.visibility_s / 2)
    same("what the extension refused", [*await bench.source.extend([held], bench.visibility_s * 3)], [])
    bench.advance(bench.visibility_s * 3 - LATER_S * 5)
    same("what came before the extension was over", await taken(bench.another), [])
    bench.advance(LATER_S * 6)
    same("what came after the extension", ids(await taken(bench.another)), [held.id])


@VISIBILITY_PROMISES.add()
async def an_extension_that_comes_too_late_does_nothing(bench: SourceBench) -> None:
    """Once another consumer holds the message, an extension with the old receipt does nothing."""
    old, _ = await bench.come_back()
    await bench.source.extend(old, bench.visibility_s * 10)
    bench.advance(bench.visibility_s + LATER_S)
    same("what came after the visibility timeout of the second consumer", ids(await taken(bench.source)), ids(old))


@VISIBILITY_PROMISES.add()
async def an_extension_returns_what_another_consumer_holds(bench: SourceBench) -> None:
    """An extension returns the deliveries whose messages another consumer holds or has acked, and no others."""
    if not bench.reports_refusals:
        raise UncheckedError("the service does not say that it refused an extension")
    old, new = await bench.come_back(b"one", b"two")
    await bench.another.ack(new[:1])
    mine = await bench.handed_over(b"three")
    refused = await bench.source.extend([*old, *mine], bench.visibility_s)
    same("the messages of the refused deliveries", ids(refused), ids(old))
    same("the receipts of the refused deliveries", {one.receipt for one in refused}, {one.receipt for one in old})


@VISIBILITY_PROMISES.add()
async def a_release_that_comes_too_late_does_nothing(bench: SourceBench) -> None:
    """Once another consumer holds the message, a release with the old receipt does nothing."""
    old, _ = await bench.come_back()
    await bench.source.release(old, 0.0)
    same("what came while the second consumer holds it", await taken(bench.source), [])


@PARKING_PROMISES.add()
async def a_parked_message_stays_away_for_its_delay(bench: SourceBench) -> None:
    """A parked message that is not recalled comes back after its delay, and not before."""
    [held] = await bench.handed_over()
    await bench.source.park([held], ["a"], [30.0])
    bench.advance(30.0 - LATER_S * 5)
    same("what came before the delay was over", await taken(bench.another), [])
    bench.advance(LATER_S * 6)
    [again] = await taken(bench.another)
    same("what came after the delay, and its count", (again.id, again.count), (held.id, held.count + 1))


@PARKING_PROMISES.add()
async def a_recall_brings_back_the_messages_of_a_key(bench: SourceBench) -> None:
    """Parked messages of the key can be received at once, on any connection; those of other keys stay away."""
    first, second, other = await bench.handed_over(b"one", b"two", b"three")
    await bench.source.park([first, second, other], ["a", "a", "b"], [500.0] * 3)
    await bench.another.recall(["a", "unknown"])  # type: ignore[attr-defined]
    same("what came back", ids(await taken(bench.another)), ids([first, second]))
    same("what another receive got", await taken(bench.source), [])


@PARKING_PROMISES.add()
async def a_recall_of_all_keys_brings_back_every_parked_message(bench: SourceBench) -> None:
    """Only parked messages come back: not those that a consumer holds, nor those that were delayed or released."""
    first, second, held, released = await bench.handed_over(b"one", b"two", b"held", b"released")
    await bench.source.send([b"delayed"], delay_s=500.0)
    await bench.source.release([released], 500.0)
    await bench.source.park([first, second], ["a", "日本"], [400.0, 500.0])
    await bench.source.recall(None)
    same("what came back", ids(await taken(bench.another)), ids([first, second]))
    await bench.source.recall(None)
    same("what came back of the messages that are held again", await taken(bench.another), [])
    await bench.source.ack([held])
    await same_depth("the depth", bench.source, 4)


@PARKING_PROMISES.add()
async def a_message_that_is_parked_too_late_stays_where_it_is(bench: SourceBench) -> None:
    """Once another consumer holds the message, parking it with the old receipt does nothing."""
    old, new = await bench.come_back()
    await bench.source.park(old, ["a"], [0.0])
    await bench.source.recall(["a"])
    same("what came while the second consumer holds it", await taken(bench.source), [])
    await bench.another.ack(new)
    await same_depth("the depth", bench.source, 0)


@PARKING_PROMISES.add()
async def a_call_about_nothing_parks_nothing(bench: SourceBench) -> None:
    """An empty sequence is accepted."""
    await bench.source.park([], [], [])
    await bench.source.recall([])
    await same_depth("the depth", bench.source, 0)


@PARKING_PROMISES.add()
async def a_waiting_receive_gets_what_is_recalled(bench: SourceBench) -> None:
    """A recall ends the wait of a receive, as a send does."""
    [held] = await bench.handed_over()
    await bench.source.park([held], ["a"], [500.0])
    waiting = asyncio.create_task(bench.source.receive(10, 60.0))
    await asyncio.sleep(0)
    await bench.source.recall(["a"])
    try:
        async with asyncio.timeout(20.0):
            same("what a waiting receive got", ids(await waiting), [held.id])
    except TimeoutError:
        raise AssertionError("a waiting receive had not returned 20 s after a recall") from None


@PARKING_PROMISES.add()
async def due_and_fresh_messages_share_a_receive(bench: SourceBench) -> None:
    """While both wait, each has half of the limit; of an odd limit, they have the odd one in turns."""
    due = await bench.handed_over(*[b"due"] * 40)
    await bench.source.release(due, 0.0)
    await bench.source.send([b"fresh"] * 12)
    for limit, halves in ((10, {5}), (3, {1, 2}), (3, {1, 2})):
        received = await taken(bench.source, limit)
        same(f"the number of deliveries with limit {limit}", len(received), limit)
        if sum(one.body == b"fresh" for one in received) not in halves:
            raise AssertionError(f"with limit {limit} came {[one.body for one in received]}")
    ones = {(await taken(bench.source, 1))[0].body for _ in range(2)}
    same("two receives with limit 1", ones, {b"due", b"fresh"})
    rest = [one.body for one in await taken(bench.source, 30)]
    same("the number of deliveries with limit 30", len(rest), 30)
    same("the number of fresh ones, of which few are left", rest.count(b"fresh"), 12 - 5 - 3 - 1)


@PARKING_PROMISES.add()
async def what_has_been_due_for_longer_comes_first(bench: SourceBench) -> None:
    """A message that is recalled does not overtake messages that were due before."""
    parked, *others = await bench.handed_over(b"parked", b"1", b"2", b"3")
    await bench.source.release(others, 0.0)
    await bench.source.park([parked], ["a"], [500.0])
    bench.advance(LATER_S)
    await bench.source.recall(["a"])
    same("what came first", ids(await taken(bench.source, 3)), ids(others))
    same("what came then", ids(await taken(bench.source, 3)), [parked.id])
