"""Reads the source of truth: what `refetch` says of a key, as a change."""

import inspect
from typing import Any

from keywise.core.bodies import encoded
from keywise.core.change import Change, Order, is_unversioned
from keywise.core.errors import KeywiseError, SettingsError
from keywise.flow.pipeline import Pipeline


async def refetched(pipeline: Pipeline, key: str) -> Change[Any] | None:
    """The current state of a key, in no era yet; None if the key is gone."""
    body = needs_refetch(pipeline)(key)
    if inspect.isawaitable(body):
        body = await body
    if body is None:
        return None
    change = pipeline.reader.read_one(encoded(body))
    if change.key != key:
        raise KeywiseError(
            f"refetch({key!r}) returned the body of {change.key!r}; return the body of the key asked for"
        )
    return change


def needs_refetch(pipeline: Pipeline) -> Any:
    """The function that reads the truth; raises `SettingsError` if there is none."""
    if pipeline.refetch is None:
        raise SettingsError(
            f"pipeline {pipeline.name!r} cannot read the source of truth; give it a function that returns the current "
            "body of a key, or None if the key is gone: decorate it with .refetch"
        )
    return pipeline.refetch


def is_same_version(one: Order, other: Order) -> bool:
    """Whether two orders differ in nothing that upstream knows of; what has no version is always the same."""
    if is_unversioned(one) and is_unversioned(other):
        return one[0] == other[0]
    return one[:2] == other[:2] and not is_unversioned(one) and not is_unversioned(other)
