"""The ledger in memory: the rules applied to a dictionary, and what every other ledger is held to."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from keywise.adapters.memory.database import MemoryDatabase, MemoryScope
from keywise.adapters.memory.dump import MemoryLedgerTransfer
from keywise.core import ledger_steps, rules
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.controls import PLAIN, Controls, Pause
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Advance, Claim, Commit, CommitResult, Entry, LeaseTerms, LedgerPolicy, Phase, Refusal
from keywise.core.history import HistoryRecord
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class MemoryLedger:
    """The ledger of one pipeline in a memory database. It is also its own operator, control_store and history store."""

    def __init__(self, database: MemoryDatabase, scope: str, policy: LedgerPolicy) -> None:
        self.database = database
        self._scope = database.scope(scope)
        self.working_set = MemoryWorkingSet(database, self._scope, policy)
        self.admin = self.control_store = self.history_store = self
        self.transfer = MemoryLedgerTransfer(database, self._scope)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async with self.database.exclusive():
            return ledger_steps.claim(self.working_set, headers, terms, iter(self.database.token, None))

    async def renew(self, claims: Sequence[Claim], lease_s: float, phase: Phase = Phase.CLAIMED) -> list[Claim]:
        async with self.database.exclusive():
            return ledger_steps.renew(self.working_set, claims, lease_s, phase)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        async with self.database.exclusive():
            return ledger_steps.advance(self.working_set, advances)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        async with self.database.exclusive():
            return ledger_steps.commit(self.working_set, commits)

    async def fail(self, failures: Sequence[Failure]) -> None:
        async with self.database.exclusive():
            ledger_steps.fail(self.working_set, failures)

    async def release(self, claims: Sequence[Claim]) -> None:
        async with self.database.exclusive():
            ledger_steps.release(self.working_set, claims)

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        async with self.database.exclusive():
            return ledger_steps.dead_letter(self.working_set, requests)

    async def prune(self, retention_s: float) -> int:
        async with self.database.exclusive():
            entries, now, policy = self._scope.entries, self.working_set.now, self.working_set.policy
            gone = [key for key, entry in entries.items() if rules.is_prunable(entry, now, retention_s, policy)]
            known = sum(rules.is_known(entries[key]) for key in gone)
            for key in gone:
                self.working_set.set(key, None)
            return known

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        async with self.database.transaction():
            yield MemoryTransaction(self)

    async def inspect(self, key: str) -> Entry | None:
        return self._entries().get(key)

    async def counts(self) -> LedgerCounts:
        entries = self._entries().values()
        return LedgerCounts(
            keys=sum(entry.mark is not None for entry in entries),
            tombstones=sum(entry.deleted for entry in entries),
            claims=sum(entry.token != 0 and entry.lease_until > self.working_set.now for entry in entries),
            suspects=sum(entry.suspicions > 0 for entry in entries),
            dead=len(self.database.committed(self._scope.letters)),
        )

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        until = self.working_set.now - quiet_s
        suspects = [
            (rules.suspect_since(entry, self.working_set.policy), key) for key, entry in self._entries().items()
        ]
        return [key for since, key in sorted((s, key) for s, key in suspects if s is not None and s <= until)][:limit]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        async with self.database.exclusive():
            ledger_steps.finish_repair(self.working_set, claim, written)

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        async with self.database.exclusive():
            ledger_steps.mark_suspect(self.working_set, headers)
            self.set_controls(self.working_set.controls.with_resync(resync_due, self.working_set.now))

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        numbered = sorted(self.database.committed(self._scope.letters).items(), reverse=True)
        found = [(number, *kept) for number, kept in numbered if matching.covers(*kept)]
        return found[:limit]

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        async with self.database.exclusive():
            known = [number for number in numbers if number in self._scope.letters]
            for number in known:
                self.database.set(self._scope.letters, number, None)
            return len(known)

    async def now(self) -> float:
        return self.working_set.now

    async def controls(self) -> Controls:
        committed: dict[str, Controls] = self.database.committed(self._scope.controls)
        return committed.get("", PLAIN)

    async def pause(self, pause: Pause) -> None:
        await self._change(lambda controls: controls.with_pause(pause))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        before, after = await self._change(lambda controls: controls.without(keys, is_pattern))
        return after != before

    async def reset(self, claim: Claim) -> int | None:
        async with self.database.exclusive():
            return ledger_steps.reset(self.working_set, claim)

    async def raise_era(self) -> int | None:
        async with self.database.exclusive():
            entries, controls, now = self._scope.entries.values(), self.working_set.controls, self.working_set.now
            if any(entry.token != 0 and entry.lease_until > now for entry in entries):
                return None
            raised = controls.with_era_above(max((rules.era_of(entry, controls) for entry in entries), default=0))
            self.set_controls(raised)
            return raised.era

    async def fix_scale(self, scale: str) -> str:
        _, after = await self._change(lambda controls: controls.with_scale(scale))
        return after.scale

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        found, _ = await self._change(lambda controls: after if controls == before else controls)
        return found == before

    async def highest_generation(self) -> int:
        return max([0, *(entry.mark[2] for entry in self._entries().values() if entry.mark is not None)])

    async def keys(self, after: str, limit: int) -> list[str]:
        return sorted(key for key, entry in self._entries().items() if key > after and rules.is_known(entry))[:limit]

    async def held(self, after: str, limit: int) -> list[str]:
        entries, now = self._entries().items(), self.working_set.now
        return sorted(key for key, entry in entries if key > after and entry.token and entry.lease_until > now)[:limit]

    async def acquire(self, task: str, every_s: float) -> bool:
        async with self.database.exclusive():
            done_at = self._scope.periodic_locks.get(task)
            if done_at is not None and self.working_set.now < done_at + every_s:
                return False
            self.database.set(self._scope.periodic_locks, task, self.working_set.now)
            return True

    async def record(self, records: Sequence[HistoryRecord]) -> None:
        async with self.database.exclusive():
            for line in records:
                self.database.set(self._scope.lines, self.database.number(), line)

    async def history(self, key: str | None, limit: int) -> list[HistoryRecord]:
        newest = sorted(self._scope.lines.items(), reverse=True)
        return [line for _, line in newest if key is None or line.key == key][:limit]

    async def trim(self, age_s: float, records_max: int) -> int:
        async with self.database.exclusive():
            numbered, oldest = sorted(self._scope.lines.items()), self.working_set.now - age_s
            excess = max(0, len(numbered) - records_max)
            gone = [number for place, (number, line) in enumerate(numbered) if place < excess or line.at < oldest]
            for number in gone:
                self.database.set(self._scope.lines, number, None)
            return len(gone)

    def _entries(self) -> dict[str, Entry]:
        """Return the entries as an operator sees them: without what an open transaction has set."""
        return self.database.committed(self._scope.entries)

    async def _change(self, change: Callable[[Controls], Controls]) -> tuple[Controls, Controls]:
        """Change the controls in one atomic step; return them before and after."""
        async with self.database.exclusive():
            before = self.working_set.controls
            after = change(before)
            self.set_controls(after)
            return before, after

    def set_controls(self, controls: Controls) -> None:
        """Store the controls in the step, or the transaction, that is under way."""
        self.database.set(self._scope.controls, "", controls)


class MemoryWorkingSet:
    """All entries of one scope; each step sees and writes them directly."""

    def __init__(self, database: MemoryDatabase, scope: MemoryScope, policy: LedgerPolicy) -> None:
        self._database = database
        self._scope = scope
        self.policy = policy

    @property
    def now(self) -> float:
        return self._database.clock()

    @property
    def controls(self) -> Controls:
        return self._scope.controls.get("", PLAIN)

    def entry(self, key: str) -> Entry | None:
        return self._scope.entries.get(key)

    def set(self, key: str, entry: Entry | None) -> None:
        self._database.set(self._scope.entries, key, entry)

    def keep(self, letter: DeadLetter) -> None:
        self._database.set(self._scope.letters, self._database.number(), (self.now, letter))


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`memory://`: lives and dies with the process."""
    address.take()
    return MemoryLedger(address.shared(MemoryDatabase), address.name, policy)


class MemoryTransaction:
    """A transaction of the memory database, seen by the consumer."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.connection = ledger.database
        self._ledger = ledger
        self._working_set = ledger.working_set

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        return ledger_steps.refusals(self._working_set, headers, self._working_set.entry)

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        ledger_steps.mark(self._working_set, headers)

    async def advance(self, advances: Sequence[Advance]) -> list[Claim]:
        return ledger_steps.advance(self._working_set, advances, is_repeatable=False)

    async def commit(self, commits: Sequence[Commit]) -> list[Claim]:
        return ledger_steps.commit(self._working_set, commits, (CommitResult.COMMITTED,))

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        return ledger_steps.fail_unclaimed(self._working_set, headers)

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        ledger_steps.dead_letter_unclaimed(self._working_set, letters)

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        if self._working_set.controls != before:
            return False
        self._ledger.set_controls(after)
        return True

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        savepoint = self.connection.savepoint()
        try:
            yield
        except BaseException:
            self.connection.rollback_to(savepoint)
            raise
