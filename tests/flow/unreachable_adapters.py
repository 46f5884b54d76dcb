"""Plugs that cannot be reached a few times, before or after the act: what adapters tell as UnavailableError."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from keywise.core.errors import UnavailableError
from keywise.core.source import TransactionalSource


class Unreachable:
    """Stands before a plug and fails some of its calls; everything else goes through."""

    def __init__(self, plug: Any, **failures: int) -> None:
        self._plug = plug
        self.failures = Counter(failures)
        """How many calls of each method are still to fail. `after_` and a name: the act is done, its answer is lost."""
        self.calls: Counter[str] = Counter()
        if isinstance(plug, TransactionalSource):
            # Since Python 3.12, isinstance sees the members of a protocol only where an object really has them.
            self.queue_in, self.arrived, self.peek = plug.queue_in, self._passed("arrived"), self._passed("peek")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plug, name)
        if name == "transaction":
            return self._transaction
        return self._passed(name) if callable(found) else found

    def _passed(self, name: str) -> Any:
        found = getattr(self._plug, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            self._check(name)
            result = await found(*arguments, **options)
            self._check(f"after_{name}")
            return result

        return call

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        self._check("transaction")
        async with self._plug.transaction() as transaction:
            yield transaction
            self._check("commit_of_transaction")
        self._check("after_transaction")

    def _check(self, name: str) -> None:
        self.calls[name] += 1
        if self.failures[name] > 0:
            self.failures[name] -= 1
            raise UnavailableError(f"{name} did not get through")
