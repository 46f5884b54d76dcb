"""The benchmarks run and write what they measured; how fast anything was is no concern of a test."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks import leased_profile, measure_delays, measure_handlers, measure_objects, measure_reindex
from benchmarks.figure import QUICK
from benchmarks.peers import sampler
from benchmarks.run import MEASURES

from running import scaled

ROOT = Path(__file__).parents[2]
TINY = msgspec.structs.replace(
    QUICK,
    changes=4_000,
    batch=100,
    rounds=1,
    latency_s=0.2,
    key_counts=(1_000, 2_000),
    memory_changes=2_000,
    objects=200,
    object_bytes=2_500_000,
    generated_bytes=5_000_000,
    reindex_rows=600,
    reindex_rows_max=1_200,
)


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


def test_the_page_has_a_part_for_every_measure():
    lines = (ROOT / "docs" / "benchmarks.md").read_text("utf-8").splitlines()
    for name in (*MEASURES, "peers"):
        assert sum(line.startswith(f"<!-- {name}: made by ") for line in lines) == 1, name
        assert lines.count(f"<!-- end of {name} -->") == 1, name


@pytest.mark.server("postgres")
def test_handlers_are_measured_beside_the_raw_loop_with_their_calls_and_their_memory():
    figures = {figure.name: figure for figure in measure_handlers.measure(TINY)}
    assert all(figure.value for figure in figures.values())
    distinct, few = (
        figures["handler that does nothing, distinct keys"],
        figures["handler that does nothing, 1,000 keys"],
    )
    assert (distinct.at_least, few.at_least) == (10_000, 13_000)
    assert "2,000 handler calls for 2,000 messages" in distinct.note
    [turn] = distinct.detail["few"]
    assert 0 < turn.calls < 2_000 and f"{turn.calls:,} handler calls for 2,000 messages" in few.note
    assert figures["memory, handler that does nothing, at the end / half way"].at_most is None, "so few prove nothing"


@pytest.mark.server("postgres")
def test_delays_have_a_target_for_few_and_for_many_known_keys():
    figures = measure_delays.measure(TINY)
    assert all(figure.value for figure in figures)
    targets = {figure.name: figure.at_most for figure in figures if figure.at_most is not None}
    assert targets == {
        "send to committed, keywise, 1,000 keys, p99": 20,
        "send to committed, keywise, 2,000 keys, p99": 60,
    }


@pytest.mark.server("postgres", "elasticmq", "seaweedfs")
def test_objects_are_measured_beside_bare_loops_and_with_their_memory():
    """Each run compares the table with the objects, so a loop that leaves records out fails."""
    figures = {figure.name: figure for figure in measure_objects.measure(TINY)}
    assert all(figure.value for figure in figures.values())
    assert {name: figure.target for name, figure in figures.items() if figure.target} == {
        "small objects, keywise": "≥ 1,000",
        "small objects from SQS and S3, keywise": "≥ 500",
        "small objects from SQS and S3, keywise / bare loop": "≥ 0.8",
        "large objects, keywise / bare loop": "≥ 0.7",
        "one object of 0.00466 GiB into a handler, peak memory": "≤ 200",
    }
    assert "the seed: 50" in figures["small objects, keywise"].note


@pytest.mark.server("postgres", "opensearch")
def test_reindexes_are_measured_beside_bare_loops_and_with_many_rows():
    """Each run compares the sink with the origin, so a loop that leaves rows out fails."""
    figures = {figure.name: figure for figure in measure_reindex.measure(TINY)}
    assert all(figure.value for figure in figures.values())
    assert {name: figure.target for name, figure in figures.items() if figure.target} == {
        "table, keywise / bare loop": "≥ 0.7",
        "table, keywise, 1,200 rows / 600 rows": "≥ 0.8",
        "index, keywise / bare loop": "≥ 0.8",
    }
    [turn] = figures["table, keywise / bare loop"].detail["turns"]["in_place"]
    assert turn.total_s > 600 / turn.rows_per_s, "the sweep comes after the scan"


def test_a_profile_names_every_layer_in_its_part_of_the_page(tmp_path: Path):
    path = page_with(tmp_path, "sqlite", "leased")
    run("profile.py", "--only", "sqlite", "--changes", "3000", "--keys", "300", "--rounds", "1", "--write", str(path))
    layers = ("queue read", "decode", "coalesce", "decide", "sink write", "mark", "ack", "commit", "rest")
    rows = [line.split(" | ") for line in path.read_text().splitlines()]
    for layer in layers:
        found = [row for row in rows if row[0] == f"| {layer}"]
        assert len(found) == 2
        for _, _, keywise_us, *_ in found:
            assert float(keywise_us) > 0, f"{layer} is not watched"
    assert "Handler calls" not in path.read_text()


@pytest.mark.server("postgres")
def test_a_profile_of_handler_calls_names_the_statements_of_a_change(tmp_path: Path):
    path = page_with(tmp_path, "sqlite", "leased")
    told = run("profile.py", "--only", "leased", "--changes", "6000", "--rounds", "1", "--write", str(path))
    page = path.read_text()
    assert "## Handler calls, on Postgres" in told and "## Handler calls, on Postgres" in page
    for part in ("receive", "claim", "commit", "ack"):
        assert f"| {part} | " in page
    [client, _] = [float(line.split(" | ")[1].removesuffix(" |")) for line in page.splitlines() if "| all |" in line]
    assert client > 0
    assert "before" not in page


def test_an_earlier_revision_is_profiled_from_its_own_source():
    with leased_profile._source_of("HEAD") as source:
        assert source is not None and ROOT not in source.parents
        file = str(source / "keywise" / "flow" / "lanes.py")
        assert Path(file).exists()
        assert sampler.part_of(file, leased_profile.PARTS) == "lanes"
    assert sampler.part_of(str(ROOT / "src/keywise/flow/lanes.py"), leased_profile.PARTS) == "lanes"
    assert sampler.part_of("/usr/lib/python3/asyncio/events.py", leased_profile.PARTS) is None


def test_every_part_of_a_profile_names_files_that_exist():
    for start in (*leased_profile.PARTS, *sampler.PARTS):
        assert (ROOT / start).exists() or (ROOT / f"{start}.py").exists(), start


def page_with(folder: Path, *parts: str) -> Path:
    path = folder / "page.md"
    path.write_text("\n".join(f"<!-- {part}: made by hand -->\n<!-- end of {part} -->" for part in parts))
    return path


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
    only += ["--handler", "no-op", "--handler", "upsert"]
    small = ("--rounds", "1", "--changes", "400", "--keys", "40", "--json", str(data), "--write", str(page))
    told = run("peers/run.py", *only, *small)
    report = json.loads(data.read_text())
    rows, shares = report["rows"], report["shares"]
    assert sum(shares.values()) == pytest.approx(1) and set(shares) <= set(sampler.PARTS.values())
    assert [(row["contender"]["name"], row["handler"]) for row in rows] == [
        ("keywise, one-change handler", "no-op"),
        *((name, "upsert") for name in chosen),
    ]
    for row in rows:
        (turn,) = row["turns"]
        verdict = turn["verdict"]
        unwritten = None if row["handler"] == "no-op" else 0
        assert (verdict["backwards"], verdict["repeats"], verdict["wrong"]) == (unwritten, unwritten, 0)
        assert not verdict["overlaps"]
        if row["contender"]["name"] == "keywise, one-change handler":
            assert 40 <= verdict["calls"] < 400, "outdated changes are skipped"
            assert f"{verdict['calls']:,} calls for 400 messages" in told
        assert turn["changes_per_s"] > 0
        assert row["contender"]["name"] in told and f"| {row['contender']['name']} |" in page.read_text()
    assert page.read_text().startswith("Before.\n") and page.read_text().endswith("After.\n")
    assert (tmp_path / "benchmarks" / "peers-speed.svg").read_text().startswith("<svg")
