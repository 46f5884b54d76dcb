"""The contracts of a ledger for operators, and for the work that workers coordinate."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls, Pause
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter
from keywise.core.entry import Claim, Entry


class LedgerCounts(msgspec.Struct, frozen=True):
    """How much one ledger scope contains."""

    keys: int
    tombstones: int
    claims: int
    suspects: int
    dead: int


class LedgerAdmin(Protocol):
    """Lets an operator inspect and repair one ledger scope."""

    async def inspect(self, key: str) -> Entry | None:
        """Return the entry of a key, or None if the ledger has none."""

    async def counts(self) -> LedgerCounts: ...

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        """Return suspect keys about which no new suspicion was recorded for `quiet_s`."""

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        """End a repair and its exclusive claim. `written` is the change that the repair wrote, or None."""

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        """Mark keys suspect that were written without a claim; each header carries the newest order written.

        `resync_due=True` also records that a full resync is due from now on, unless it is already; False clears that.
        `headers` may be empty.
        """

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        """Return dead letters, newest first, each with its number and the time at which it was stored."""

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        """Delete dead letters; return how many existed."""

    async def now(self) -> float:
        """Return the time of the store's clock."""


class PeriodicLock(Protocol):
    """Lets one worker of a ledger scope run a periodic task."""

    async def acquire(self, task: str, every_s: float) -> bool:
        """Try to become the one worker that runs a task in the current interval. Every call writes."""


class ControlStore(PeriodicLock, Protocol):
    """Stores what an operator has set for one ledger scope, and what its workers agree on."""

    async def controls(self) -> Controls:
        """Return the controls that apply to all keys now."""

    async def pause(self, pause: Pause) -> None:
        """Grant no more claims on these keys; existing claims go on. Pausing again replaces the earlier pause."""

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        """End one pause, named as it was set; return False if there is none."""

    async def reset(self, claim: Claim) -> int | None:
        """End an exclusive claim and raise the era of its key; return the era, or None if the claim is lost."""

    async def raise_era(self) -> int | None:
        """Raise the era of all keys above the highest one of any key; return it, or None while a claim is held."""

    async def fix_scale(self, scale: str) -> str:
        """Fix the scale of the versions of this scope, if none is fixed yet; return the fixed one."""

    async def replace_controls(self, before: Controls, after: Controls) -> bool:
        """Replace the controls in one atomic step; return False, and change nothing, if they differ from `before`."""

    async def highest_generation(self) -> int:
        """Return the highest generation of any mark; 0 if there is none. It may read all keys, and no claim waits."""

    async def keys(self, after: str, limit: int) -> list[str]:
        """Return known keys behind `after`, in the ledger's own stable order; an empty `after` is before all keys."""

    async def held(self, after: str, limit: int) -> list[str]:
        """Return keys behind `after` on which a claim is held now, in order."""
