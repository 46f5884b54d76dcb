"""SQL in files beside the code that runs it, and names in SQL that a user chose."""

import re
from importlib.resources import files

from keywise.core.errors import SettingsError


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
