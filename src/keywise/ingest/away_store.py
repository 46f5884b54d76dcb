"""A store that could not be opened, for commands that show what the ledger knows all the same."""

from collections.abc import AsyncGenerator, Sequence
from typing import Self

from keywise.core.errors import UnavailableError
from keywise.core.object_store import ListedObject, ObjectStream


class AwayStore:
    """Raises the error of the opening again, for each object that it is asked for."""

    def __init__(self, cause: str) -> None:
        self.cause = cause

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def get(self, name: str, start: int = 0, if_match: str = "") -> ObjectStream | None:
        raise UnavailableError(self.cause)

    async def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        yield self._page()

    def _page(self) -> Sequence[ListedObject]:
        raise UnavailableError(self.cause)
