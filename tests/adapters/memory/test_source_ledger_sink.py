"""The plugs in memory: a queue with visibility, a ledger with transactions, and stores of all three grades."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from keywise.adapters.memory import ledger as ledgers
from keywise.adapters.memory import sink as sinks
from keywise.adapters.memory import source as sources
from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.adapters.memory.sink import MemorySink, MemoryTable
from keywise.adapters.memory.source import MemorySource
from keywise.core.admin import LedgerCounts
from keywise.core.change import VERSION_MIN, Change, ChangeHeader, order_of
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import Certainty, Claim, Commit, LeaseTerms, LedgerPolicy, RefusalReason
from keywise.core.errors import AddressError
from keywise.core.ledger import Failure
from keywise.core.sink import APPLIED, SUPERSEDED, Grade
from keywise.core.url import Address
from keywise.testing.virtual_loop import VirtualLoop

TERMS = LeaseTerms("w1", 10.0)


class Shop:
    """A database on virtual time with everything that can live in it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.database = MemoryDatabase(clock=loop.time, rng=random.Random(1))
        self.source = MemorySource(self.database, "queue", visibility_s=30.0)
        self.ledger = MemoryLedger(self.database, "shop", LedgerPolicy(intents=True, redelivery_s=60.0))
        self.table = MemoryTable(self.database, "pages")

    async def pass_s(self, seconds: float) -> None:
        await asyncio.wait([self.loop.create_future()], timeout=seconds)

    async def take(self, key: str, version: int = 1) -> Claim:
        [claim] = (await self.ledger.claim([ChangeHeader(key, order_of(version))], TERMS)).granted
        return claim


def in_a_shop(story: Callable[[Shop], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    loop.run_until_complete(story(Shop(loop)))


# The queue.


def test_a_message_is_hidden_until_its_visibility_ends_and_comes_with_a_new_receipt():
    async def story(shop: Shop) -> None:
        await shop.source.send([b"a"])
        [first] = await shop.source.receive(10, 0.0)
        assert await shop.source.receive(10, 29.0) == []
        [second] = await shop.source.receive(10, 5.0)
        assert (shop.loop.time(), first.id, second.id) == (30.0, second.id, first.id)
        assert (first.count, second.count) == (1, 2)
        assert first.receipt != second.receipt

    in_a_shop(story)


def test_messages_come_in_the_order_of_sending_within_the_limit():
    async def story(shop: Shop) -> None:
        await shop.source.send([b"a", b"b", b"c"])
        assert [one.body for one in await shop.source.receive(2, 0.0)] == [b"a", b"b"]
        assert [one.body for one in await shop.source.receive(2, 0.0)] == [b"c"]

    in_a_shop(story)


def test_an_ack_with_an_old_receipt_does_nothing():
    """Rule 5: acking one that already came back must not take it away from its new holder."""

    async def story(shop: Shop) -> None:
        await shop.source.send([b"a"])
        [first] = await shop.source.receive(10, 0.0)
        await shop.pass_s(30.0)
        [second] = await shop.source.receive(10, 0.0)
        await shop.source.ack([first])
        await shop.source.extend([first], 1000.0)
        await shop.source.release([first], 0.0)
        assert await shop.source.receive(10, 0.0) == []
        await shop.source.ack([second])
        await shop.source.ack([second])
        await shop.pass_s(100.0)
        assert await shop.source.receive(10, 0.0) == []

    in_a_shop(story)


def test_an_extended_message_stays_hidden_for_longer():
    async def story(shop: Shop) -> None:
        await shop.source.send([b"a"])
        deliveries = await shop.source.receive(10, 0.0)
        await shop.pass_s(20.0)
        await shop.source.extend(deliveries, 30.0)
        assert await shop.source.receive(10, 29.0) == []
        assert len(await shop.source.receive(10, 2.0)) == 1

    in_a_shop(story)


def test_a_released_message_comes_back_after_its_delay():
    async def story(shop: Shop) -> None:
        await shop.source.send([b"a"])
        await shop.source.release(await shop.source.receive(10, 0.0), 5.0)
        assert await shop.source.receive(10, 4.0) == []
        assert len(await shop.source.receive(10, 4.0)) == 1
        assert shop.loop.time() == 5.0

    in_a_shop(story)


def test_a_delayed_message_is_not_seen_before_its_time():
    async def story(shop: Shop) -> None:
        await shop.source.send([b"a"], delay_s=5.0)
        assert not await shop.source.arrived(4.0)
        assert await shop.source.arrived(4.0)
        assert shop.loop.time() == 5.0

    in_a_shop(story)


def test_a_receiver_wakes_when_something_is_sent_by_whomever():
    async def story(shop: Shop) -> None:
        sender = MemorySource(shop.database, "queue")
        shop.loop.call_later(3.0, lambda: sending.append(shop.loop.create_task(sender.send([b"a"]))))
        sending: list[Any] = []
        assert len(await shop.source.receive(10, 60.0)) == 1
        assert shop.loop.time() == 3.0

    in_a_shop(story)


def test_a_transaction_receives_and_acks_or_nothing_of_it():
    async def settle_both(shop: Shop, *, ends_well: bool) -> None:
        async with shop.ledger.transaction() as transaction:
            queue = shop.source.queue_in(transaction.connection)
            by_body = {one.body: one for one in await queue.receive(10)}
            assert [one.count for one in by_body.values()] == [1, 1]
            await queue.ack([by_body[b"a"]])
            await queue.release([by_body[b"b"]], 5.0)
            if not ends_well:
                raise ZeroDivisionError

    async def story(shop: Shop) -> None:
        await shop.source.send([b"a", b"b"])
        with pytest.raises(ZeroDivisionError):
            await settle_both(shop, ends_well=False)
        await settle_both(shop, ends_well=True)
        assert await shop.source.receive(10, 4.0) == []
        assert [(one.body, one.count) for one in await shop.source.receive(10, 1.0)] == [(b"b", 2)]

    in_a_shop(story)


def test_what_was_peeked_at_is_received_only_if_it_is_still_next():
    async def story(shop: Shop) -> None:
        await shop.source.send([b"a", b"b", b"c"])
        async with shop.ledger.transaction() as transaction:
            queue = shop.source.queue_in(transaction.connection)
            [first] = await queue.receive(1)
            peeked = await shop.source.peek(1, first)
            assert [one.body for one in peeked] == [b"b"]
            await queue.ack([first])
            assert await queue.receive(2, peeked) is peeked
            await queue.ack(peeked)
            assert [one.body for one in await queue.receive(2, peeked)] == [b"c"]

    in_a_shop(story)


# The ledger.


def test_a_transaction_that_raises_leaves_nothing_behind():
    async def story(shop: Shop) -> None:
        with pytest.raises(ZeroDivisionError):
            async with shop.ledger.transaction() as transaction:
                await transaction.mark([ChangeHeader("a", order_of(1))])
                await shop.table.write(transaction, [Change("a", order_of(1))])
                await transaction.dead_letter([(None, DeadLetter("no", b""))])
                raise ZeroDivisionError
        assert (await shop.ledger.inspect("a"), shop.table.stored, shop.table.writes) == (None, {}, {})
        assert await shop.ledger.dead_letters(10) == []

    in_a_shop(story)


def test_a_savepoint_that_raises_is_rolled_back_alone():
    async def story(shop: Shop) -> None:
        async with shop.ledger.transaction() as transaction:
            await shop.table.write(transaction, [Change("a", order_of(1))])
            with pytest.raises(ZeroDivisionError):
                async with transaction.savepoint():
                    await shop.table.write(transaction, [Change("a", order_of(2)), Change("b", order_of(1))])
                    raise ZeroDivisionError
            async with transaction.savepoint():
                await shop.table.write(transaction, [Change("c", order_of(1))])
        assert {key: stored.order[1] for key, stored in shop.table.stored.items()} == {"a": 1, "c": 1}

    in_a_shop(story)


def test_others_wait_while_a_transaction_is_open():
    async def story(shop: Shop) -> None:
        async with shop.ledger.transaction() as transaction:
            claiming = shop.loop.create_task(shop.ledger.claim([ChangeHeader("a", order_of(1))], TERMS))
            await shop.pass_s(1.0)
            assert not claiming.done()
            await transaction.mark([ChangeHeader("a", order_of(1))])
        assert (await claiming).refused["a"].reason is RefusalReason.DUPLICATE

    in_a_shop(story)


def test_a_transaction_refuses_a_repeated_commit():
    """Rule 12: its effect is there, and must not come a second time."""

    async def story(shop: Shop) -> None:
        claim = await shop.take("a")
        async with shop.ledger.transaction() as transaction:
            assert await transaction.commit([Commit(claim)]) == []
        async with shop.ledger.transaction() as transaction:
            assert await transaction.commit([Commit(claim)]) == [claim]
        assert await shop.ledger.commit([Commit(claim)]) == []

    in_a_shop(story)


def test_failures_in_a_transaction_are_counted_and_a_burial_forgets_them():
    async def story(shop: Shop) -> None:
        header = ChangeHeader("a", order_of(1))
        async with shop.ledger.transaction() as transaction:
            assert await transaction.decide([header]) == {}
            assert [await transaction.fail([header]), await transaction.fail([header])] == [[1], [2]]
            await transaction.dead_letter([(header, DeadLetter("no", b"x", key="a"))])
        assert await shop.ledger.inspect("a") is None
        assert [letter.key for _, _, letter in await shop.ledger.dead_letters(10)] == ["a"]

    in_a_shop(story)


def test_tokens_are_not_reused_even_if_the_sequence_is_set_back():
    """Rule 9: sequence and nonce."""
    database = MemoryDatabase(rng=random.Random(1))
    first = database.token()
    database.tokens = 0
    assert first != database.token()


def test_a_claim_answers_every_want_once():
    async def story(shop: Shop) -> None:
        held = await shop.take("b")
        results = await shop.ledger.claim(
            [ChangeHeader("c", order_of(1)), ChangeHeader("b", order_of(1)), ChangeHeader("a", None)], TERMS
        )
        assert [claim.key for claim in results.granted] == ["a", "c"], "in sorted order, so workers cannot deadlock"
        assert {key: refusal.reason for key, refusal in results.refused.items()} == {"b": RefusalReason.BUSY}
        assert len({held.token, *(claim.token for claim in results.granted)}) == 3

    in_a_shop(story)


def test_a_burial_keeps_its_letter_only_with_its_claim():
    """Rule 13: what is not ended here is ended by its new holder."""

    async def story(shop: Shop) -> None:
        claim, letter = await shop.take("a"), DeadLetter("no", b"x", key="a")
        assert (
            await shop.ledger.dead_letter(
                [DeadLetterRequest(letter, claim), DeadLetterRequest(DeadLetter("bad", b"y"))]
            )
            == []
        )
        assert await shop.ledger.dead_letter([DeadLetterRequest(letter, claim)]) == [claim]
        assert [one.cause for _, _, one in await shop.ledger.dead_letters(10)] == ["bad", "no"]

    in_a_shop(story)


def test_the_operator_sees_figures_suspects_and_letters():
    async def story(shop: Shop) -> None:
        ledger = shop.ledger
        await ledger.commit([Commit(await shop.take("a")), Commit(await shop.take("b"))])
        await ledger.fail([Failure(await shop.take("c"), Certainty.ENDED, 0.0)])
        await ledger.commit([Commit(Claim("a", order_of(9), False, token=99))])
        await shop.take("d")
        await ledger.dead_letter([DeadLetterRequest(DeadLetter("no", b"x"))])
        assert LedgerCounts(keys=2, tombstones=0, claims=1, suspects=1, dead=1) == await ledger.counts()
        assert await ledger.suspects(10, 1.0) == []
        await shop.pass_s(1.0)
        assert await ledger.suspects(10, 1.0) == ["a"]
        await shop.pass_s(100.0)
        assert await ledger.suspects(10, 1.0) == ["a", "c", "d"], "longest in doubt first"
        assert await ledger.suspects(1, 1.0) == ["a"]
        [(number, buried_at, letter)] = await ledger.dead_letters(10)
        assert (buried_at, letter.body, await ledger.now()) == (0.0, b"x", 101.0)
        assert (await ledger.delete_dead_letters([number, 12345]), await ledger.dead_letters(10)) == (1, [])

    in_a_shop(story)


def test_pruning_tells_how_many_it_forgot():
    async def story(shop: Shop) -> None:
        await shop.ledger.commit([Commit(await shop.take("a")), Commit(await shop.take("b"))])
        await shop.take("c")
        await shop.pass_s(161.0)
        assert await shop.ledger.prune(100.0) == 2
        assert await shop.ledger.inspect("c") is not None

    in_a_shop(story)


# The stores.


def test_a_plain_store_takes_whatever_comes():
    sink = MemorySink(Grade.PLAIN)
    results = [sink.write(Change("a", order_of(version)), token=version) for version in (2, 1)]
    assert (results, sink.stored["a"].order) == ([APPLIED, APPLIED], order_of(1))
    assert [(write.order[1], write.token) for write in sink.writes] == [(2, 2), (1, 1)]


def test_a_conditional_store_refuses_what_is_older():
    """Rule 20: an equal version means that an earlier try arrived."""
    sink = MemorySink(Grade.CONDITIONAL)
    results = [sink.write(Change("a", order_of(version)), token=1) for version in (2, 1, 2, 3)]
    assert (results, sink.stored["a"].order) == ([APPLIED, SUPERSEDED, APPLIED, APPLIED], order_of(3))
    assert len(sink.writes) == 2


def test_a_conditional_store_takes_the_version_that_it_holds_again_from_a_repair():
    """A repair may delete a key at its mark, as the other conditional stores let it."""
    sink = MemorySink(Grade.CONDITIONAL)
    sink.write(Change("a", order_of(2)), token=1)
    older, equal = (Change("a", order_of(version), deleted=True) for version in (1, 2))
    results = [asyncio.run(sink.apply([change], [Claim("a", None, False, 2)])) for change in (older, equal)]
    assert (results, sink.stored["a"].deleted) == ([[SUPERSEDED], [APPLIED]], True)


def test_a_repair_undoes_a_forced_write_that_was_never_committed():
    sink = MemorySink(Grade.CONDITIONAL)
    sink.write(Change("a", (0, 2, 3), deleted=True), token=1)
    at_the_mark = Change("a", (0, 2, 1))
    assert sink.write(at_the_mark, token=2) == SUPERSEDED
    assert sink.write(at_the_mark, token=3, repairs=True) == APPLIED
    assert sink.stored["a"].order == (0, 2, 1)


def test_a_key_of_unknown_version_is_removed_at_the_version_that_the_store_holds():
    sink = MemorySink(Grade.CONDITIONAL)
    sink.write(Change("a", order_of(3)), token=1)
    assert sink.write(Change("a", order_of(VERSION_MIN), deleted=True), token=2) == APPLIED
    assert (sink.stored["a"].order, sink.stored["a"].deleted) == (order_of(3), True)


def test_the_list_of_entries_has_nothing_that_is_not_committed():
    async def story() -> tuple[list[str], list[str]]:
        ledger = MemoryLedger(MemoryDatabase(), "a", LedgerPolicy())
        async with ledger.transaction() as transaction:
            await transaction.mark([ChangeHeader("k", order_of(1))])
            before = await ledger.transfer.page("", 10)
        after = await ledger.transfer.page("", 10)
        return [key for key, _ in before.entries], [key for key, _ in after.entries]

    assert asyncio.run(story()) == ([], ["k"])


def test_a_store_that_forgets_deletions_takes_an_old_version_again():
    now = [0.0]
    sink = MemorySink(Grade.CONDITIONAL, forget_deletions_s=60.0, clock=lambda: now[0])
    assert sink.forgets_deletions
    sink.write(Change("a", order_of(5), deleted=True), token=1)
    now[0] = 60.0
    assert sink.write(Change("a", order_of(4)), token=1) == SUPERSEDED
    now[0] = 60.1
    assert sink.write(Change("a", order_of(4)), token=1) == APPLIED


# Their addresses.


def test_addresses_of_one_app_share_a_database():
    shared: dict[Any, Any] = {}
    source = sources.connect(Address("memory://?queue=q&visibility=5s", "shop", shared))
    ledger = ledgers.connect(Address("memory://", "shop", shared), LedgerPolicy())
    table = sinks.connect(Address("memory://", "shop", shared))
    assert source.database is ledger.database is table.database
    assert source.visibility_s == 5.0


def test_the_grade_of_a_store_is_chosen_by_its_address():
    plain = sinks.connect(Address("memory://?grade=plain", "shop", {}))
    forgetful = sinks.connect(Address("memory://?grade=conditional&forget_deletions=60s", "shop", {}))
    assert (plain.grade, plain.forgets_deletions) == (Grade.PLAIN, False)
    assert (forgetful.grade, forgetful.forgets_deletions) == (Grade.CONDITIONAL, True)
    with pytest.raises(AddressError, match="write atomic, conditional or plain"):
        sinks.connect(Address("memory://?grade=perfect", "shop", {}))
