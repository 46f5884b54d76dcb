"""The sample messages of a simulation: read as the pipeline reads them, and checked."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from keywise.app import PipelineDefinition
from keywise.core.bodies import encoded
from keywise.core.change import Change, Delivery, is_unversioned
from keywise.core.errors import SettingsError
from keywise.flow.intake import FieldRoute

MESSAGES_MAX = 200
KEYS = ("apple", "banana", "cherry")
VERSIONS = (1, 2, 3, 4)


class Sample(msgspec.Struct, frozen=True):
    """One message and its change, which is None if the pipeline ignores the message."""

    body: bytes
    change: Change[Any] | None

    @property
    def label(self) -> str:
        """The name of the message in the story of its key."""
        if self.change is None:
            return "a message that is ignored"
        return label_of(self.change)


def label_of(change: Change[Any]) -> str:
    named = "the change" if change.version is None else f"version {change.version}"
    return f"{named} (a deletion)" if change.deleted else named


def samples_of(
    definition: PipelineDefinition, messages: Callable[[], Iterable[Any]] | Iterable[Any] | None
) -> "Samples":
    """Read the given messages, or make some; raise `SettingsError` if they cannot be simulated."""
    given = _made(definition) if messages is None else messages() if callable(messages) else messages
    bodies = [encoded(body) for body in given]
    if not bodies:
        raise SettingsError("there is no message to simulate with; give some bodies in messages=")
    if len(bodies) > MESSAGES_MAX:
        raise SettingsError(f"{len(bodies)} messages are too many to simulate with; give at most {MESSAGES_MAX}")
    samples = Samples(_in_order([_read(definition, number, body) for number, body in enumerate(bodies, start=1)]))
    samples.check()
    return samples


class Samples:
    """All messages; those of one key are sorted from the oldest version to the newest."""

    def __init__(self, ordered: Sequence[Sample]) -> None:
        self.ordered = ordered
        self.by_body = {sample.body: sample for sample in ordered}
        self.keys = list(dict.fromkeys(one.change.key for one in ordered if one.change is not None))

    def check(self) -> None:
        """Refuse messages whose result depends on which of them comes first."""
        bodies: dict[tuple[str, object], bytes] = {}
        unversioned: dict[str, bool] = {}
        for sample in self.ordered:
            change = sample.change
            if change is None:
                continue
            if bodies.setdefault((change.key, change.order), sample.body) != sample.body:
                raise SettingsError(
                    f"two messages say different things of key {change.key!r} at {label_of(change)}, so the one that "
                    "comes first wins; give each a version of its own"
                )
            if unversioned.setdefault(change.key, is_unversioned(change.order)) != is_unversioned(change.order):
                raise SettingsError(
                    f"messages of key {change.key!r} have a version and have none; give all of them one"
                )


def _read(definition: PipelineDefinition, number: int, body: bytes) -> Sample:
    read_batch = definition._reader().read([Delivery(number, 0, body, 0.0)], 0, 0.0)
    for bad in read_batch.malformed:
        raise SettingsError(f"message {number} cannot be read by pipeline {definition.name!r}: {bad.cause}")
    return Sample(body, read_batch.tickets[0].change if read_batch.tickets else None)


def _in_order(samples: list[Sample]) -> list[Sample]:
    """Sort the messages of each key by version, within the positions that this key has in the list."""
    by_key: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.change is not None:
            by_key.setdefault(sample.change.key, []).append(sample)
    for of_key in by_key.values():
        of_key.sort(key=lambda one: one.change.order if one.change is not None else (0, 0, 0))
    return [one if one.change is None else by_key[one.change.key].pop(0) for one in samples]


def _made(definition: PipelineDefinition) -> list[dict[str, Any]]:
    """Make bodies with only the fields that the pipeline names."""
    route = definition._route
    if not isinstance(route, FieldRoute):
        raise SettingsError(
            f"pipeline {definition.name!r} reads its messages with a function, so none can be made up; "
            "give some bodies in messages="
        )
    fields = route.fields
    if fields.version is None:
        return [{fields.key: key} for key in KEYS]
    made: list[dict[str, Any]] = [{fields.key: key, fields.version: v} for v in VERSIONS for key in KEYS]
    for field, values in fields.deleted.items():
        # One key is deleted and restored, another one stays deleted.
        for number in (len(KEYS) + 1, len(made) - 1):
            made[number][field] = next(iter(values))
    return made
