"""The example behind `make run`: it ends by itself, can be run again, and notices a table that is not right."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from running import scaled

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "publishing_house" / "main.py"


def run_house(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    size = ("--events", "2000", "--documents", "200")
    command = [sys.executable, str(MAIN), *size, "--folder", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=scaled(60), check=False)


def test_the_house_ends_exact_each_time_it_is_run(tmp_path: Path):
    outputs = []
    for _ in range(2):
        done = run_house(tmp_path / "a house")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        assert "keywise: 0" in done.stdout
        outputs.append(naive_count(done.stdout))
    assert outputs[0] > 0
    assert outputs[0] == outputs[1]


def test_the_house_names_a_document_that_stayed_unpublished_although_an_older_event_came_last(tmp_path: Path):
    told = run_house(tmp_path).stdout
    found = re.search(r"keywise why (\S+) --app examples/publishing_house/house.py:app", told)
    assert found is not None, told
    with closing(sqlite3.connect(tmp_path / "house.db")) as connection:
        rows = connection.execute("select title from documents where content_id = ?", (found[1],)).fetchall()
    assert rows == []


def test_a_table_that_was_tampered_with_is_found_wrong(tmp_path: Path):
    assert run_house(tmp_path).returncode == 0
    assert run_house(tmp_path, "--check").returncode == 0
    with closing(sqlite3.connect(tmp_path / "house.db")) as connection:
        connection.execute("update documents set title = 'Something else' where id = (select min(id) from documents)")
        connection.commit()
    checked = run_house(tmp_path, "--check")
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "keywise: 1" in checked.stdout


def naive_count(output: str) -> int:
    found = re.search(r"naive: ([\d,]+) documents wrong", output)
    assert found is not None, output
    return int(found[1].replace(",", ""))
