"""The gap between two targets at one key: how their marks differ, and what closes the gap."""

import enum

import msgspec

from keywise.core.change import Order, above, is_same_version
from keywise.core.entry import Entry


class KeyState(msgspec.Struct, frozen=True, gc=False):
    """What a comparison needs to know of one key in one target. It may keep millions of them, so they are small."""

    mark: Order | None = None
    deleted: bool = False
    is_resolved: bool = True
    """No claim is held, no write has an unknown outcome, and the key is not suspect."""


UNKNOWN_KEY = KeyState()


class GapKind(enum.Enum):
    """How two targets differ at a key, named after what closes the gap."""

    NONE = enum.auto()
    TOMBSTONE = enum.auto()
    """The live target has deleted the key, so the other one deletes it at the same order. Nothing is read for it."""
    ROW = enum.auto()
    """A target is behind, or does not know the key: the row of the origin is written to each target that is behind."""


def state_of(entry: Entry) -> KeyState:
    is_resolved = entry.token == 0 and entry.unknown is None and entry.suspicions == 0
    return KeyState(entry.mark, entry.deleted, is_resolved)


def gap_kind(live: KeyState, other: KeyState) -> GapKind:
    """Compare versions and deletions, and no generations: those only order several writes of one version."""
    if live.mark is None and other.mark is None:
        return GapKind.NONE
    if live.mark is not None and other.mark is not None and is_same_version(live.mark, other.mark):
        if live.deleted == other.deleted:
            return GapKind.NONE
        return GapKind.TOMBSTONE if live.deleted else GapKind.ROW
    if live.mark is not None and live.deleted and (other.mark is None or other.mark < live.mark):
        return GapKind.TOMBSTONE
    return GapKind.ROW


def order_to_write(state: KeyState, order: Order, *, deleted: bool) -> Order | None:
    """Return the order at which a target gets a row or a deletion; None if it has that already, or a newer version.

    A target may have a deletion at the version of the row, or a row at that of the deletion. Then the returned order is
    just above its mark, or `order` if that is higher.
    """
    if state.mark is None or order[:2] > state.mark[:2]:
        return order
    has_it = order[:2] < state.mark[:2] or state.deleted == deleted
    return None if has_it else max(order, above(state.mark))
