"""Judges the writes that a store has accepted, and what it holds at the end, against the versions that were sent."""

from collections.abc import Iterable, Mapping

import msgspec

from chaos.live_waits import LiveWaits
from keywise.core.change import Order

SHOWN_MAX = 10


class WriteJudge:
    """Looks at every accepted write in the order of the store, key by key: none is older than one before it.

    A write at the version of a deletion would bring back what was deleted, so it counts as older.
    """

    def __init__(self, waits: LiveWaits) -> None:
        self.writes = 0
        self.repeated = 0
        """Writes at the version that the store had: rows of a run, and repeats after a crash."""
        self.faults: list[str] = []
        self._waits = waits
        self._newest: dict[str, tuple[int, bool]] = {}

    def note(self, key: str, version: int, at: float, *, deleted: bool) -> None:
        self.writes += 1
        self._waits.note(key, version, at)
        newest, was_deleted = self._newest.get(key, (-1, False))
        if version < newest or (version == newest and was_deleted and not deleted):
            what = "deletion" if was_deleted else "version"
            self.faults.append(f"{key}: version {version} was written after {what} {newest}")
        self.repeated += version == newest
        if version >= newest:
            self._newest[key] = (version, deleted)


class Truth(msgspec.Struct, frozen=True, gc=False):
    """What was sent last of a key."""

    version: int
    deleted: bool


def judge_content(truth: Mapping[str, Truth], held: Mapping[str, int]) -> list[str]:
    """Compare the version of each key that a store holds with the newest one that was sent."""
    wanted = {key: one.version for key, one in truth.items() if not one.deleted}
    wrong = [key for key, version in wanted.items() if held.get(key) != version]
    extra = [key for key in held if key not in wanted]
    faults = [f"{key}: the store holds {held.get(key)}, and {wanted[key]} was sent last" for key in wrong[:SHOWN_MAX]]
    faults += [f"{key}: the store holds {held[key]}, and it was deleted at {truth[key].version}" for key in extra[:5]]
    left = len(wrong) + len(extra) - len(faults)
    return [*faults, f"{left} more keys differ"] if left else faults


def judge_marks(
    truth: Mapping[str, Truth], edited: Iterable[str], marks: Mapping[str, tuple[Order | None, bool]], generation: int
) -> list[str]:
    """Compare the mark of each key with what was sent; a key that no live change has met is at the generation."""
    edited, faults, wrong = frozenset(edited), list[str](), 0
    for key, one in truth.items():
        mark, deleted = marks.get(key, (None, False))
        is_right = mark is not None and (mark[1], deleted) == (one.version, one.deleted)
        if is_right and (key in edited or (mark is not None and mark[2] == generation)):
            continue
        wrong += 1
        if len(faults) < SHOWN_MAX:
            faults.append(f"{key}: its mark is {mark}{' (deleted)' * deleted}, and {one} was sent, in run {generation}")
    return [*faults, f"{wrong - len(faults)} more marks are wrong"] if wrong > len(faults) else faults
