"""The benchmarks run and write what they measured; how fast anything was is no concern of a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.peers import sampler

from running import scaled

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_quick_run_prints_a_table_and_writes_its_figures(tmp_path: Path):
    """On a page, only the parts of what was measured are renewed."""
    path, page = tmp_path / "bench.json", tmp_path / "benchmarks.md"
    parts = [f"<!-- {name}: made by hand -->\nold {name}\n<!-- end of {name} -->" for name in ("ledger", "memory")]
    page.write_text("\n".join([*parts, "<!-- overhead: made by hand -->\n<!-- end of overhead -->"]))
    chosen = ("--only", "ledger", "--only", "overhead")
    told = run("run.py", "--quick", *chosen, "--json", str(path), "--write", str(page))
    written = json.loads(path.read_text())
    assert list(written["figures"]) == ["ledger", "overhead"]
    for figures in written["figures"].values():
        for figure in figures:
            assert figure["name"] in told
    assert set(written["others"]) == {"ledger", "overhead"}
    text = page.read_text()
    assert "old memory" in text and "old ledger" not in text
    assert "### ledger" in text and "### overhead" in text and "### memory" not in text


def test_a_profile_names_every_layer_in_its_page(tmp_path: Path):
    path = tmp_path / "profile.md"
    run("profile.py", "--changes", "3000", "--keys", "300", "--rounds", "1", "--write", str(path))
    page = path.read_text()
    for layer in ("queue read", "decode", "coalesce", "decide", "sink write", "mark", "ack", "commit", "rest"):
        assert page.count(f"| {layer} |") == 2


def test_a_small_load_of_calls_prints_how_fast_they_were_answered(tmp_path: Path):
    small = ("--callers", "4", "--keys", "2", "--seconds", "0.2")
    command = [sys.executable, "-m", "benchmarks.serial_calls", "sqlite", "--url", f"sqlite:///{tmp_path}/calls.db"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, cwd=ROOT, timeout=scaled(60), check=True)
    assert json.loads(done.stdout.splitlines()[-1])["calls_per_s"] > 0


@pytest.mark.server("postgres")
def test_a_small_race_is_checked_and_renews_its_part_of_a_page(tmp_path: Path):
    page, data = tmp_path / "benchmarks.md", tmp_path / "peers.json"
    page.write_text("Before.\n<!-- peers: made by hand -->\n<!-- end of peers -->\nAfter.\n")
    chosen = ("keywise, table sink", "keywise, batch handler", "keywise, one-change handler")
    only = [word for name in chosen for word in ("--only", name)]
    small = ("--rounds", "1", "--changes", "400", "--keys", "40", "--json", str(data), "--write", str(page))
    told = run("peers/run.py", *only, *small)
    report = json.loads(data.read_text())
    rows, shares = report["rows"], report["shares"]
    assert sum(shares.values()) == pytest.approx(1) and set(shares) <= set(sampler.PARTS.values())
    assert [row["contender"]["name"] for row in rows] == list(chosen)
    for row in rows:
        (turn,) = row["turns"]
        verdict = turn["verdict"]
        assert (verdict["backwards"], verdict["repeats"], verdict["wrong"]) == (0, 0, 0)
        assert not verdict["overlaps"]
        assert turn["changes_per_s"] > 0
        assert row["contender"]["name"] in told and f"| {row['contender']['name']} |" in page.read_text()
    assert page.read_text().startswith("Before.\n") and page.read_text().endswith("After.\n")
    assert (tmp_path / "benchmarks" / "peers-speed.svg").read_text().startswith("<svg")
