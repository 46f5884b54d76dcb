"""Whether one history of each key explains all answers that workers got who asked at the same time."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from keywise.core.change import ChangeHeader, order_of
from keywise.core.entry import Commit, LeaseTerms, Refusal

CONNECTIONS, KEYS, ROUNDS, LEASE_S = 8, 12, 30, 60.0


@dataclass
class Told:
    """One answer of the ledger, between two readings of a counter that all workers share."""

    key: str
    version: int
    reason: str
    begun: int
    ended: int
    mark: int | None = None


class Witness:
    """Notes who holds what, and everything that was told."""

    def __init__(self) -> None:
        self.moments = itertools.count()
        self.holders: dict[str, str] = {}
        self.violations: list[str] = []
        self.told: list[Told] = []

    def holds(self, key: str, owner: str) -> None:
        if key in self.holders:
            self.violations.append(f"{owner} got {key} while {self.holders[key]} held it")
        self.holders[key] = owner

    def hears(self, refusals: dict[str, Refusal], begun: int, ended: int) -> None:
        for key, refusal in refusals.items():
            if refusal.mark is not None:
                self.told.append(Told(key, 0, refusal.reason.value, begun, ended, refusal.mark[1]))

    def lets_go(self, key: str) -> None:
        del self.holders[key]


def some_headers(rng: random.Random, step: int) -> list[ChangeHeader]:
    """Of some keys, each at a version that others may be at, before or behind."""
    return [
        ChangeHeader(f"k{n}", order_of(step + rng.randrange(20))) for n in rng.sample(range(KEYS), rng.randint(1, KEYS))
    ]


async def claimed(ledger: Any, owner: str, witness: Witness, rng: random.Random) -> None:
    """Claim some keys at random versions, and commit or give back what was granted."""
    for step in range(ROUNDS):
        headers = some_headers(rng, step)
        begun = next(witness.moments)
        results = await ledger.claim(headers, LeaseTerms(owner, LEASE_S))
        ended = next(witness.moments)
        witness.hears(results.refused, begun, ended)
        for claim in results.granted:
            witness.holds(claim.key, owner)
        for claim in results.granted:
            witness.lets_go(claim.key)
        kept = [claim for claim in results.granted if rng.random() < 0.8]
        begun = next(witness.moments)
        assert await ledger.commit([Commit(claim) for claim in kept]) == []
        ended = next(witness.moments)
        witness.told += (Told(claim.key, claim.order[1], "committed", begun, ended) for claim in kept)
        await ledger.release([claim for claim in results.granted if claim not in kept])


async def transacted(ledger: Any, owner: str, witness: Witness, rng: random.Random) -> None:
    """Decide and mark in transactions, in one step or in two."""
    for step in range(ROUNDS):
        headers = some_headers(rng, step)
        begun = next(witness.moments)
        async with ledger.transaction() as transaction:
            decide = transaction.decide if rng.random() < 0.5 else transaction.decide_and_mark
            refusals = await decide(headers)
            allowed = [header for header in headers if header.key not in refusals]
            for header in allowed:
                witness.holds(header.key, owner)
            await transaction.mark(allowed)
            for header in allowed:
                witness.lets_go(header.key)
        ended = next(witness.moments)
        witness.hears(refusals, begun, ended)
        witness.told += (Told(header.key, header.order[1], "committed", begun, ended) for header in allowed)


def faults(told: list[Told]) -> list[str]:
    """Why no single history of a key explains the answers; nothing if one does.

    Commits of a key can only have come in the order of their versions. So each has to begin before those of all
    higher versions have ended, and a refusal needs its mark to have been committed, and nothing above it before.
    """
    found = []
    commits = sorted((one for one in told if one.reason == "committed"), key=lambda one: one.version)
    if len({one.version for one in commits}) < len(commits):
        found.append("a version was committed twice")
    for lower, higher in itertools.combinations(commits, 2):
        if lower.begun > higher.ended:
            found.append(f"{lower} came after {higher}")
    by_version = {one.version: one for one in commits}
    for one in told:
        if one.reason == "committed":
            continue
        mark = by_version.get(one.mark)
        if mark is None or mark.begun > one.ended:
            found.append(f"{one} names a mark that was not there")
        found += (
            f"{one} overlooks {later}" for later in commits if later.version > one.mark and later.ended < one.begun
        )
    return found


async def agree(open_ledger: Callable[[AsyncExitStack], Awaitable[Any]], *works: Callable[..., Any]) -> None:
    """Let workers, each on a connection of its own, do these kinds of work in turns; raise unless all fits together."""
    witness = Witness()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(CONNECTIONS):
            ledger = await open_ledger(stack)
            act = works[number % len(works)]
            group.create_task(act(ledger, f"w{number}", witness, random.Random(number)))
    assert witness.violations == []
    for key in {one.key for one in witness.told}:
        assert faults([one for one in witness.told if one.key == key]) == []
    assert len(witness.told) > 100, "too little was told to prove anything"
