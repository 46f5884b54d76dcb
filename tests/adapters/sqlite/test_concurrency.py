"""Two openings of one SQLite file, each in a thread with an event loop of its own, never both hold a key."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keywise.adapters.sqlite.database import SqliteDatabase
from keywise.adapters.sqlite.ledger.ledger import SqliteLedger
from keywise.adapters.sqlite.ledger.working_set import TOKEN_NONCE_BITS
from keywise.adapters.sqlite.source import SqliteSource
from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Commit, LeaseTerms, LedgerPolicy
from running import run

KEYS, ROUNDS, LEASE_S = 20, 25, 60.0


class Witness:
    """Notes who holds what, and every moment at which two do."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders: dict[str, str] = {}
        self.granted: list[tuple[str, int]] = []
        self.violations: list[str] = []

    def holds(self, key: str, version: int, owner: str) -> None:
        with self._guard:
            if key in self._holders:
                self.violations.append(f"{owner} got {key} while {self._holders[key]} held it")
            self._holders[key] = owner
            self.granted.append((key, version))

    def lets_go(self, key: str) -> None:
        with self._guard:
            del self._holders[key]


async def work(path: Path, owner: str, witness: Witness) -> None:
    """Claim all keys at each version; commit what was granted."""
    async with SqliteDatabase(str(path)) as database, SqliteLedger(database, "scope", LedgerPolicy()) as ledger:
        for version in range(1, ROUNDS + 1):
            headers = [ChangeHeader(f"k{number}", order_of(version)) for number in range(KEYS)]
            results = await ledger.claim(headers, LeaseTerms(owner, LEASE_S))
            for claim in results.granted:
                witness.holds(claim.key, version, owner)
            for claim in results.granted:
                witness.lets_go(claim.key)
            assert await ledger.commit([Commit(claim) for claim in results.granted]) == []


def test_no_two_tokens_have_the_same_number(tmp_path):
    """Rule 9: the nonce is for a file that was restored; the numbers alone must tell all claims apart."""

    async def story() -> list[int]:
        tokens: list[int] = []
        async with (
            SqliteDatabase(str(tmp_path / "one.db")) as database,
            SqliteLedger(database, "one", LedgerPolicy()) as ledger,
            SqliteLedger(database, "other", LedgerPolicy()) as other,
        ):
            for number, count in enumerate((1, 3, 5, 2)):
                for some in (ledger, other):
                    headers = [ChangeHeader(f"{number}.{i}", order_of(1)) for i in range(count)]
                    tokens += (claim.token for claim in (await some.claim(headers, LeaseTerms("w1", LEASE_S))).granted)
        return tokens

    numbers = [token >> TOKEN_NONCE_BITS for token in run(story())]
    assert 22 == len(numbers) == len(set(numbers))


async def take(path: Path, found: list[int]) -> None:
    async with SqliteDatabase(str(path)) as database, SqliteSource(database, "queue") as source:
        while deliveries := await source.receive(7, 0.0):
            found += (int(one.id) for one in deliveries)


def in_threads(*coroutines) -> None:
    with ThreadPoolExecutor(len(coroutines)) as threads:
        for future in [threads.submit(asyncio.run, coroutine) for coroutine in coroutines]:
            future.result(timeout=60)


@pytest.mark.parametrize("openings", [2, 4])
def test_threads_that_claim_the_same_keys_never_hold_one_together(tmp_path, openings):
    witness = Witness()
    in_threads(*(work(tmp_path / "ledger.db", f"w{number}", witness) for number in range(openings)))
    assert witness.violations == []
    assert len(witness.granted) == len(set(witness.granted)), "a version was granted twice"
    newest = {key for key, version in witness.granted if version == ROUNDS}
    assert len(newest) == KEYS


def test_threads_that_receive_from_one_queue_never_get_the_same_message(tmp_path):
    path = tmp_path / "queue.db"

    async def send() -> None:
        async with SqliteDatabase(str(path)) as database, SqliteSource(database, "queue") as source:
            await source.send([b"%d" % number for number in range(500)])

    asyncio.run(send())
    found: list[list[int]] = [[], [], []]
    in_threads(*(take(path, mine) for mine in found))
    everything = [number for mine in found for number in mine]
    assert 500 == len(everything) == len(set(everything))
