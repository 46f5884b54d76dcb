"""What a queue promises inside a transaction of its database: receives, acks and releases commit with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from keywise.core.change import Delivery
from keywise.core.source import TransactionalQueue
from keywise.testing.conformance.promise import Promises, same
from keywise.testing.conformance.sources import LATER_S, SourceBench, ids, taken

TRANSACTIONAL_QUEUE_PROMISES: Promises[SourceBench] = Promises()
"""Kept by sources in a database that can hold a ledger too."""


class _InletRolledBack(Exception):
    """Leaves a transaction on purpose."""


@asynccontextmanager
async def inside(bench: SourceBench) -> AsyncIterator[Any]:
    """Open the queue inside a transaction that commits at the end of the block."""
    if bench.transaction is None:
        raise TypeError("a source with a database needs a SourceBench with a transaction")
    async with bench.transaction() as connection:
        yield bench.source.queue_in(connection)


async def rolled_back(bench: SourceBench, *, delay_s: float | None) -> list[Delivery]:
    """Receive, then ack or release, in a transaction that is rolled back; return the deliveries."""
    received: list[Delivery] = []
    try:
        async with inside(bench) as queue:
            received += await queue.receive(100)
            if delay_s is None:
                await queue.ack(received)
            else:
                await queue.release(received, delay_s)
            raise _InletRolledBack
    except _InletRolledBack:
        return received


async def mixed(bench: SourceBench) -> Delivery:
    """Send messages that are due for different reasons and one that stays held outside; return the held one."""
    await bench.source.send([b"delayed"], delay_s=20.0)
    held = {one.body: one for one in await bench.handed_over(b"forgotten", b"released", b"held")}
    await bench.source.release([held[b"released"]], 10.0)
    await bench.source.extend([held[b"held"]], bench.visibility_s * 10 + 200.0)
    bench.advance(bench.visibility_s + 20.0 + LATER_S)
    await bench.source.send([b"fresh 1", b"fresh 2"])
    return held[b"held"]


async def bodies_inside(queue: TransactionalQueue, limit: int = 100) -> list[bytes]:
    return sorted(one.body for one in await queue.receive(limit))


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def what_is_acked_inside_is_gone_after_the_commit(bench: SourceBench) -> None:
    """A receive and an ack inside a transaction take effect when it commits."""
    await bench.source.send([b"%d" % number for number in range(20)])
    async with inside(bench) as queue:
        received = await queue.receive(100)
        same("the number of deliveries inside", len(received), 20)
        await queue.ack(received)
    same("the depth after the commit", await bench.another.depth(), 0)
    bench.advance(bench.visibility_s + LATER_S)
    same("what came later", await taken(bench.another), [])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_rollback_undoes_an_ack(bench: SourceBench) -> None:
    """After a rollback, acked messages are visible at once and unchanged."""
    await bench.source.send([b"one", b"two"])
    received = await rolled_back(bench, delay_s=None)
    same("what is there after the rollback", ids(await taken(bench.another)), ids(received))


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_rollback_undoes_a_release(bench: SourceBench) -> None:
    """After a rollback, released messages are visible at once; the delay does not apply."""
    await bench.source.send([b"one", b"two"])
    received = await rolled_back(bench, delay_s=500.0)
    again = await taken(bench.another)
    same("what is there after the rollback", ids(again), ids(received))
    same("their bodies", sorted(one.body for one in again), [b"one", b"two"])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def no_other_receive_returns_what_an_open_transaction_acks(bench: SourceBench) -> None:
    """A receive elsewhere waits for the transaction or returns nothing; it never returns the same messages."""
    await bench.source.send([b"one", b"two"])
    async with inside(bench) as queue:
        received = await queue.receive(100)
        elsewhere = asyncio.create_task(taken(bench.another))
        await asyncio.wait([elsewhere], timeout=0.05)
        await queue.ack(received)
    same("what a receive elsewhere returned meanwhile", await elsewhere, [])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_part_can_be_acked(bench: SourceBench) -> None:
    """A message that a transaction received but did not ack is visible again at once, wherever it was in the batch."""
    for skipped in (0, 3, 6):
        await bench.source.send([b"%d" % number for number in range(7)])
        async with inside(bench) as queue:
            received = list(await queue.receive(100))
            left = received.pop(skipped)
            await queue.ack(received)
        async with inside(bench) as queue:
            again = await queue.receive(100)
            same("what is left", [(one.id, one.body) for one in again], [(left.id, left.body)])
            await queue.ack(again)
        same("the depth at the end", await bench.source.depth(), 0)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_message_left_behind_comes_with_newer_ones(bench: SourceBench) -> None:
    """A message that was not acked is delivered again, together with messages that were sent later."""
    await bench.source.send([b"1", b"2", b"3"])
    async with inside(bench) as queue:
        received = sorted(await queue.receive(100), key=lambda one: one.body)
        await queue.ack(received[:1] + received[2:])
    await bench.source.send([b"4", b"5"])
    async with inside(bench) as queue:
        same("what came next", await bodies_inside(queue), [b"2", b"4", b"5"])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def all_due_messages_come_together(bench: SourceBench) -> None:
    """Expired, released, delayed and fresh messages are delivered together, and can be acked together."""
    held = await mixed(bench)
    async with inside(bench) as queue:
        received = await queue.receive(100)
        wanted = [b"delayed", b"forgotten", b"fresh 1", b"fresh 2", b"released"]
        same("what came", sorted(one.body for one in received), wanted)
        await queue.ack(received)
    same("the depth, with one held outside", await bench.source.depth(), 1)
    await bench.source.ack([held])
    same("the depth at the end", await bench.source.depth(), 0)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_part_of_a_mixture_can_be_acked(bench: SourceBench) -> None:
    """Fresh and returned messages of one batch can each be acked, released or left in the queue."""
    await mixed(bench)
    async with inside(bench) as queue:
        received = {one.body: one for one in await queue.receive(100)}
        await queue.ack([received[b"forgotten"], received[b"fresh 2"]])
        await queue.release([received[b"released"]], 50.0)
    async with inside(bench) as queue:
        same("what came next", await bodies_inside(queue), [b"delayed", b"fresh 1"])
    bench.advance(50.0 + LATER_S)
    async with inside(bench) as queue:
        same("what came after the delay", await bodies_inside(queue), [b"delayed", b"fresh 1", b"released"])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def only_the_fresh_part_of_a_mixture_can_be_acked(bench: SourceBench) -> None:
    """If only the fresh messages of a batch are acked, the returned ones stay, and the other way round."""
    await mixed(bench)
    async with inside(bench) as queue:
        await queue.ack([one for one in await queue.receive(100) if one.body.startswith(b"fresh")])
    async with inside(bench) as queue:
        same("what stayed", await bodies_inside(queue), [b"delayed", b"forgotten", b"released"])
    await bench.source.send([b"fresh 3"])
    async with inside(bench) as queue:
        await queue.ack([one for one in await queue.receive(100) if not one.body.startswith(b"fresh")])
    async with inside(bench) as queue:
        same("what stayed then", await bodies_inside(queue), [b"fresh 3"])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_mixture_keeps_the_limit(bench: SourceBench) -> None:
    """The limit holds for fresh and returned messages together."""
    await mixed(bench)
    seen: list[bytes] = []
    for _ in range(10):
        async with inside(bench) as queue:
            received = await queue.receive(2)
            if len(received) > 2:
                raise AssertionError(f"a receive with limit 2 returned {len(received)}")
            await queue.ack(received)
            seen += (one.body for one in received)
        if not received:
            break
    same("all of them", sorted(seen), [b"delayed", b"forgotten", b"fresh 1", b"fresh 2", b"released"])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_release_inside_keeps_the_message_whole(bench: SourceBench) -> None:
    """A message released inside comes after its delay, with the same id, body and time, and a higher count."""
    await bench.source.send([b"body"])
    for count in (1, 2, 3):
        async with inside(bench) as queue:
            [held] = await queue.receive(100)
            same("the count", held.count, count)
            await queue.release([held], 20.0)
        async with inside(bench) as queue:
            same("what came before the delay was over", list(await queue.receive(100)), [])
        bench.advance(20.0 + LATER_S)
    [again] = await taken(bench.another)
    same("id, body and time", (again.id, again.body, again.sent_at), (held.id, b"body", held.sent_at))


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_release_inside_ends_old_receipts(bench: SourceBench) -> None:
    """After a transaction has released a message, a receipt from before does nothing."""
    [old] = await bench.handed_over()
    bench.advance(bench.visibility_s + LATER_S)
    async with inside(bench) as queue:
        await queue.release(await queue.receive(100), 0.0)
    again = await taken(bench.another)
    same("the number of deliveries", len(again), 1)
    await bench.source.ack([old])
    await bench.source.release([old], 0.0)
    same("the depth after an ack with the old receipt", await bench.another.depth(), 1)
    same("what came while it is held", await taken(bench.source), [])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def arrived_says_whether_a_message_is_due(bench: SourceBench) -> None:
    """`arrived` is true if a fresh or returned message is due, and false if all are held or delayed."""
    same("an empty queue", await bench.source.arrived(0.0), False)
    await bench.source.send([b"later"], delay_s=50.0)
    same("a delayed message", await bench.source.arrived(0.0), False)
    bench.advance(50.0 + LATER_S)
    same("a message that is due", await bench.source.arrived(0.0), True)
    held = await taken(bench.another)
    same("a held message", await bench.source.arrived(0.0), False)
    await bench.another.release(held, 0.0)
    same("a released message", await bench.source.arrived(0.0), True)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def arrived_waits_for_a_message(bench: SourceBench) -> None:
    """`arrived` waits until a message is sent, even over another connection."""
    waiting = asyncio.create_task(bench.source.arrived(5.0))
    await bench.another.send([b"late"])
    same("the answer", await waiting, True)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_peek_takes_nothing(bench: SourceBench) -> None:
    """Any consumer can still receive a peeked message."""
    first = await _first_of(bench, 6)
    ahead = await bench.source.peek(3, first)
    same("the number of peeked messages", len(ahead), 3)
    same("what another consumer gets", len(await taken(bench.another)), 5)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def peeked_messages_are_received(bench: SourceBench) -> None:
    """A receive returns the peeked messages if they are still there; acking them leaves the next ones."""
    first = await _first_of(bench, 8)
    ahead = await bench.source.peek(3, first)
    async with inside(bench) as queue:
        received = await queue.receive(3, ahead)
        same("the next three", ids(received), ids(ahead))
        await queue.ack(received)
    same("the rest", len(await taken(bench.another)), 4)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def peeked_messages_that_another_consumer_took_are_not_received(bench: SourceBench) -> None:
    """A message that another consumer received after the peek is not received again."""
    for wanted in (1, 2):
        first = await _first_of(bench, 6)
        ahead = await bench.source.peek(4, first)
        gone = await taken(bench.another, wanted)
        await bench.another.ack(gone)
        async with inside(bench) as queue:
            received = await queue.receive(100, ahead)
            same("messages that were received twice", set(ids(received)) & set(ids(gone)), set())
            same("the rest", len(received), 5 - wanted)
            await queue.ack(received)


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_due_message_is_not_passed_over_for_peeked_ones(bench: SourceBench) -> None:
    """A message that became due after the peek is received before the peeked ones."""
    await bench.source.send([b"released"])
    async with inside(bench) as queue:
        await queue.release(await queue.receive(1), 20.0)
    first = await _first_of(bench, 6)
    ahead = await bench.source.peek(2, first)
    bench.advance(20.0 + LATER_S)
    async with inside(bench) as queue:
        received = await queue.receive(2, ahead)
        if b"released" not in [one.body for one in received]:
            raise AssertionError(f"the due message did not come, but {[one.body for one in received]}")


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def a_message_left_behind_is_not_passed_over_for_peeked_ones(bench: SourceBench) -> None:
    """A message that was received and not acked is received before the peeked ones."""
    await bench.source.send([b"%d" % number for number in range(8)])
    async with inside(bench) as queue:
        received = list(await queue.receive(3))
        left = received.pop(1)
        await queue.ack(received)
    ahead = await bench.source.peek(3, received[-1])
    async with inside(bench) as queue:
        came = await queue.receive(3, ahead)
        if left.id not in ids(came):
            raise AssertionError(f"{left.body!r} was left behind, but what came was {[one.body for one in came]}")


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def what_is_parked_inside_is_recalled_by_its_key(bench: SourceBench) -> None:
    """Messages parked in a transaction, fresh or due, come back after their delay, or with a recall."""
    await bench.source.send([b"due"])
    async with inside(bench) as queue:
        await queue.park(await queue.receive(100), ["a"], [0.0])
    await bench.source.send([b"fresh"])
    async with inside(bench) as queue:
        received = await queue.receive(100)
        same("what came", sorted(one.body for one in received), [b"due", b"fresh"])
        await queue.park(received, ["a", "a"], [500.0, 600.0])
    same("what came before the recall", await taken(bench.another), [])
    async with inside(bench) as queue:
        await queue.recall(["a"])
    async with inside(bench) as queue:
        again = await queue.receive(100)
        same("what came after the recall", [one.count for one in again], [3, 2])
        await queue.release(again, 500.0)
    async with inside(bench) as queue:
        await queue.recall(None)
        same("what a recall brought back of released messages", await queue.receive(100), [])


@TRANSACTIONAL_QUEUE_PROMISES.add()
async def due_and_fresh_messages_share_a_receive_inside(bench: SourceBench) -> None:
    """While both wait, each has half of the limit; what one of them leaves goes to the other."""
    due = await bench.handed_over(*[b"due"] * 40)
    await bench.source.release(due, 0.0)
    await bench.source.send([b"fresh"] * 8)
    for limit, fresh in ((10, 5), (10, 3), (10, 0)):
        async with inside(bench) as queue:
            received = await queue.receive(limit)
            same(f"the number of deliveries with limit {limit}", len(received), limit)
            same("how many of them are fresh", sum(one.body == b"fresh" for one in received), fresh)
            same("the number of different messages", len(set(ids(received))), limit)
            await queue.ack(received)
    same("the depth", await bench.source.depth(), 48 - 30)


async def _first_of(bench: SourceBench, count: int) -> Delivery:
    """Send some messages, receive and ack the first of them inside a transaction, and return it."""
    await bench.source.send([b"%d" % number for number in range(count)])
    async with inside(bench) as queue:
        [first] = await queue.receive(1)
        await queue.ack([first])
    return first  # type: ignore[no-any-return]
