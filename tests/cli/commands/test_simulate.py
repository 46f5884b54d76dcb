"""`keywise simulate` counts what it injected, and a broken promise ends with a trace, a command and status 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import LIMIT_S, Answer, Folder, environment
from running import scaled

TESTS = Path(__file__).parents[2]

BROKEN = """
import sys
from keywise.cli import main
from mutants import MUTANTS

[mutant] = [one for one in MUTANTS if one.name == "acked before the commit"]
with mutant.alive():
    sys.argv = ["keywise", "simulate", "--grade", "plain", "--jobs", "1", *sys.argv[1:]]
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def simulate_broken(*arguments: str) -> Answer:
    """The simulator on a consumer that acks too early."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, *arguments],
        env=environment(None) | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def test_seeds_run_side_by_side_and_their_faults_are_counted(folder):
    answer = folder.keywise("simulate", "--seeds", "4", "--first-seed", "10", "--jobs", "2", "--json")
    assert (answer.status, answer.err) == (0, "")
    told = answer.json
    assert (told["violations"], told["seeds"], told["failures"]) == (0, 12, [])
    assert {grade: (one["seeds"], one["violations"]) for grade, one in told["grades"].items()} == {
        "atomic": (4, 0),
        "conditional": (4, 0),
        "plain": (4, 0),
    }
    assert told["faults"]["crash"] == sum(one["faults"].get("crash", 0) for one in told["grades"].values())
    assert sum(told["faults"].values()) > 0
    assert sum(told["grades"]["atomic"]["strategies"].values()) == 4


def test_people_get_a_table_and_one_line_of_faults(folder):
    answer = folder.keywise("simulate", "--seeds", "2", "--grade", "plain", "--jobs", "1")
    assert answer.status == 0
    header, row, faults, end = answer.out.splitlines()
    assert header.split() == ["grade", "seeds", "violations", "cpu", "s", "strategy"]
    assert row.split()[:3] == ["plain", "2", "0"]
    assert faults.startswith("injected ") and "crash" in faults
    assert end.startswith("0 violations in 2 seeds")


def test_a_replay_prints_the_trace_of_one_seed(folder):
    answer = folder.keywise("simulate", "--replay", "3", "--grade", "atomic")
    assert answer.status == 0
    *trace, end = answer.out.splitlines()
    assert any("killed" in line or "committed" in line for line in trace)
    assert end.startswith("atomic seed 3 (") and end.endswith("0 violations")
    assert folder.keywise("simulate", "--replay", "3", "--grade", "atomic", "--json").json["trace"] == trace


def test_a_broken_promise_ends_with_a_trace_and_the_command_to_replay_it():
    answer = simulate_broken("--seeds", "3")
    assert answer.status == 1
    assert "VIOLATION" in answer.out
    assert "acked before" in answer.err
    assert "keywise simulate --replay 0 --grade plain" in answer.err


def test_a_broken_promise_is_told_to_scripts_too():
    answer = simulate_broken("--seeds", "3", "--json")
    assert answer.status == 1
    told = answer.json
    assert told["violations"] == told["grades"]["plain"]["violations"] > 0
    assert told["grades"]["plain"]["failing_seeds"][0] == told["failures"][0]["seed"]
    assert told["failures"][0]["replay"].startswith("keywise simulate --replay ")
    assert 0 < len(told["failures"][0]["trace"]) <= 40


def test_a_replay_of_a_broken_promise_fails():
    answer = simulate_broken("--replay", "0")
    assert answer.status == 1
    assert "acked before" in answer.err
