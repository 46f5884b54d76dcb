"""The publishing example: bursts from a content management system end up right in both stores, and it says so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "publishing" / "main.py"


@pytest.mark.server("http")
def test_both_stores_end_as_the_editors_see_their_documents(tmp_path: Path):
    command = [sys.executable, str(MAIN), "--seconds", "1.5", "--documents", "6", "--folder", str(tmp_path / "a house")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"documents published; behind: 0 in search, 0 in the store", done.stdout)
    assert "dead letters: 0" in done.stdout
