"""The targets of a sink that is a table: their names, and the checks of a table that is to become one."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from keywise.core.errors import AdminError, SettingsError
from keywise.core.statements import check_name
from keywise.core.target import TargetNote

C = TypeVar("C")
"""A column, as the adapter compares it."""


class FoundTable(msgspec.Struct, frozen=True):
    """An existing table with the name of a new target."""

    built_by: TargetNote | None
    """The run that has created it or taken it over; None if no run has."""
    is_empty: bool
    difference: str = ""
    """How its columns differ from those of the live table; empty if they are the same."""


def first_label(table: str) -> str:
    """Return the label of the live table before the first swap: the name that it gets when it stops being live."""
    return f"{table}_0"


def check_label(target: str, reserved: str) -> None:
    """Raise `AdminError` if a target cannot be the name of a table beside the live one."""
    if "." in target:
        raise AdminError(f"name the target {target!r} without a schema; it is a table beside the live one")
    try:
        check_name(target, reserved)
    except SettingsError as error:
        raise AdminError(str(error)) from None


def check_definition(table: str, target: str, definition: bytes | None) -> None:
    """Raise `AdminError` if there is a definition: for a table it would be SQL, which the operator runs."""
    if definition is not None:
        raise AdminError(f"a table has no file that defines it; {creation_advice(table, target)}")


def check_found(table: str, target: str, note: TargetNote, found: FoundTable) -> None:
    """Raise `AdminError` if a table that exists cannot be the target: another run's, not empty, or of other columns."""
    by = found.built_by
    if by is not None and by != note:
        raise AdminError(
            f"table {target} belongs to reindex {by.generation} of pipeline {by.pipeline!r}; drop it, or name another"
        )
    if by is None and not found.is_empty:
        raise AdminError(f"table {target} holds rows that no reindex has written; empty it, or name another one")
    if found.difference:
        raise AdminError(
            f"table {target} does not fit: {found.difference}; a target has the same columns and types as {table}"
        )


def label_taken_error(table: str, label: str) -> AdminError:
    """Return the error for an existing table with the name that the live table gets at a swap."""
    return AdminError(
        f"{table} becomes {label} when another target goes live, and a table {label} exists already; rename or drop it"
    )


def columns_fault(table: str, target: str, difference: str) -> str:
    """Describe that a target cannot go live, because it has other columns than the live table."""
    return f"table {target} has other columns than {table}: {difference}"


def column_difference(live: Mapping[str, C], found: Mapping[str, C], describe: Callable[[C, C], str]) -> str:
    """Describe how the columns of a table differ from those of the live one, by name; empty if they are the same.

    `describe` gets a column of the table and the live one that it differs from.
    """
    for name, column in live.items():
        if name not in found:
            return f"it has no column {name}"
        if found[name] != column:
            return f"its column {name} is {describe(found[name], column)}"
    return next((f"it has a column {name} as well" for name in found if name not in live), "")


def dependents_fault(table: str, dependents: Sequence[str]) -> str:
    """Describe that the name cannot move, because views, triggers or foreign keys would stay with the old table."""
    return (
        f"{', '.join(dependents)} would stay with the old table when the name {table} moves; drop that before, and "
        "create it again after each swap"
    )


def creation_advice(table: str, target: str) -> str:
    """Return the advice if keywise cannot create a target: the operator creates the table, and keywise uses it."""
    return f"create the table {target} yourself, empty and with the columns of {table}, and start again"
