"""Where the catalogue, the queue, the ledger and the search are; the processes learn it from their environment."""

import os
from pathlib import Path
from urllib.parse import quote

import msgspec

FOLDER = Path(__file__).parents[2] / "build" / "reindex"
PIPELINE = "products"
KEYWISE, NAIVE = "keywise", "naive"
"""The two searches."""
ITEMS = "items"
"""The table of the catalogue."""
FIRST_COLUMNS, COLUMNS = ("title", "price"), ("title", "price", "words")
"""What the search has of an item, before and after the change of its shape."""


class Place(msgspec.Struct, frozen=True):
    """What differs from run to run."""

    folder: str = str(FOLDER)
    """Has a SQLite file for everything that has no server."""
    database: str = ""
    """A database of Postgres, as `postgresql://…`, for the catalogue, the queue and the ledger."""
    search: str = ""
    """An alias of OpenSearch, as `opensearch://HOST:PORT/ALIAS`; without it, the search is a table of SQLite."""
    columns: str = ",".join(COLUMNS)
    """What the pipeline writes into a table."""

    @classmethod
    def from_environment(cls) -> "Place":
        given = {name: os.environ[_variable(name)] for name in cls.__struct_fields__ if _variable(name) in os.environ}
        return cls(**given)

    @property
    def variables(self) -> dict[str, str]:
        return {_variable(name): getattr(self, name) for name in self.__struct_fields__}

    def file(self, name: str) -> Path:
        return Path(self.folder).resolve() / f"{name}.db"

    @property
    def catalogue(self) -> str:
        """The database in which the shop keeps its items: the source of truth."""
        return self.database or _sqlite(self.file("catalogue"))

    @property
    def ledger(self) -> str:
        return self.database or _sqlite(self.file(KEYWISE))

    @property
    def sink(self) -> str:
        return self.search or f"{self.ledger}?table={PIPELINE}&key=id&columns={self.columns}"

    @property
    def into(self) -> str:
        """The name of what is built beside the live table or index."""
        return f"{self.search.rpartition('/')[2]}-{{generation}}" if self.search else f"{PIPELINE}_{{generation}}"


def _sqlite(file: Path) -> str:
    return f"sqlite:///{quote(str(file))}"


def _variable(name: str) -> str:
    return f"REINDEX_{name.upper()}"
