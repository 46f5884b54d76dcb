"""The contract of a sink whose name can move to another target: an alias of indexes, or the name of a table."""

from typing import Any, Protocol, runtime_checkable

import msgspec

from keywise.core.sink import AtomicSink, Sink


class TargetNote(msgspec.Struct, frozen=True):
    """Which run has built a target. The store keeps this note with the target, if it can."""

    pipeline: str
    generation: int


@runtime_checkable
class MovableSink(Protocol):
    """The ability of a sink to have another target built beside its live one, and to move its name to it.

    The *name* is what the URL of the sink says, and the *target* is what stores the documents or rows. Each write finds
    the target by the name, so a write after the move can reach only the new target.
    """

    async def current_target(self) -> str:
        """Return the target that the name stands for; raise `AdminError` if the name cannot be moved."""

    def at_target(self, target: str) -> Sink | AtomicSink:
        """Return a sink, not open yet, that writes to this target even while the name stands for another one."""

    async def create_target(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        """Create an empty target for a run, or find the one that the same run has created.

        `definition` is a file of the operator's; without one, the target is like the live one. `epoch` is the number
        of swaps so far. Raises `AdminError` if there is another target of that name, or the definition does not fit.
        """

    async def finish_target(self, target: str) -> list[str]:
        """Restore the settings that were changed for the build, and make all writes visible.

        Return why the target cannot go live yet; the list is empty if it can.
        """

    async def count(self, target: str) -> int:
        """Return how many keys a target holds."""

    async def targets(self, pipeline: str) -> list[str]:
        """Return the targets that runs of this pipeline have built and that still exist, the oldest first.

        The list is empty if the store keeps no notes on its targets.
        """

    async def drop_target(self, target: str) -> None:
        """Delete a target with all that it holds. Raises `AdminError` for the live one; a missing one is no error."""


@runtime_checkable
class AliasSink(MovableSink, Protocol):
    """A movable sink with a store of its own: the name moves by a call whose answer can be lost."""

    async def move_name(self, before: str, after: str, epoch: int) -> None:
        """Let the name stand for `after`, and no longer for `before`; return once that is certain.

        It may be repeated with the same arguments. A copy of the request that arrives after a later move has no effect,
        because each move removes a guard of its `epoch`. Raises `UnavailableError` if the outcome is not known.
        """


@runtime_checkable
class RenamingSink(MovableSink, Protocol):
    """A movable sink in the ledger's database: the name moves in the transaction that also ends the barrier."""

    async def exchange(self, connection: Any, before: str, after: str) -> None:
        """Rename the live table to `before`, and the table `after` to the name of the sink.

        `connection` has a transaction open, which the caller commits or rolls back.
        """
