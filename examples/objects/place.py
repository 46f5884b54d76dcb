"""Where everything is: the bucket, the queues and the tables; the workers learn it from their environment."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_plus

import msgspec
import obstore
from obstore.store import LocalStore, S3Store

from keywise import Delete, Put
from keywise.ingest.versions import sequencer_version

FOLDER = Path(__file__).parents[2] / "build" / "objects"
BUCKET = "logs"
KEYWISE, NAIVE = "keywise", "naive"
"""The two consumers. Each has a queue that gets all notifications, and a file with its table."""


class Place(msgspec.Struct, frozen=True):
    """What differs from run to run."""

    folder: str = str(FOLDER)
    """Has the ledger and the tables, and the bucket and the queues if there are no servers."""
    store: str = ""
    """A server that speaks the protocol of S3, as `http://HOST:PORT`; without it, the bucket is a folder."""
    queues: str = ""
    """A server that speaks the protocol of SQS, as `HOST:PORT`; without it, the queues are in SQLite files."""

    @classmethod
    def from_environment(cls) -> "Place":
        given = {name: os.environ[_variable(name)] for name in cls.__struct_fields__ if _variable(name) in os.environ}
        return cls(**given)

    @property
    def variables(self) -> dict[str, str]:
        return {_variable(name): getattr(self, name) for name in self.__struct_fields__}

    def file(self, consumer: str) -> Path:
        return Path(self.folder).resolve() / f"{consumer}.db"

    def database(self, consumer: str) -> str:
        return f"sqlite:///{quote(str(self.file(consumer)))}"

    def queue(self, consumer: str) -> str:
        if self.queues:
            return f"sqs://{self.queues}/{consumer}?tls=off&settled=0s"
        return f"{self.database(consumer)}?queue=notifications"

    @property
    def root(self) -> str:
        """The URI of the bucket; those of its objects begin with it."""
        return f"s3://{BUCKET}" if self.store else f"file://{Path(self.folder).resolve() / BUCKET}"

    @property
    def store_url(self) -> str:
        return f"{self.root}?endpoint={self.store}" if self.store else self.root

    @property
    def dialect(self) -> str | Callable[..., Any]:
        """Notifications have the form of S3. If the bucket is a folder, a function gives its objects their URIs."""
        return "s3" if self.store else self._read_in_folder

    def version(self, sequencer: str) -> int:
        """The version that keywise gives to a sequencer."""
        return sequencer_version(sequencer) if self.store else int(sequencer, 16)

    def client(self) -> S3Store | LocalStore:
        if not self.store:
            return LocalStore(self.root.removeprefix("file://"), mkdir=True)
        return S3Store(BUCKET, endpoint=self.store, region="us-east-1", client_options={"allow_http": True})

    def _read_in_folder(self, notification: dict[str, Any]) -> list[Put | Delete]:
        found: list[Put | Delete] = []
        for name, deleted, sequencer in events_of(notification):
            uri, version = f"{self.root}/{name}", self.version(sequencer)
            found.append(Delete(uri, version) if deleted else Put(uri, version))
        return found


def events_of(notification: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """The name of each object, whether it was deleted, and the sequencer of the event."""
    found = []
    for record in notification["Records"]:
        one = record["s3"]["object"]
        found.append((unquote_plus(one["key"]), record["eventName"].startswith("ObjectRemoved"), one["sequencer"]))
    return found


async def content_of(client: S3Store | LocalStore, name: str) -> bytes | None:
    """The content of an object; None if it is gone."""
    try:
        found = await obstore.get_async(client, name)
        return (await found.bytes_async()).to_bytes()
    except FileNotFoundError:
        return None


def _variable(name: str) -> str:
    return f"OBJECTS_{name.upper()}"
