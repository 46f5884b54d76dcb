"""Judges a history of two targets and of the name that moves between them, in the order of their stores."""

from collections.abc import Iterable

import msgspec

SHOWN_MAX = 5


class Written(msgspec.Struct, frozen=True, gc=False):
    """A write that a target has accepted, or a tombstone that the ledger has marked for it."""

    target: str
    key: str
    version: int | None
    """None: of a deletion whose version the store does not know; its tombstone says it."""
    deleted: bool
    at: float
    """When, by the clock of this machine."""


class Moved(msgspec.Struct, frozen=True):
    """The name stands for another target from here on."""

    after: str
    at: float


class Begun(msgspec.Struct, frozen=True):
    """A run begins: from here until the next move, the target that is not live is written too."""

    at: float


Event = Written | Moved | Begun


class SwapJudge:
    """Looks at each event. In each target no version follows a newer one, and no write brings back what was deleted.

    When the name moves, both targets hold the same versions. Between two runs, only the live target is written.
    """

    def __init__(self, live: str) -> None:
        self.live = live
        self.moves = 0
        self.writes = 0
        self.faults: list[str] = []
        self._is_idle = True
        """No run goes on."""
        self._held: dict[str, dict[str, tuple[int, bool]]] = {}
        """By target and key: the newest version, and whether that is a deletion."""

    def judge(self, history: Iterable[Event]) -> None:
        for event in history:
            match event:
                case Written():
                    self._note(event)
                case Moved():
                    self._move(event)
                    self._is_idle = True
                case Begun():
                    self._is_idle = False

    def _note(self, event: Written) -> None:
        held = self._held.setdefault(event.target, {})
        newest, was_deleted = held.get(event.key, (-1, False))
        version = newest if event.version is None else event.version
        self.writes += not event.deleted
        if version < newest or (version == newest and was_deleted and not event.deleted):
            what = "deletion" if was_deleted else "version"
            self._fault(f"{event.target}: {event.key} was written at version {version} after {what} {newest}")
        elif version > newest and event.target != self.live and self._is_idle:
            self._fault(f"{event.target}: {event.key} was written at version {version}, and it was not live")
        if version >= newest:
            held[event.key] = (version, event.deleted)

    def _move(self, event: Moved) -> None:
        """Compare what readers of the name have seen until now with what they see from now on."""
        self.moves += 1
        before, after = self._held.get(self.live, {}), self._held.get(event.after, {})
        different = [key for key in before.keys() | after.keys() if _seen(before, key) != _seen(after, key)]
        if different:
            key = min(different)
            self._fault(
                f"move {self.moves} from {self.live} to {event.after}: {len(different)} keys differ, as {key}: "
                f"{before.get(key)} before, {after.get(key)} after"
            )
        self.live = event.after

    def _fault(self, text: str) -> None:
        if len(self.faults) < SHOWN_MAX:
            self.faults.append(text)


def _seen(held: dict[str, tuple[int, bool]], key: str) -> int | None:
    """The version that a reader finds; None if the key is deleted or unknown."""
    version, deleted = held.get(key, (0, True))
    return None if deleted else version
