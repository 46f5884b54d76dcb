"""The pages of the docs, their blocks of code, and what a reader would do with them, step by step."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from running import scaled

ROOT = Path(__file__).parents[2]
STEP_MAX_S = 60
SHOWN_ONLY = {"", "text", "toml", "markdown"}
"""Diagrams, settings and templates: there is nothing to run."""
FILES = {"python", "toml"}
"""Blocks that are the content of a file, if their first line names it."""
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code."""

    language: str
    text: str
    line: int
    """Of the opening fence."""
    quoted: str = ""
    """The file of ours that the block shows some lines of, if its fence says so; such a block is not run."""

    @property
    def file_name(self) -> str | None:
        """The file that the block is the content of, if its first line says so."""
        found = FILE_NAME.fullmatch(self.text.partition("\n")[0])
        return found[1] if found and self.language in FILES and not self.quoted else None

    @property
    def is_script(self) -> bool:
        return self.language == "python" and not self.quoted and self.file_name is None


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file."""

    path: str
    text: str

    def blocks(self) -> list[Block]:
        found: list[Block] = []
        fence, lines, opened = None, [], 0
        for number, line in enumerate(self.text.splitlines(), start=1):
            if fence is None:
                if line.startswith("```"):
                    fence, lines, opened = line.removeprefix("```").strip(), [], number
            elif line == "```":
                language, _, quoted = fence.partition(" ")
                found.append(Block(language, "\n".join(lines) + "\n", opened, quoted))
                fence = None
            else:
                lines.append(line)
        assert fence is None, f"{self.path}:{opened}: this block is never closed"
        return found

    def prose(self) -> Iterator[tuple[int, str]]:
        """Lines outside of blocks, with their numbers."""
        inside = False
        for number, line in enumerate(self.text.splitlines(), start=1):
            if line.startswith("```"):
                inside = not inside
            elif not inside:
                yield number, line


def pages() -> list[Page]:
    """The README and everything below docs/."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths]


def page(path: str) -> Page:
    return next(one for one in pages() if one.path == path)


def faults(page: Page, folder: Path) -> list[str]:
    """Do what the page says, in an empty folder, until something is not as it says."""
    blocks = page.blocks()
    scripts = [block for block in blocks if block.is_script]
    environment = _environment()
    for block in blocks:
        if block.quoted:
            if not is_quoted_right(block):
                return [f"{page.path}:{block.line}: {block.quoted} does not say this any more:\n{block.text}"]
        elif block.file_name is not None:
            target = folder / block.file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, "utf-8")
        elif block.language == "python":
            found = _script_fault(scripts, folder, environment) if block is scripts[-1] else None
            if found:
                return [f"{page.path}: {found}"]
        elif block.language == "console":
            for command, expected in commands(block):
                if found := _command_fault(command, expected, folder, environment):
                    return [f"{page.path}:{block.line}: {found}"]
        elif block.language not in SHOWN_ONLY:
            return [f"{page.path}:{block.line}: nobody knows how to run a block of {block.language}"]
    return []


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a console block, with the output that is expected."""
    head, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not head, f"line {block.line}: a console block begins with a command"
    for part in parts:
        command, _, expected = part.partition("\n")
        yield command, expected


def is_quoted_right(block: Block) -> bool:
    """Whether a file of ours holds these lines, one after another; indentation aside, and … leaves lines out."""
    source = (ROOT / block.quoted).read_text("utf-8")
    parts = re.split(r"^\s*…\n", block.text, flags=re.MULTILINE)
    pattern = "(?:.*\\n)*?".join(re.escape(_stripped(part)) for part in parts)
    return re.search("^" + pattern, _stripped(source), re.MULTILINE) is not None


def is_like(output: str, expected: str) -> bool:
    """Whether an output is the expected one: spaces are as good as others, and … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in _squeezed(expected).split("…"))
    return re.fullmatch(pattern, _squeezed(output), re.DOTALL) is not None


def _script_fault(scripts: list[Block], folder: Path, environment: Mapping[str, str]) -> str | None:
    script = "\n".join(block.text for block in scripts)
    ran = _run([sys.executable, "-c", script], folder, environment)
    return f"its Python blocks ended with status {ran.returncode}:\n{ran.stdout}" if ran.returncode else None


def _command_fault(command: str, expected: str, folder: Path, environment: dict[str, str]) -> str | None:
    words = shlex.split(command, comments=True)
    match words:
        case ["make", *targets]:
            unknown = [target for target in targets if "=" not in target and target not in make_targets()]
            return f"make has no target {', '.join(unknown)}" if unknown else None
        case ["export", setting]:
            name, _, value = setting.partition("=")
            environment[name] = Template(value).safe_substitute(environment)
            return None
    ran = _run(["bash", "-c", _patient(command)], folder, environment)
    wanted_failure = re.search(r"^Error:", expected, re.MULTILINE) is not None
    if (ran.returncode != 0) != wanted_failure:
        return f"{command}: ended with status {ran.returncode}:\n{ran.stdout}"
    if not is_like(ran.stdout, expected):
        return f"{command}: printed\n{ran.stdout}instead of\n{expected}"
    return None


def _patient(command: str) -> str:
    """A command that is stopped after some seconds gets more of them on a busy machine: it takes longer to begin."""
    slower = max(1, math.ceil(os.getloadavg()[0] / (os.cpu_count() or 1)))
    return re.sub(r"(?<=^timeout --preserve-status )\d+", lambda seconds: str(int(seconds[0]) * slower), command)


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(STEP_MAX_S),
        check=False,
    )


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KEYWISE", "PYTHON"))}
    folder = Path(sys.executable).parent
    return kept | {"PATH": f"{folder}{os.pathsep}{kept.get('PATH', '')}", "PYTHONUNBUFFERED": "1"}


def _stripped(text: str) -> str:
    return "".join(f"{line.strip()}\n" for line in text.splitlines())


def _squeezed(text: str) -> str:
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(lines).strip()
