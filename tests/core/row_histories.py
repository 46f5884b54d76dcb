"""Random histories of one key with a reindex: live changes, rows of several runs, removals and forced writes."""

import random

from core.one_key import OneKey
from keywise.core import rules
from keywise.core.change import ChangeHeader, Order, above
from keywise.core.entry import Claim, CommitResult, LedgerPolicy, Refusal

VERSIONS = range(1, 6)
STEPS = 16


class RowHistory:
    """One seeded history. It notes what breaks a promise, and is made of what upstream, a reindex and operators do."""

    def __init__(self, seed: int, policy: LedgerPolicy) -> None:
        self.rng = random.Random(seed)
        self.key = OneKey(policy)
        self.deletions = {version for version in VERSIONS if self.rng.random() < 0.2}
        """The versions at which upstream has deleted the key; no row has one of them."""
        self.generations: list[int] = []
        self.offered = 0
        """The highest version that upstream or a reindex has offered."""
        self.written: list[Order] = []
        self.removed_at: int | None = None
        """The version that an operator has removed, unless it was forced back."""
        self.violations: list[str] = []

    def run(self) -> list[str]:
        acts = (self._live, self._live, self._live, self._row, self._row, self._row, self._start, self._remove)
        for _ in range(STEPS):
            self.rng.choice((*acts, self._force))()
        self._check_end()
        return self.violations

    def _live(self) -> None:
        version = self.rng.choice(VERSIONS)
        self._offer(ChangeHeader("a", (0, version, 0), version in self.deletions))

    def _start(self) -> None:
        """Start a run: its generation is above that of every mark and every earlier run."""
        mark = self.key.entry.mark if self.key.entry else None
        self.generations.append(1 + max([*self.generations, mark[2] if mark else 0]))

    def _row(self) -> None:
        """Offer a row of any run: one of an earlier run may arrive late."""
        version = self.rng.choice(VERSIONS)
        if self.generations and version not in self.deletions:
            self._offer(ChangeHeader("a", (0, version, self.rng.choice(self.generations)), is_row=True))

    def _remove(self) -> None:
        if (mark := self._mark()) is not None and self._write(ChangeHeader("a", above(mark), deleted=True)):
            self.removed_at = mark[1]

    def _force(self) -> None:
        mark = self._mark()
        if mark is None or mark[1] in self.deletions:
            return
        if self._write(ChangeHeader("a", above(mark))):
            self.removed_at = None
        else:
            self.violations.append(f"a forced write above {mark} was refused")

    def _offer(self, header: ChangeHeader) -> None:
        assert header.order is not None
        version, removed_at = header.order[1], self.removed_at
        self.offered = max(self.offered, version)
        if not self._write(header):
            return
        if version == removed_at:
            self.violations.append(f"{header} has undone a removal")
        self.removed_at = None

    def _write(self, header: ChangeHeader) -> bool:
        """Decide about a change, and write it if it is granted; return whether it was."""
        assert header.order is not None
        if self.rng.random() < 0.5:
            answer: Claim | Refusal | None = self.key.ask_for(header)
            if isinstance(answer, Claim) and self.key.commit(answer) is not CommitResult.COMMITTED:
                self.violations.append(f"{header} was written, and its commit refused")
        else:
            answer = rules.decide(self.key.entry, header, self.key.now, self.key.policy)
            if answer is None:
                self.key.entry = rules.mark(self.key.entry, header, self.key.now)
        if isinstance(answer, Refusal):
            return False
        if self.written and header.order <= self.written[-1]:
            self.violations.append(f"{header.order} was written after {self.written[-1]}")
        self.written.append(header.order)
        return True

    def _mark(self) -> Order | None:
        return self.key.entry.mark if self.key.entry else None

    def _check_end(self) -> None:
        mark = self._mark()
        if mark is None:
            return
        if mark[1] != self.offered:
            self.violations.append(f"the mark is {mark}, and version {self.offered} was offered")
        is_gone = mark[1] in self.deletions or mark[1] == self.removed_at
        if self.key.entry.deleted is not is_gone:
            self.violations.append(f"the key is {'not ' * is_gone}deleted at {mark}")
