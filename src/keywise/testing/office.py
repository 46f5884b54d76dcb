"""What a simulated consumer asks of a governor."""

from keywise.ledgers.memory import MemoryLedger


class Office(MemoryLedger):
    """A governor that gives nobody the turn at a chore: pruning is one of the simulator's own troubles."""

    async def turn(self, chore: str, every_s: float) -> bool:
        return False
