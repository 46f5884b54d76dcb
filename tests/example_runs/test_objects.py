"""The objects example: the table holds each line of each file once though workers are killed, and it says so."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from examples.objects import report, uploads
from examples.objects.place import Place, events_of

from running import scaled
from servers import seaweedfs, shared

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "objects" / "main.py"
SIZE = ("--files", "20", "--lines", "4000", "--seconds", "2")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MAIN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=scaled(110), check=False)


def expect_right(*arguments: str) -> None:
    done = run(*SIZE, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^naive: [\d,]+ rows wrong$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^keywise: exact, all [\d,]+ rows$", done.stdout, re.MULTILINE), done.stdout
    assert "dead letters: 0" in done.stdout


def test_the_table_is_exact_with_a_folder_as_the_bucket(tmp_path: Path):
    expect_right("--folder", str(tmp_path / "a folder"))


@pytest.mark.server("seaweedfs")
@pytest.mark.server("elasticmq")
def test_so_it_is_from_sqs_and_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.SECRET_KEY)
    queues = f"127.0.0.1:{shared.elasticmq().port}"
    expect_right("--folder", str(tmp_path), "--store", shared.seaweed().url, "--queues", queues)


def test_one_server_without_the_other_is_refused():
    done = run("--store", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "--store and --queues belong together" in done.stderr


def test_wrong_rows_are_found():
    truth = {"a": ["a0", "a1"], "b": ["b0"]}
    rows = ["a0", "a0", "b0", "b0", "b0", "gone"]
    found = report.compare("naive", 0, rows, truth)
    assert (found.right, found.missing, found.extra, found.twice) == (2, 1, 1, 3)
    assert not found.is_exact
    assert report.compare("keywise", 0, ["a0", "a1", "b0"], truth).is_exact


def test_every_upload_is_announced_and_some_twice_and_out_of_order():
    some = uploads.uploads(50, 100, seed=1)
    messages = [body for _, bodies in sorted(uploads.notifications(some, seed=1).items()) for body in bodies]
    announced = [sequencer for body in messages for _, _, sequencer in events_of(msgspec.json.decode(body))]
    assert set(announced) == {one.sequencer for one in some}
    assert len(announced) > len(some)
    assert announced != sorted(announced)
    newest = {one.name: one for one in some}
    assert {name: len(rows) for name, rows in uploads.truth(some).items()} == {
        name: one.lines for name, one in newest.items() if one.lines is not None
    }
    assert any(one.lines is None for one in newest.values())


def test_sequencers_grow_with_the_uploads_in_both_ways_to_read_them():
    first, second = uploads.Upload("a", 1, 1), uploads.Upload("a", 2, None)
    for place in (Place(), Place(store="http://127.0.0.1:1")):
        assert place.version(first.sequencer) < place.version(second.sequencer)
