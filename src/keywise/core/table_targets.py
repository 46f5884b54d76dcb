"""Targets of a sink that is a table: what they are called, and when a table may be one."""

import msgspec

from keywise.core.errors import AdminError, SettingsError
from keywise.core.statements import check_name
from keywise.core.target import TargetNote


class FoundTable(msgspec.Struct, frozen=True):
    """A table that has the name of a new target already."""

    built_by: TargetNote | None
    """The run that has created it or taken it over; None if no run has."""
    is_empty: bool
    difference: str = ""
    """How its columns differ from those of the live table; empty if they are the same."""


def first_label(table: str) -> str:
    """Return what the live table is called as a target before its name has moved for the first time."""
    return f"{table}_0"


def check_label(target: str, reserved: str) -> None:
    """Refuse what cannot be the name of a table beside the live one."""
    if "." in target:
        raise AdminError(f"name the target {target!r} without a schema; it is a table beside the live one")
    try:
        check_name(target, reserved)
    except SettingsError as error:
        raise AdminError(str(error)) from None


def check_definition(table: str, target: str, definition: bytes | None) -> None:
    """Refuse a definition: what a table is made of is written in SQL, and the operator's to run."""
    if definition is not None:
        raise AdminError(f"a table has no file that defines it; {make_it_yourself(table, target)}")


def check_found(table: str, target: str, note: TargetNote, found: FoundTable) -> None:
    """Refuse a table that is there already, unless this run has built it, or it is empty and fits."""
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


def make_it_yourself(table: str, target: str) -> str:
    """Return the advice where keywise cannot create a target: an empty table of its name is used as it is."""
    return f"create the table {target} yourself, empty and with the columns of {table}, and start again"
