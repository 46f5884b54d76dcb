"""Servers that are built from Go modules: each has a main package in tests/servers/go."""

import shutil
from pathlib import Path

from servers import machine
from servers.machine import MissingServerError, Report

FOLDER = Path(__file__).with_name("go")


def find(name: str) -> Path:
    """A program that `make servers` has built; tests build none, because that takes minutes."""
    return machine.built(_home_of(name) / name)


def build(name: str, report: Report) -> None:
    """Build a program from its sources and the versions that go.sum pins."""
    go = shutil.which("go")
    if go is None:
        # Debian's package may be too old for the modules.
        raise MissingServerError("there is no Go to build it with; install Go as tests/servers/go/go.mod asks for it")

    def fill(folder: Path) -> None:
        report("builds, which takes a few minutes")
        command = (go, "build", "-C", str(FOLDER), "-trimpath", "-o", str(folder / name), f"./{name}")
        machine.run(command, report, {"CGO_ENABLED": "0"})

    machine.build_once(_home_of(name), fill)


def _home_of(name: str) -> Path:
    return machine.cache_of(name, FOLDER / "go.mod", FOLDER / "go.sum", FOLDER / name / "main.go")
