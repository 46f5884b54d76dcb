"""Where everything is: what the one command has started, told to the workers by their environment."""

import os
from pathlib import Path
from urllib.parse import quote

import msgspec

FOLDER = Path(__file__).parents[2] / "build" / "publishing"
NAMES = ("search", "store")
"""Of the pipelines; each has a queue of its own, which gets all events."""


class Place(msgspec.Struct, frozen=True):
    """The parts that differ from run to run."""

    folder: str = str(FOLDER)
    """For the ledger and the records of the editors, and for all that has no server."""
    store: str = "http://127.0.0.1:1"
    """The store that is rate limited."""
    broker: str = ""
    """RabbitMQ, as `amqp://…`; without it the queues are in the folder."""
    search: str = ""
    """An index of OpenSearch, as `opensearch://…`; without it the search is a table in the folder."""

    @classmethod
    def from_environment(cls) -> "Place":
        """As the environment says."""
        given = {name: os.environ[_variable(name)] for name in cls.__struct_fields__ if _variable(name) in os.environ}
        return cls(**given)

    @property
    def variables(self) -> dict[str, str]:
        return {_variable(name): getattr(self, name) for name in self.__struct_fields__}

    @property
    def database(self) -> str:
        return f"sqlite:///{quote(str(Path(self.folder).resolve() / 'publishing.db'))}"

    @property
    def records(self) -> Path:
        """What the editors see: the source of truth."""
        return Path(self.folder) / "cms.json"

    def queue(self, name: str) -> str:
        return f"{self.broker or self.database}?queue=publishing.{name}"


def _variable(name: str) -> str:
    return f"PUBLISHING_{name.upper()}"
