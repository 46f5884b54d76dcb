"""Where a contender works: its servers, its changes, its log and its settings, handed over in the environment."""

import enum
import functools
import os
from typing import Any

import msgspec

from benchmarks import workload

VARIABLE = "BENCH_PLACE"
STREAM = 200_000
"""All contenders get a beginning of the same stream; a slow one gets a shorter beginning."""


class Handler(enum.StrEnum):
    """What is done with each change."""

    NOOP = "no-op"
    """Nothing: what remains is what the contender itself costs."""
    UPSERT = "upsert"
    """One row of a table in Postgres is written."""


class Place(msgspec.Struct, frozen=True):
    """What a contender's processes have to know."""

    postgres: str
    redis: str
    log: str
    changes: int
    keys: int
    distribution: str
    settings: dict[str, Any]
    handler: Handler = Handler.UPSERT
    is_sampled: bool = False
    """Whether to find out where the time goes, which costs some."""

    @property
    def shares(self) -> str:
        """The file with what was found out."""
        return f"{self.log}.shares"

    @classmethod
    def here(cls) -> "Place":
        return msgspec.json.decode(os.environ[VARIABLE], type=cls)

    def environment(self) -> dict[str, str]:
        return {**os.environ, VARIABLE: msgspec.json.encode(self).decode()}

    def bodies(self) -> list[bytes]:
        """What is delivered, in the order of delivery."""
        return _stream(max(STREAM, self.changes), self.keys, self.distribution)[: self.changes]


@functools.cache
def _stream(changes: int, keys: int, distribution: str) -> list[bytes]:
    """Made once for all turns that are checked."""
    return workload.changes(changes, keys, distribution)
