"""The bench of the SQS source: it creates queues, and deletes them."""

from collections.abc import Sequence
from typing import Any

from keywise.adapters.sqs.source import connect
from keywise.core.url import Address
from keywise.testing.conformance.promise import UncheckedError


class SqsBench:
    """Uses connections of its own. The clock of the service cannot be moved."""

    async def prepare(self, address: Address, role: str) -> None:
        """Create a standard queue; creating it again changes nothing."""
        source: Any = connect(address)
        service = source._service
        await service.open(1)
        try:
            await service.answered(service.client.create_queue(QueueName=source._queue))
        finally:
            await service.close()

    def move_clock(self, adapters: Sequence[Any], seconds: float) -> None:
        raise UncheckedError("the clock of SQS cannot be moved, and waiting would take too long")

    async def remove(self, adapter: Any, name: str) -> None:
        """Delete a queue with all its messages."""
        service = adapter._service
        await service.answered(service.client.delete_queue(QueueUrl=adapter._queue_url))
