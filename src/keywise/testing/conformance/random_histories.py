"""Random histories: a ledger answers any calls in any order as the memory ledger does."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.ledger import MemoryLedger
from keywise.core.change import UNVERSIONED_GENERATION, VERSION_MAX, ChangeHeader, Order, above
from keywise.core.controls import Pause
from keywise.core.dead_letter import DeadLetter, DeadLetterRequest
from keywise.core.entry import (
    Advance,
    Certainty,
    Claim,
    Commit,
    Entry,
    LeaseTerms,
    LedgerPolicy,
    Level,
    Phase,
    Position,
    Refusal,
)
from keywise.core.ledger import Failure
from keywise.testing.conformance.claims import LedgerBench
from keywise.testing.conformance.promise import Promises

HISTORIES = 40
"""The number of histories for each policy."""
OPERATIONS = 60

# Time passes in steps of 128 s, and no sum of these durations is close to a multiple of that.
# So no answer depends on the few seconds by which a store's own clock advances meanwhile.
STEP_S = 128.0
LEASE_S = STEP_S + 10.0
RETRY_S = (20.0, STEP_S + 20.0)
OVERDUE_SHARE = 0.15
REDELIVERY_S = 2 * STEP_S + 40.0
RETENTION_S = 3 * STEP_S + 60.0
TOLERANCE_S = 4.0

RANDOM_HISTORY_PROMISES: Promises[LedgerBench] = Promises()


class _HistoryRolledBack(Exception):
    """Leaves a transaction or a savepoint on purpose."""


PLAIN = LedgerPolicy(True, REDELIVERY_S, RETENTION_S)
SAFE = LedgerPolicy(False, REDELIVERY_S)


@RANDOM_HISTORY_PROMISES.add(PLAIN)
async def random_histories_answer_as_memory_does_for_a_plain_sink(bench: LedgerBench) -> None:
    """Any history of calls gets the answers of the memory ledger, and leaves the same entries (plain sink)."""
    await compare(bench, PLAIN, range(HISTORIES))


@RANDOM_HISTORY_PROMISES.add(SAFE)
async def random_histories_answer_as_memory_does_for_a_safe_sink(bench: LedgerBench) -> None:
    """Any history of calls gets the answers of the memory ledger, and leaves the same entries (safe sink)."""
    await compare(bench, SAFE, range(1000, 1000 + HISTORIES))


async def compare(bench: LedgerBench, policy: LedgerPolicy, seeds: range) -> None:
    """Run histories on the ledger under test and on a memory ledger, side by side."""
    twins = Twins(bench, policy)
    for seed in seeds:
        history = RandomHistory(twins, seed)
        try:
            await history.run()
        except AssertionError as error:
            steps = "\n  ".join(history.steps[-25:])
            raise AssertionError(f"history {seed} differs from memory: {error}; its last steps:\n  {steps}") from error


class Twins:
    """The ledger under test, and a memory ledger that gets the same calls at the same time."""

    def __init__(self, bench: LedgerBench, policy: LedgerPolicy) -> None:
        self.bench = bench
        self.now = 0.0
        self._memory = MemoryLedger(MemoryDatabase(clock=lambda: self.now), "twin", policy)
        self._tokens: dict[int, int] = {0: 0}
        """Maps the tokens of the ledger under test to those in memory."""

    async def ask(self, ledger: Any, act: Callable[[Any, Callable[[Any], Any]], Awaitable[Any]]) -> tuple[Any, Any]:
        """Make the same call on both; `act` gets a ledger, and a function that picks its claim from a pair."""
        self.now = await self.bench.ledger.now()
        return await act(ledger, lambda pair: pair[0]), await act(self._memory, lambda pair: pair[1])

    def pair(self, claim: Claim, twin: Claim) -> tuple[Claim, Claim]:
        """Record that two claims are equivalent from now on."""
        if claim.token in self._tokens:
            raise AssertionError(f"the token {claim.token} was given twice")
        self._tokens[claim.token] = twin.token
        agree("the claim", replace(claim, token=twin.token), twin)
        return claim, twin

    async def agree_on(self, key: str) -> None:
        """Compare the entries of a key."""
        seen: Entry | None = await self.bench.ledger.inspect(key)
        if seen is not None:
            seen = replace(seen, token=self._tokens.get(seen.token, -1))
        agree(f"the entry of {key!r}", seen, await self._memory.inspect(key))


class RandomHistory:
    """One seeded history on keys of its own."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self._twins = twins
        self._rng = random.Random(seed)
        self._keys = [f"{seed} {name}" for name in "abc"]
        self._claims: list[tuple[Claim, Claim]] = []
        self._exclusions: list[tuple[Claim, Claim]] = []
        self.steps: list[str] = []

    async def run(self) -> None:
        """Prune what other histories left, then take random steps, and compare the entries after each."""
        self._twins.bench.advance(STEP_S * 20)
        await self._prune()
        for _ in range(OPERATIONS):
            act = self._rng.choices([act for act, _ in self._acts()], [weight for _, weight in self._acts()])[0]
            await act()
            for key in self._keys:
                await self._twins.agree_on(key)
        for pause in (await self._twins.bench.ledger.control_store.controls()).pauses:
            await self._ask(
                ("resume", pause),
                lambda ledger, _: ledger.control_store.resume(pause.keys, pause.is_pattern),  # noqa: B023 - awaited here
            )
        await self._counts()

    def _acts(self) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        return [
            (self._claim, 30),
            (self._wait, 14),
            (self._advance, 8),
            (self._commit, 12),
            (self._fail, 10),
            (self._transact, 14 if self._twins.bench.has_transactions else 0),
            (self._renew, 5),
            (self._release, 5),
            (self._dead_letter, 6),
            (self._finish_repair, 4),
            (self._mark_suspect, 2),
            (self._prune, 3),
            (self._counts, 2),
            (self._pause, 3),
            (self._resume, 5),
            (self._reset, 4),
        ]

    # Random arguments.

    def _order(self) -> Order:
        if self._rng.random() < 0.06:
            return (0, 0, UNVERSIONED_GENERATION)
        version = self._rng.choice((VERSION_MAX, -5)) if self._rng.random() < 0.03 else self._rng.randrange(1, 9)
        return (int(self._rng.random() < 0.03), version, int(self._rng.random() < 0.1))

    def _header(self, key: str, *, exclusion: float = 0.0) -> ChangeHeader:
        order = None if self._rng.random() < exclusion else self._order()
        age_s = self._rng.choice((0.0, STEP_S, RETENTION_S - STEP_S / 2, RETENTION_S + STEP_S / 2))
        deleted = order is not None and self._rng.random() < 0.3
        is_row = order is not None and order[2] > 0 and self._rng.random() < 0.5
        return ChangeHeader(key, order, deleted, self._twins.now - age_s, is_row)

    def _some_keys(self) -> list[str]:
        return self._rng.sample(self._keys, self._rng.randint(1, 3))

    def _some_claims(self) -> list[tuple[Claim, Claim]]:
        recent = self._claims[-6:]
        return self._rng.sample(recent, self._rng.randint(0, min(2, len(recent))))

    def _some_advances(self) -> list[tuple[tuple[Claim, Claim], tuple[Position, int, Order | None]]]:
        return [
            (pair, (self._position(), self._rng.choice((0, 0, 5, 9)), self._restart(pair[1])))
            for pair in self._some_claims()
        ]

    def _position(self) -> Position:
        rng = self._rng
        return Position(rng.randrange(4), rng.randbytes(rng.choice((0, 3, 300))))

    def _restart(self, claim: Claim) -> Order | None:
        """Pick the order of a restart, or none. The one after an earlier restart may be the same again."""
        order = claim.order
        if order is None or self._rng.random() < 0.7:
            return None
        return self._rng.choice((above(order), above(above(order))))

    def _some_commits(self) -> list[tuple[tuple[Claim, Claim], tuple[bool, int | None, bytes, bool]]]:
        rng = self._rng
        return [
            (
                pair,
                (
                    rng.random() < OVERDUE_SHARE,
                    rng.choice((None, None, None, 0, 7)),
                    rng.choice((b"", b"", rng.randbytes(20))),
                    rng.random() < 0.2,
                ),
            )
            for pair in self._some_claims()
        ]

    def _letter(self, key: str) -> DeadLetter:
        version = self._rng.choice((None, self._rng.randrange(9)))
        headers = self._rng.choice((None, {"a": "b"}))
        return DeadLetter(f"cause {self._rng.random()}", self._rng.randbytes(4), key, version, headers, 1.5, "source")

    async def _ask(self, step: object, act: Callable[[Any, Callable[[Any], Any]], Awaitable[Any]]) -> Any:
        """Make a call on both ledgers; the caller compares the answers."""
        self.steps.append(repr(step))
        bench = self._twins.bench
        return await self._twins.ask(self._rng.choice((bench.ledger, bench.another)), act)

    # Steps.

    async def _claim(self) -> None:
        headers = [self._header(key, exclusion=0.12) for key in self._some_keys()]
        owner, level = self._rng.choice(("w1", "w2")), self._rng.choice((Level.USUAL, Level.USUAL, *Level, Level.ALONE))
        terms = LeaseTerms(owner, LEASE_S, level, despite_pause=self._rng.random() < 0.2)
        seen, twin = await self._ask(("claim", headers, terms), lambda ledger, _: ledger.claim(headers, terms))
        agree("the refusals", seen.refused, twin.refused)
        found = {claim.key: claim for claim in seen.granted}
        agree("the keys that were granted", sorted(found), sorted(claim.key for claim in twin.granted))
        for claim in twin.granted:
            pair = self._twins.pair(found[claim.key], claim)
            (self._claims if claim.order is not None else self._exclusions).append(pair)

    async def _wait(self) -> None:
        steps = self._rng.choice((1, 1, 1, 2, 3, 8))
        self.steps.append(f"wait {steps}")
        self._twins.bench.advance(steps * STEP_S)

    async def _advance(self) -> None:
        advances = self._some_advances()
        step = ("advance", [(pair[1], details) for pair, details in advances])
        seen, twin = await self._ask(
            step, lambda ledger, mine: ledger.advance([Advance(mine(pair), *details) for pair, details in advances])
        )
        self._agree_on_claims("the refused advances", seen, twin)

    async def _commit(self) -> None:
        commits = self._some_commits()
        step = ("commit", [(pair[1], details) for pair, details in commits])
        seen, twin = await self._ask(
            step, lambda ledger, mine: ledger.commit([Commit(mine(pair), *details) for pair, details in commits])
        )
        self._agree_on_claims("the refused commits", seen, twin)

    async def _renew(self) -> None:
        claims, phase = self._some_claims(), self._rng.choice(list(Phase))
        step = ("renew", [twin for _, twin in claims], phase)
        seen, twin = await self._ask(
            step, lambda ledger, mine: ledger.renew([mine(pair) for pair in claims], LEASE_S, phase)
        )
        self._agree_on_claims("the lost claims", seen, twin)

    async def _fail(self) -> None:
        rng = self._rng
        failures = [
            (pair, (rng.choice(list(Certainty)), rng.choice(RETRY_S), rng.random() < OVERDUE_SHARE, rng.random() < 0.8))
            for pair in self._some_claims()
        ]
        step = ("fail", [(pair[1], *details) for pair, details in failures])
        await self._ask(
            step, lambda ledger, mine: ledger.fail([Failure(mine(pair), *details) for pair, details in failures])
        )

    async def _release(self) -> None:
        claims = self._some_claims() + self._exclusions[-1:]
        step = ("release", [twin for _, twin in claims])
        await self._ask(step, lambda ledger, mine: ledger.release([mine(pair) for pair in claims]))

    async def _dead_letter(self) -> None:
        requests: list[tuple[Any, Certainty, DeadLetter]] = [
            (pair, self._rng.choice(list(Certainty)), self._letter(pair[1].key)) for pair in self._some_claims()
        ]
        if self._rng.random() < 0.3:
            requests.append((None, Certainty.CLEAN, self._letter("")))
        step = ("dead_letter", [(pair and pair[1], certainty) for pair, certainty, _ in requests])
        seen, twin = await self._ask(
            step,
            lambda ledger, mine: ledger.dead_letter(
                [DeadLetterRequest(letter, pair and mine(pair), sure) for pair, sure, letter in requests]
            ),
        )
        self._agree_on_claims("the lost claims", seen, twin)

    async def _mark_suspect(self) -> None:
        headers = [self._header(key, exclusion=0.1) for key in self._some_keys()]
        await self._ask(("mark_suspect", headers), lambda ledger, _: ledger.mark_suspect(headers))

    async def _finish_repair(self) -> None:
        if not self._exclusions:
            return
        pair = self._rng.choice(self._exclusions[-2:])
        written = self._rng.choice((None, ChangeHeader(pair[1].key, self._order(), self._rng.random() < 0.3)))
        await self._ask(
            ("finish_repair", pair[1], written), lambda ledger, mine: ledger.finish_repair(mine(pair), written)
        )

    async def _pause(self) -> None:
        keys, is_pattern = self._pausable()
        pause = Pause(keys, is_pattern, 1.0, "operator", "why")
        await self._ask(pause, lambda ledger, _: ledger.control_store.pause(pause))
        await self._controls()

    async def _resume(self) -> None:
        keys, is_pattern = self._pausable()
        step = ("resume", keys, is_pattern)
        seen, twin = await self._ask(step, lambda ledger, _: ledger.control_store.resume(keys, is_pattern))
        agree("whether there was a pause", seen, twin)
        await self._controls()

    def _pausable(self) -> tuple[str, bool]:
        """Pick a key of this history, or a pattern for several; other histories have keys of their own."""
        key = self._rng.choice(self._keys)
        return self._rng.choice(((key, False), (f"{key[:-1]}[ab]", True), (f"{key[:-1]}*", True)))

    async def _controls(self) -> None:
        seen, twin = await self._ask("controls", lambda ledger, _: ledger.control_store.controls())
        agree("the controls", seen, twin)

    async def _reset(self) -> None:
        for pair in self._exclusions[-1:]:
            seen, twin = await self._ask(
                ("reset", pair[1]),
                lambda ledger, mine: ledger.control_store.reset(mine(pair)),  # noqa: B023 - it is awaited here
            )
            agree("the era", seen, twin)

    async def _prune(self) -> None:
        seen, twin = await self._ask("prune", lambda ledger, _: ledger.prune(RETENTION_S))
        agree("the number of pruned keys", seen, twin)

    async def _counts(self) -> None:
        seen, twin = await self._ask("counts", lambda ledger, _: ledger.counts())
        agree("the counts", seen, twin)
        seen, twin = await self._ask("generation", lambda ledger, _: ledger.control_store.highest_generation())
        agree("the highest generation", seen, twin)
        quiet_s = self._rng.choice((0.0, STEP_S / 2, STEP_S * 2.5))
        seen, twin = await self._ask("suspects", lambda ledger, _: ledger.suspects(10_000, quiet_s))
        agree("the suspects", sorted(seen), sorted(twin))
        seen, twin = await self._ask("letters", lambda ledger, _: ledger.dead_letters(20))
        agree("the letters", [(at, letter) for _, at, letter in seen], [(at, letter) for _, at, letter in twin])

    # Steps inside a transaction.

    async def _transact(self) -> None:
        """Take a few steps in one transaction that may be rolled back, each perhaps in a savepoint that may be too."""
        parts = [self._part() for _ in range(self._rng.randint(1, 3))]
        rolls_back = self._rng.random() < 0.25
        step = ("transact", [part[0] for part in parts], "rolled back" if rolls_back else "committed")

        async def act(ledger: Any, mine: Callable[[Any], Any]) -> list[Any]:
            answers: list[Any] = []
            try:
                async with ledger.transaction() as transaction:
                    for name, arguments, savepoint in parts:
                        await _within(savepoint, transaction, name, arguments, mine, answers)
                    if rolls_back:
                        raise _HistoryRolledBack
            except _HistoryRolledBack:
                pass
            return answers

        seen, twin = await self._ask(step, act)
        agree("the answers inside", seen, twin)

    def _part(self) -> tuple[str, Any, str]:
        """Pick one step: its name, its arguments, and whether it runs in a savepoint that is kept or undone."""
        savepoint = self._rng.choices(("none", "kept", "undone"), (6, 2, 2))[0]
        name = self._rng.choices(("mark", "fail", "dead_letter", "commit", "advance"), (5, 2, 2, 3, 2))[0]
        if name == "commit":
            return name, self._some_commits(), savepoint
        if name == "advance":
            return name, self._some_advances(), savepoint
        headers = [self._header(key) for key in self._some_keys()]
        if name == "dead_letter":
            letters = [(header if self._rng.random() < 0.8 else None, self._letter(header.key)) for header in headers]
            return name, letters, savepoint
        return name, headers, savepoint

    def _agree_on_claims(self, what: str, seen: list[Claim], twin: list[Claim]) -> None:
        agree(what, [(claim.key, claim.order) for claim in seen], [(claim.key, claim.order) for claim in twin])


async def _within(
    savepoint: str, transaction: Any, name: str, arguments: Any, mine: Callable[[Any], Any], answers: list[Any]
) -> None:
    if savepoint == "none":
        await _step(transaction, name, arguments, mine, answers)
        return
    try:
        async with transaction.savepoint():
            await _step(transaction, name, arguments, mine, answers)
            if savepoint == "undone":
                raise _HistoryRolledBack
    except _HistoryRolledBack:
        pass


async def _step(transaction: Any, name: str, arguments: Any, mine: Callable[[Any], Any], answers: list[Any]) -> None:
    """Take one step of a transaction as a consumer does: mark or fail only what was just allowed."""
    if name in {"commit", "advance"}:
        if name == "commit":
            refused = await transaction.commit([Commit(mine(pair), *details) for pair, details in arguments])
        else:
            refused = await transaction.advance([Advance(mine(pair), *details) for pair, details in arguments])
        answers.append([(claim.key, claim.order) for claim in refused])
        return
    if name == "dead_letter":
        await transaction.dead_letter(arguments)
        return
    refusals: dict[str, Refusal] = await transaction.decide(arguments)
    answers.append(refusals)
    allowed = [header for header in arguments if header.key not in refusals]
    answers.append(await (transaction.mark if name == "mark" else transaction.fail)(allowed))


def agree(what: str, seen: Any, wanted: Any) -> None:
    """Raise unless both are equal; times may differ by rounding, and as far as a store's clock advances."""
    if not _is_like(seen, wanted):
        raise AssertionError(f"{what} differ: {seen} instead of {wanted}")


def _is_like(seen: Any, wanted: Any) -> bool:
    if isinstance(seen, float) or isinstance(wanted, float):
        return isinstance(seen, float | int) and abs(seen - wanted) <= TOLERANCE_S
    if isinstance(wanted, msgspec.Struct):
        return type(seen) is type(wanted) and all(
            _is_like(getattr(seen, name), getattr(wanted, name)) for name in wanted.__struct_fields__
        )
    if isinstance(wanted, dict):
        return (
            isinstance(seen, dict)
            and seen.keys() == wanted.keys()
            and all(_is_like(seen[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, list | tuple):
        return type(seen) is type(wanted) and len(seen) == len(wanted) and all(map(_is_like, seen, wanted))
    return bool(seen == wanted)
