"""SQL in files beside the code that runs it."""

from importlib.resources import files


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
