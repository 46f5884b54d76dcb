"""Deciding and marking in one step answers as two steps do, and leaves the same entries."""

from contextlib import asynccontextmanager

import pytest

from adapters.postgres.benches import postgres_ledger
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import Pause
from keywise.core.entry import LedgerPolicy
from keywise.testing.conformance.random_histories import HISTORIES, PLAIN, SAFE, agree, compare
from running import run

pytestmark = pytest.mark.server("postgres")


class _Undone(Exception):
    """Leaves a savepoint on purpose."""


class Marking:
    """A transaction that also tries the one step wherever two steps are taken."""

    def __init__(self, transaction) -> None:
        self._transaction = transaction
        self._decided = []

    def __getattr__(self, name: str):
        return getattr(self._transaction, name)

    async def decide(self, headers):
        try:
            async with self._transaction.savepoint():
                at_once = await self._transaction.decide_and_mark(headers)
                raise _Undone
        except _Undone:
            pass
        refusals = await self._transaction.decide(headers)
        agree("the refusals at once", at_once, refusals)
        self._decided = headers
        return refusals

    async def mark(self, headers) -> None:
        await self._transaction.decide_and_mark(self._decided)
        await self._transaction.mark(headers)


class MarkingLedger:
    """A ledger whose transactions are marking."""

    def __init__(self, ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str):
        return getattr(self._ledger, name)

    @asynccontextmanager
    async def transaction(self):
        async with self._ledger.transaction() as transaction:
            yield Marking(transaction)


@asynccontextmanager
async def marking(policy: LedgerPolicy):
    async with postgres_ledger(policy) as bench:
        bench.ledger, bench.another = MarkingLedger(bench.ledger), MarkingLedger(bench.another)
        yield bench


@pytest.mark.parametrize("policy", [PLAIN, SAFE], ids=["plain", "safe"])
def test_random_histories_answer_as_memory_does_also_at_once(policy):
    async def main() -> None:
        async with marking(policy) as bench:
            await compare(bench, policy, range(2000, 2000 + HISTORIES // 4))

    run(main(), limit_s=110)


def test_what_an_operator_set_is_heeded_at_once():
    async def main() -> None:
        async with postgres_ledger(LedgerPolicy()) as bench:
            await bench.ledger.control_store.pause(Pause("a"))
            async with bench.ledger.transaction() as transaction:
                refusals = await transaction.decide_and_mark(
                    [ChangeHeader("a", order_of(1)), ChangeHeader("b", order_of(1))]
                )
                assert {key: refusal.reason.value for key, refusal in refusals.items()} == {"a": "paused"}
                await transaction.mark([ChangeHeader("b", order_of(1))])
            assert await bench.ledger.inspect("a") is None
            assert (await bench.entry("b")).mark == order_of(1)

    run(main())


def test_deletions_and_late_changes_are_judged_at_once():
    async def main() -> None:
        async with postgres_ledger(LedgerPolicy(retention_s=100.0)) as bench:
            now = await bench.ledger.now()
            headers = [
                ChangeHeader("a", order_of(1), True, now),
                ChangeHeader("b", order_of(1), False, now),
                ChangeHeader("c", order_of(1), sent_at=0.0),
            ]
            for batch, refused in ((headers[:2], []), (headers[2:], ["c"])):
                async with bench.ledger.transaction() as transaction:
                    assert list(await transaction.decide_and_mark(batch)) == refused
                    await transaction.mark([header for header in batch if header.key not in refused])
            assert [(await bench.entry(key)).deleted for key in "ab"] == [True, False]
            assert await bench.ledger.inspect("c") is None

    run(main())
