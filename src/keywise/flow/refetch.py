"""Reading the source of truth: the result of the user's `refetch` function as a change."""

import inspect
from typing import Any

from keywise.core.bodies import encoded
from keywise.core.change import Change, Order, is_unversioned
from keywise.core.errors import KeywiseError, SettingsError
from keywise.flow.pipeline import OpenPipeline


async def refetched(pipeline: OpenPipeline, key: str) -> Change[Any] | None:
    """Return the current state of a key; None if the key is gone. The caller has to set the era of the order."""
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


def needs_refetch(pipeline: OpenPipeline) -> Any:
    """Return the pipeline's refetch function; raises `SettingsError` if it has none."""
    if pipeline.refetch is None:
        raise SettingsError(
            f"pipeline {pipeline.name!r} cannot read the source of truth; write a function that takes a key and "
            "returns its current body, or None if the key is gone, and decorate it with .refetch"
        )
    return pipeline.refetch


def is_same_version(one: Order, other: Order) -> bool:
    """Whether two orders have the same era and version, at any generation; unversioned ones of an era are the same."""
    if is_unversioned(one) and is_unversioned(other):
        return one[0] == other[0]
    return one[:2] == other[:2] and not is_unversioned(one) and not is_unversioned(other)
