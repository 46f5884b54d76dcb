"""SQL in files beside the code that runs it, the version of our tables, and names in SQL that a user chose."""

import re
from collections.abc import Sequence
from importlib.resources import files

import msgspec

from keywise.core.errors import DatabaseError, SettingsError


def read_sql(package: str, file: str) -> str:
    """The text of a file that lies in a package."""
    return files(package).joinpath(file).read_text(encoding="utf-8")


def read_statements(module: str) -> dict[str, str]:
    """The statements of `name.sql` beside `name.py`, by the names in their lines `-- name: …`.

    Other lines that are comments are left out.
    """
    package, _, name = module.rpartition(".")
    _, *parts = read_sql(package, f"{name}.sql").split("-- name: ")
    statements: dict[str, str] = {}
    for part in parts:
        title, *lines = part.splitlines()
        assert title not in statements, f"{name}.sql has two statements named {title}"
        statements[title] = "\n".join(line for line in lines if not line.startswith("--")).strip().removesuffix(";")
    return statements


def check_schema(found: object, known: int, name: str, kind: str) -> None:
    """Refuse what another version of keywise wrote to a database, or to another kind of place."""
    if str(found) in map(str, range(1, known)):
        raise DatabaseError(
            f"{name} was written by an older keywise (schema {found}), and this one knows only schema {known}; finish "
            f"the work there with the older keywise, then name another {kind} and send everything once more"
        )
    if str(found) != str(known):
        raise DatabaseError(
            f"{name} was written by a newer keywise: its schema is {found}, this one knows {known}; upgrade keywise"
        )


class UserTable(msgspec.Struct, frozen=True):
    """A table of the user's: a key column, a version column, and the body as one column or as columns of its own."""

    name: str
    key: str = "key"
    version: str = "version"
    body: str = "body"
    columns: Sequence[str] = ()

    @classmethod
    def of_options(cls, options: dict[str, str], pipeline: str) -> "UserTable":
        """The table that a URL names, by default after the pipeline."""
        columns = _listed(options.pop("columns", ""))
        return cls(options.pop("table", pipeline), columns=columns, **options)

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.key, self.version, *(self.columns or (self.body,)))

    def check(self, parts: Sequence[str], reserved: str) -> None:
        """Refuse names that a user must not choose; `parts` are those of the table's name."""
        for name in (*parts, self.key, self.version, self.body, *self.columns):
            check_name(name, reserved)

    def misfit(self, why: str) -> SettingsError:
        return SettingsError(
            f"table {self.name} does not fit: {why}; it needs a unique key column, a version column and "
            "a body column, or name others with ?key=, ?version=, ?body= or ?columns="
        )


class UserRecordTable(msgspec.Struct, frozen=True):
    """A table of the user's for records: an object, an ordinal and a version column, and the body as in `UserTable`."""

    name: str
    object: str = "object"
    ordinal: str = "ordinal"
    version: str = "version"
    body: str = "body"
    columns: Sequence[str] = ()
    whole_number: str = "bigint"
    """What the database calls the type of an ordinal."""

    @classmethod
    def of_options(cls, options: dict[str, str], pipeline: str) -> "UserRecordTable":
        """The table that a URL names, by default after the pipeline."""
        columns = _listed(options.pop("columns", ""))
        return cls(options.pop("table", pipeline), columns=columns, **options)

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.object, self.ordinal, self.version, *(self.columns or (self.body,)))

    def check(self, parts: Sequence[str], reserved: str) -> None:
        """Refuse names that a user must not choose; `parts` are those of the table's name."""
        for name in (*parts, *self.stored, self.body):
            check_name(name, reserved)
        for name in self.stored:
            if self.stored.count(name) > 1:
                raise self.misfit(f"its column {name} would hold two things")

    def misfit(self, why: str) -> SettingsError:
        return SettingsError(
            f"table {self.name} does not fit: {why}; it needs a text column object, and an ordinal column of the type "
            f"{self.whole_number}, that are its primary key together, a version column and a body column, or name "
            "others with ?object=, ?ordinal=, ?version=, ?body= or ?columns="
        )


class OriginTable(msgspec.Struct, frozen=True):
    """A table of the user's that is only read: a unique key column, and the row or one column as the body."""

    name: str
    key: str = "key"
    body: str = ""
    """The column that holds the body of a message; empty: the whole row is the body."""

    @classmethod
    def of_options(cls, options: dict[str, str], pipeline: str) -> "OriginTable":
        """The table that a URL names, by default after the pipeline."""
        return cls(options.pop("table", pipeline), **options)

    def check(self, parts: Sequence[str], reserved: str) -> None:
        """Refuse names that a user must not choose; `parts` are those of the table's name."""
        for name in (*parts, self.key, *([self.body] if self.body else [])):
            check_name(name, reserved)

    def misfit(self, why: str) -> SettingsError:
        body = f", and {self.body!r}, which body= names" if self.body else ""
        return SettingsError(
            f"table {self.name} cannot be an origin: {why}; it needs a key column that a unique index covers alone"
            f"{body}; name the key with ?key=, or another table with ?table="
        )


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def check_name(name: str, reserved: str) -> None:
    """Refuse what cannot be the name of a user's table or column; names with the reserved prefix are the database's."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", name) or name.startswith(("keywise_", reserved)):
        raise SettingsError(
            f"{name!r} cannot be the name of a table or column; use letters, digits and _, "
            f"and start neither with keywise_ nor with {reserved}"
        )


def quoted(name: str) -> str:
    """Return a checked name in quotes, so that SQL keeps its case."""
    return f'"{name}"'
