"""Where a server cannot be had, its tests are told as not run; where it is required, they fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NEEDY = """
import pytest
from servers import shared

def test_that_needs_nothing():
    pass

@pytest.mark.server("postgres")
def test_that_needs_a_server():
    shared.postgres()
"""


def outcome(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """Run two tests where no PostgreSQL is installed and none may be."""
    (folder / "test_needy.py").write_text(NEEDY)
    (folder / "no_postgres.py").write_text(
        f"import servers.machine, servers.postgres\nservers.postgres.FOLDERS = {str(folder)!r}\n"
        "servers.machine.may_install = lambda: False\n"
    )
    (folder / "conftest.py").write_text("import no_postgres\n" + (TESTS / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    server(name): needs a server\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEYWISE")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(folder)])}
    done = subprocess.run(
        command, cwd=folder, env=kept | paths | environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2")], ids=["alone", "side by side"])
def test_a_missing_server_is_told_by_name(tmp_path: Path, options: tuple[str, ...]):
    status, told = outcome(tmp_path, *options)
    assert status == 0, told
    assert "NOT RUN: 1 tests of postgres: not installed" in told
    assert "1 passed" in told


def test_a_missing_server_that_is_required_is_a_failure(tmp_path: Path):
    status, told = outcome(tmp_path, KEYWISE_SERVERS_REQUIRED="1")
    assert status == 1, told
    assert "1 failed, 1 passed" in told
    assert "install the package postgresql" in told
