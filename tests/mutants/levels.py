"""Variants that break one clause of the rule on deaths: levels, probation, and running alone."""

from msgspec.structs import replace

from keywise.core import rules
from keywise.core.change import ChangeHeader
from keywise.core.entry import Claim, Entry, LeaseTerms, LedgerPolicy, Level, Phase, Refusal
from keywise.core.ledger import Ledger
from keywise.core.sink import Grade
from keywise.flow.heartbeat import Heartbeat
from keywise.flow.leased.probation import AloneTurns, ProbationWindow
from keywise.flow.leased.repairs import RepairLoop
from keywise.flow.leased.worker import LeasedWorker
from mutants.mutant import Mutant

_grant, _release, _against_company = rules.grant, rules.release, rules._against_company


def _company_counts(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    if entry is not None and entry.phase is Phase.ACCOMPANIED:
        entry = replace(entry, phase=Phase.BEGUN)
    return _grant(entry, header, token, now, terms, policy)


def _late_death_forgotten(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    return replace(after, late_deaths=0), replace(claim, late_deaths=0)


def _other_order_starts_again(
    entry: Entry | None, header: ChangeHeader, token: int, now: float, terms: LeaseTerms, policy: LedgerPolicy
) -> tuple[Entry, Claim]:
    after, claim = _grant(entry, header, token, now, terms, policy)
    if entry is None or header.order is None or header.order == entry.tried:
        return after, claim
    return replace(after, deaths=Level.USUAL), replace(claim, level=Level.USUAL)


def _level_released(entry: Entry | None, claim: Claim) -> Entry | None:
    after = _release(entry, claim)
    is_mine = entry is not None and entry.token == claim.token
    return rules.kept(replace(after, deaths=Level.USUAL)) if after is not None and is_mine else after


def _free_in_any_company(entry: Entry, terms: LeaseTerms | None) -> Refusal | None:
    return None if entry.token == 0 else _against_company(entry, terms)


async def _not_noted(self: Heartbeat, ledger: Ledger, claim: Claim) -> bool:
    return True


def _always_idle(self: LeasedWorker, most: int) -> bool:
    return True


def _always_due(self: AloneTurns, now: float, *, others_wait: bool) -> bool:
    return now >= self.not_before


def _no_pause(self: AloneTurns, now: float, *, others_wait: bool) -> bool:
    return self._begun >= self._begun_before or not others_wait


async def _drain_first(self: LeasedWorker) -> bool:
    with self._company.draining():
        self._undo(self._claimed.take_all())
        await self._until(lambda: self._is_idle(0), self._pipeline.settings.lease_s)
        tickets = self._lanes.take_on_probation(Level.ALONE)
        for job in await self._claim(tickets, Level.ALONE):
            await self._run_drained(job)
    return bool(tickets)


def _not_reset(self: ProbationWindow, level: Level) -> None:
    return None


def _all_at_once(self: ProbationWindow, now: float, *, sole_waits: bool, others_wait: bool) -> tuple[Level, int]:
    return (Level.PROBATION, 1000) if others_wait else (Level.SOLE, int(sole_waits))


async def _with_nothing_beside(self: LeasedWorker) -> bool:
    level = Level.PROBATION if self._lanes.has_on_probation(Level.PROBATION) else Level.SOLE
    tickets = self._lanes.take_on_probation(level)
    if tickets:
        with self._company.draining():
            self._undo(self._claimed.take_all())
            await self._until(lambda: self._is_idle(0), self._pipeline.settings.lease_s)
        await self._claim(tickets, level)
        await self._until(lambda: self._is_idle(0), self._pipeline.settings.runtime_max_s)
    return bool(tickets)


async def _repair_alone(self: RepairLoop, key: str) -> None:
    if key not in self._alone:
        self._alone.append(key)
        self._arrivals.notify()


LEVELS = (
    Mutant("a death in company counts", 18, rules, "grant", _company_counts),
    Mutant("a late death leaves the time alone", 18, rules, "grant", _late_death_forgotten, Grade.CONDITIONAL),
    Mutant("another order starts at the usual level", 18, rules, "grant", _other_order_starts_again),
    Mutant("a release forgets the level", 18, rules, "release", _level_released),
    Mutant("a free key is granted in any company", 18, rules, "_against_company", _free_in_any_company),
    Mutant("the beginning is not noted", 18, Heartbeat, "begin", _not_noted),
    Mutant("alone is not alone", 18, LeasedWorker, "_is_idle", _always_idle),
    Mutant("alone is asked for again before anything began", 18, AloneTurns, "is_due", _always_due),
    Mutant("drains follow each other without a pause", 18, AloneTurns, "is_due", _no_pause),
    Mutant("drained before it is claimed", 18, LeasedWorker, "_run_alone", _drain_first),
    Mutant("the window of probation is not reset", 18, ProbationWindow, "took_over", _not_reset),
    Mutant("all on probation run at once", 18, ProbationWindow, "next", _all_at_once),
    Mutant("nothing runs beside a change on probation", 15, LeasedWorker, "_claim_on_probation", _with_nothing_beside),
    Mutant("nothing runs beside a repair", 15, RepairLoop, "_repair", _repair_alone),
)
