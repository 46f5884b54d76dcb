"""The definition of an object pipeline: which objects it reads, and what their records are."""

from collections.abc import Iterable
from dataclasses import dataclass

from keywise.core.errors import SettingsError
from keywise.core.object_store import ObjectStore
from keywise.core.url import Address
from keywise.flow.handover import HandoverQueue
from keywise.ingest.dialects import Dialect, has_versions
from keywise.ingest.notification import ObjectSelection
from keywise.ingest.object_run import GONE_S
from keywise.ingest.open_objects import OpenObjects
from keywise.ingest.reader import ReadPlan
from keywise.ingest.records import Decode

KINDS = ("state", "envelope")
"""What the records of an object are: its state, which a newer version replaces as a whole, or changes of their own."""


@dataclass(frozen=True, slots=True)
class ObjectsDefinition:
    """How the objects of a pipeline are found and read. Nothing is opened yet."""

    store_url: str
    selection: ObjectSelection
    plan: ReadPlan
    gone_s: float = GONE_S

    def opened(
        self, store: ObjectStore, decode: Decode | None, queue: HandoverQueue | None, dialects: Iterable[Dialect]
    ) -> OpenObjects:
        [versioned, *_] = map(has_versions, dialects)
        return OpenObjects(
            store, self.selection, self.plan, decode=decode, queue=queue, gone_s=self.gone_s, has_versions=versioned
        )


def check_kind(kind: object) -> None:
    if kind not in KINDS:
        raise SettingsError(f"kind={kind!r} is not known; write one of {', '.join(KINDS)}")


def root_of(address: Address) -> str:
    """Return the URI of a bucket or folder, without options: the URIs of its objects begin with it and a slash."""
    path = address.path.strip("/")
    return f"{address.scheme}://{address.host}/{path}" if path else f"{address.scheme}://{address.host}"
