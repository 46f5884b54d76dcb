"""The contract of an operator's hand on a ledger."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from keywise.core.change import ChangeHeader
from keywise.core.controls import Controls, Pause
from keywise.core.dead_letter import EVERY_DEAD_LETTER, DeadLetter, DeadLetterFilter
from keywise.core.entry import Claim, Entry


class LedgerCounts(msgspec.Struct, frozen=True):
    """A ledger's scope in figures."""

    keys: int
    tombstones: int
    claims: int
    suspects: int
    dead: int


class LedgerAdmin(Protocol):
    """The operator's hand on one ledger scope."""

    async def inspect(self, key: str) -> Entry | None:
        """What the ledger remembers of a key."""

    async def counts(self) -> LedgerCounts: ...

    async def suspects(self, limit: int, quiet_s: float) -> list[str]:
        """Keys whose content in the sink has been in doubt for a while, and has not become more so since."""

    async def finish_repair(self, claim: Claim, written: ChangeHeader | None) -> None:
        """End a repair under an exclusion."""

    async def mark_suspect(self, headers: Sequence[ChangeHeader], resync_due: bool | None = None) -> None:
        """Make keys suspect that were written without a claim; each header says the newest order that was. It may be
        asked with none. True notes besides that a full resync is due since now, unless it is already; False ends that.
        """

    async def dead_letters(
        self, limit: int, matching: DeadLetterFilter = EVERY_DEAD_LETTER
    ) -> list[tuple[int, float, DeadLetter]]:
        """Dead letters, newest first: number, when it was buried, and what."""

    async def delete_dead_letters(self, numbers: Sequence[int]) -> int:
        """Forget dead letters; return how many there were."""

    async def now(self) -> float:
        """The store's clock, to say how long ago something was."""


class PeriodicLock(Protocol):
    """Lets one worker of a ledger scope do a periodic task."""

    async def acquire(self, task: str, every_s: float) -> bool:
        """Try to become the one worker that runs a task in the current interval. Every call writes."""


class ControlStore(PeriodicLock, Protocol):
    """What an operator sets in one ledger scope, and what workers of it agree on."""

    async def controls(self) -> Controls:
        """What holds for all keys now."""

    async def pause(self, pause: Pause) -> None:
        """From now on no claim on these keys is granted; claims that are held go on. Pausing again renews it."""

    async def resume(self, keys: str, is_pattern: bool) -> bool:
        """End one pause, named as it was made; False if there is none."""

    async def reset(self, claim: Claim) -> int | None:
        """End an exclusion and raise the era of its key; return it, or None if the claim is lost."""

    async def raise_era(self) -> int | None:
        """Raise the era of all keys above any that one of them has; None while a claim is held."""

    async def keys(self, after: str, limit: int) -> list[str]:
        """Known keys after one, in an order of the ledger's own that never changes; all are after an empty one."""

    async def held(self, after: str, limit: int) -> list[str]:
        """Keys after one that a claim is held on now, in their order."""
