"""The ledger in memory: the rules applied to a dictionary, and what every other ledger is held to."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

from msgspec.structs import replace

from keywise.adapters.memory.database import MemoryDatabase
from keywise.adapters.memory.dump import MemoryLedgerTransfer
from keywise.core import rules
from keywise.core.admin import LedgerCounts
from keywise.core.change import ChangeHeader
from keywise.core.controls import PLAIN, Controls, Pause
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter, DeadLetterRequest
from keywise.core.entry import Claim, CommitResult, Entry, LeaseTerms, LedgerPolicy, Refusal
from keywise.core.history import HistoryRecord
from keywise.core.ledger import ClaimResults, Failure, PluggedLedger
from keywise.core.transaction import Transaction
from keywise.core.url import Address


class MemoryLedger:
    """The ledger of one pipeline in a memory database. It is also its own operator, control_store and history store."""

    def __init__(self, database: MemoryDatabase, scope: str, policy: LedgerPolicy) -> None:
        self.database = database
        self._scope = database.scope(scope)
        self._policy = policy
        self.admin = self.control_store = self.history_store = self
        self.transfer = MemoryLedgerTransfer(database, self._scope)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def claim(self, headers: Sequence[ChangeHeader], terms: LeaseTerms) -> ClaimResults:
        async with self.database.exclusive():
            results = ClaimResults()
            for header in sorted(headers, key=lambda header: header.key):
                entry = self._entry(header.key)
                refusal = rules.decide_under(self._controls(), entry, header, self._now(), self._policy, terms)
                if refusal is not None:
                    results.refused[header.key] = refusal
                    continue
                token = self.database.token()
                lifted = rules.in_era(header, entry, self._controls())
                entry, claim = rules.grant(entry, lifted, token, self._now(), terms, self._policy)
                self._set(header.key, entry)
                results.granted.append(claim)
            return results

    async def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Claim]:
        async with self.database.exclusive():
            lost = []
            for claim in claims:
                entry = rules.renew(self._entry(claim.key), claim, self._now(), lease_s)
                if entry is None:
                    lost.append(claim)
                else:
                    self._set(claim.key, entry)
            return lost

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        async with self.database.exclusive():
            return self._commit(claims, allowed=(CommitResult.COMMITTED, CommitResult.ALREADY))

    async def fail(self, failures: Sequence[Failure]) -> None:
        async with self.database.exclusive():
            for failure in failures:
                claim = failure.claim
                entry = self._entry(claim.key)
                self._set(
                    claim.key,
                    rules.fail(entry, claim, failure.certainty, failure.retry_s, self._now(), self._policy),
                )

    async def release(self, claims: Sequence[Claim]) -> None:
        async with self.database.exclusive():
            for claim in claims:
                self._set(claim.key, rules.release(self._entry(claim.key), claim))

    async def dead_letter(self, requests: Sequence[DeadLetterRequest]) -> list[Claim]:
        async with self.database.exclusive():
            lost = []
            for request in requests:
                if (claim := request.claim) is not None:
                    entry = self._entry(claim.key)
                    if entry is None or entry.token != claim.token:
                        lost.append(claim)
                        continue
                    self._set(claim.key, rules.dead_letter(entry, claim, request.certainty, self._now(), self._policy))
                self._keep(request.letter)
            return lost

    async def prune(self, retention_s: float) -> int:
        async with self.database.exclusive():
            entries = self._scope.entries
            now, policy = self._now(), self._policy
            gone = [key for key, entry in entries.items() if rules.is_prunable(entry, now, retention_s, policy)]
            known = sum(rules.is_known(entries[key]) for key in gone)
            for key in gone:
                self._set(key, None)
            return known

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    async def inspect(self, key: str) -> Entry | None:
        return self._entry(key)

    async def counts(self) -> LedgerCounts:
        entries = self._scope.entries.values()
        return LedgerCounts(
            keys=sum(entry.mark is not None for entry in entries),
            tombstones=sum(entry.deleted for entry in entries),
            claims=sum(entry.token != 0 and entry.lease_until > self._now() for entry in entries),
            suspects=sum(entry.suspicions > 0 for entry in entries),
            dead=len(self._scope.letters),
        )

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        until = self._now() - quiet_s
        suspects = [(rules.suspect_since(entry, self._policy), key) for key, entry in self._scope.entries.items()]
        return [key for since, key in sorted((s, key) for s, key in suspects if s is not None and s <= until)][:limit]

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        async with self.database.exclusive():
            self._set(claim.key, rules.finish_repair(self._entry(claim.key), claim, written, self._now()))

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        async with self.database.exclusive():
            now, controls = self._now(), self._controls()
            for header in headers:
                entry = self._entry(header.key)
                lifted = rules.in_era(header, entry, controls)
                self._set(header.key, rules.mark_suspect(entry, lifted, now, self._policy))
            self._set_controls(controls.with_resync(resync_due, now))

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        numbered = sorted(self._scope.letters.items(), reverse=True)
        found = [(number, *kept) for number, kept in numbered if matching.covers(*kept)]
        return found[:limit]

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        known = [number for number in numbers if number in self._scope.letters]
        for number in known:
            self.database.set(self._scope.letters, number, None)
        return len(known)

    async def now(self) -> float:
        return self._now()

    async def controls(self) -> Controls:
        return self._controls()

    async def pause(self, pause: Pause) -> None:
        async with self.database.exclusive():
            others = self._controls().without(pause.keys, pause.is_pattern)
            self._set_controls(replace(others, pauses=(*others.pauses, pause)))

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        async with self.database.exclusive():
            before = self._controls()
            self._set_controls(before.without(keys, is_pattern))
            return self._controls() != before

    async def reset(self, claim: Claim) -> int | None:
        async with self.database.exclusive():
            entry = rules.reset(self._entry(claim.key), claim, self._controls())
            if entry is None:
                return None
            self._set(claim.key, entry)
            return entry.era

    async def raise_era(self) -> int | None:
        async with self.database.exclusive():
            entries, controls = self._scope.entries.values(), self._controls()
            if any(entry.token != 0 and entry.lease_until > self._now() for entry in entries):
                return None
            era = 1 + max((rules.era_of(entry, controls) for entry in entries), default=controls.era)
            self._set_controls(replace(controls, era=era))
            return era

    async def keys(self, after: str, limit: int) -> list[str]:
        return sorted(key for key, entry in self._scope.entries.items() if key > after and rules.is_known(entry))[
            :limit
        ]

    async def held(self, after: str, limit: int) -> list[str]:
        entries, now = self._scope.entries.items(), self._now()
        return sorted(key for key, entry in entries if key > after and entry.token and entry.lease_until > now)[:limit]

    async def acquire(self, task: str, every_s: float) -> bool:
        async with self.database.exclusive():
            done_at = self._scope.periodic_locks.get(task)
            if done_at is not None and self._now() < done_at + every_s:
                return False
            self.database.set(self._scope.periodic_locks, task, self._now())
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
            numbered, oldest = sorted(self._scope.lines.items()), self._now() - age_s
            excess = max(0, len(numbered) - records_max)
            gone = [number for place, (number, line) in enumerate(numbered) if place < excess or line.at < oldest]
            for number in gone:
                self.database.set(self._scope.lines, number, None)
            return len(gone)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        async with self.database.transaction():
            yield MemoryTransaction(self)

    def _commit(self, claims: Sequence[Claim], allowed: tuple[CommitResult, ...]) -> list[Claim]:
        refused = []
        for claim in claims:
            entry, result = rules.commit(self._entry(claim.key), claim, self._now(), self._policy)
            self._set(claim.key, entry)
            if result not in allowed:
                refused.append(claim)
        return refused

    def _controls(self) -> Controls:
        return self._scope.controls.get("", PLAIN)

    def _set_controls(self, controls: Controls) -> None:
        self.database.set(self._scope.controls, "", controls)

    def _keep(self, letter: DeadLetter) -> None:
        self.database.set(self._scope.letters, self.database.number(), (self._now(), letter))

    def _now(self) -> float:
        return self.database.clock()

    def _entry(self, key: str) -> Entry | None:
        return self._scope.entries.get(key)

    def _set(self, key: str, entry: Entry | None) -> None:
        self.database.set(self._scope.entries, key, entry)


def connect(address: Address, policy: LedgerPolicy) -> PluggedLedger:
    """`memory://`: lives and dies with the process."""
    address.take()
    return MemoryLedger(address.shared(MemoryDatabase), address.name, policy)


class MemoryTransaction:
    """A transaction of the memory database, seen by the consumer."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.connection = ledger.database
        self._ledger = ledger

    async def decide(self, headers: Sequence[ChangeHeader]) -> dict[str, Refusal]:
        ledger, now, controls = self._ledger, self._ledger._now(), self._ledger._controls()
        refusals = {}
        for header in headers:
            refusal = rules.decide_under(controls, ledger._entry(header.key), header, now, ledger._policy)
            if refusal is not None:
                refusals[header.key] = refusal
        return refusals

    async def mark(self, headers: Sequence[ChangeHeader]) -> None:
        ledger, now, controls = self._ledger, self._ledger._now(), self._ledger._controls()
        for header in headers:
            entry = ledger._entry(header.key)
            marked = rules.mark(entry, rules.in_era(header, entry, controls), now)
            ledger._set(header.key, rules.charged(marked, now, ledger._policy))

    async def commit(self, claims: Sequence[Claim]) -> list[Claim]:
        return self._ledger._commit(claims, allowed=(CommitResult.COMMITTED,))

    async def fail(self, headers: Sequence[ChangeHeader]) -> list[int]:
        counts = []
        for header in headers:
            before = self._ledger._entry(header.key)
            lifted = rules.in_era(header, before, self._ledger._controls())
            entry = rules.fail_unclaimed(before, lifted, self._ledger._now())
            self._ledger._set(header.key, entry)
            counts.append(entry.attempts)
        return counts

    async def dead_letter(self, letters: Sequence[tuple[ChangeHeader | None, DeadLetter]]) -> None:
        for header, letter in letters:
            if header is not None:
                self._ledger._set(header.key, rules.bury_unclaimed(self._ledger._entry(header.key)))
            self._ledger._keep(letter)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        savepoint = self.connection.savepoint()
        try:
            yield
        except BaseException:
            self.connection.rollback_to(savepoint)
            raise
