"""What queues in databases have in common: their visibility timeout, and a fair receive."""

from keywise.core.source import VISIBILITY_S


class TableQueue:
    """Base of a source whose messages are rows: hidden while another worker has them, fresh or due again otherwise."""

    def __init__(self, visibility_s: float | None) -> None:
        self.visibility_s = VISIBILITY_S if visibility_s is None else visibility_s
        self._follows_lease = visibility_s is None
        self._due_gets_remainder = False

    def follow_lease(self, lease_s: float, runtime_max_s: float) -> None:
        if self._follows_lease:
            self.visibility_s = lease_s

    def _share_of_due(self, limit: int) -> int:
        """Return how many of a receive may be due again while fresh ones wait: half, and every other time one more."""
        self._due_gets_remainder = not self._due_gets_remainder
        return (limit + self._due_gets_remainder) // 2
