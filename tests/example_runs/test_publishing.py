"""The publishing example: bursts from a content management system end up right in both stores, and it says so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from running import scaled
from servers import shared

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "publishing" / "main.py"


def published(folder: Path, *more: str) -> str:
    command = [sys.executable, str(MAIN), "--seconds", "1.5", "--documents", "6", "--folder", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def expect_all_right(told: str) -> None:
    assert re.search(r"documents published; behind: 0 in search, 0 in the store", told)
    assert "dead letters: 0" in told


def test_both_stores_end_as_the_editors_see_their_documents(tmp_path: Path):
    expect_all_right(published(tmp_path / "a house"))


@pytest.mark.server("rabbitmq")
@pytest.mark.server("opensearch")
def test_so_they_do_from_rabbitmq_to_opensearch(tmp_path: Path):
    index = shared.opensearch().index(f"published-{tmp_path.name}".lower(), {"payload_version": "long"})
    expect_all_right(published(tmp_path, "--broker", shared.rabbitmq().url, "--search", index))
