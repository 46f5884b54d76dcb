"""Generated parts of a page: each stands between two markers, and the rest of the page is written by hand."""

from pathlib import Path


def replace_section(path: Path, name: str, text: str) -> None:
    """Renew the part of a page between `<!-- name: made by … -->` and `<!-- end of name -->`; both must be there."""
    lines = path.read_text("utf-8").splitlines()
    begin = [number for number, line in enumerate(lines) if line.startswith(f"<!-- {name}: made by ")]
    end = [number for number, line in enumerate(lines) if line == f"<!-- end of {name} -->"]
    if len(begin) != 1 or len(end) != 1 or begin[0] > end[0]:
        raise ValueError(f"{path} needs one line `<!-- {name}: made by … -->`, and `<!-- end of {name} -->` after it")
    new = [*lines[: begin[0] + 1], "", *text.strip("\n").splitlines(), "", *lines[end[0] :]]
    path.write_text("\n".join(new) + "\n", "utf-8")
