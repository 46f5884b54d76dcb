"""The examples name missing servers before they start anything, and leave nothing behind when they are terminated."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import pytest

from running import scaled

ROOT = Path(__file__).parents[2]
MARK = "EXAMPLE_RUN"
LIMIT_S = 100
BARE = """
import runpy, sys
from pathlib import Path
import servers.machine, servers.postgres, servers.rabbitmq
servers.machine.CACHE = Path({nowhere!r})
servers.postgres.FOLDERS = servers.rabbitmq.FOLDER = {nowhere!r}
sys.argv = ["main.py", "--servers", "--folder", {folder!r}]
runpy.run_path({main!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("example", "missing"),
    [
        ("publishing", ["  rabbitmq: not installed", "  opensearch: not"]),
        ("scheduling", ["  postgres: not installed"]),
        ("objects", ["  seaweedfs: not", "  elasticmq: not"]),
    ],
)
def test_missing_servers_are_named_before_anything_starts(tmp_path: Path, example: str, missing: list[str]):
    main, folder = ROOT / "examples" / example / "main.py", tmp_path / "folder"
    program = BARE.format(nowhere=str(tmp_path / "nowhere"), folder=str(folder), main=str(main))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    first, *named, last = done.stderr.splitlines()
    assert first == "these servers are missing:"
    for line, begin in zip(named, missing, strict=True):
        assert line.startswith(begin)
    assert last.startswith("run make servers first")
    assert not folder.exists()


def test_a_terminated_example_stops_its_workers(tmp_path: Path):
    with started("publishing", "--seconds", "60", "--folder", str(tmp_path / "folder")) as (example, of_example):
        wait_until(lambda: sum("keywise" in command for command in of_example().values()) >= 2)
        expect_nothing_left(example, of_example)


@pytest.mark.server("postgres")
def test_a_terminated_example_stops_its_database(tmp_path: Path):
    with started("scheduling", "--servers", "--folder", str(tmp_path)) as (example, of_example):
        wait_until(lambda: any("endpoint.py" in command for command in of_example().values()))
        assert any("postgres" in command for command in of_example().values())
        expect_nothing_left(example, of_example)


@pytest.mark.server("rabbitmq")
@pytest.mark.server("opensearch")
def test_an_example_that_is_terminated_while_a_server_starts_stops_all(tmp_path: Path):
    with started("publishing", "--servers", "--folder", str(tmp_path / "folder")) as (example, of_example):
        wait_until(lambda: any("opensearch" in command for command in of_example().values()))
        assert any("beam" in command for command in of_example().values())
        expect_nothing_left(example, of_example)


Processes = Callable[[], dict[int, str]]


@contextmanager
def started(name: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Processes]]:
    """An example, and what lists its processes with those that it has started, by their environment."""
    mark = f"{MARK}={uuid.uuid4()}"
    environment = {**os.environ, MARK: mark.partition("=")[2]}
    command = [sys.executable, str(ROOT / "examples" / name / "main.py"), *options]
    example = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield example, lambda: processes_with(mark)
    finally:
        for pid in (example.pid, *processes_with(mark)):
            if example.poll() is None or pid != example.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        example.wait()


def expect_nothing_left(example: subprocess.Popen[bytes], of_example: Processes) -> None:
    folders = [Path(f"/proc/{pid}/cwd").readlink() for pid in of_example()]
    example.terminate()
    assert example.wait(scaled(LIMIT_S)) == 130
    # A process that was killed may take a moment to go.
    wait_until(lambda: not of_example())
    assert [folder for folder in folders if "keywise-" in str(folder) and folder.exists()] == []


def processes_with(mark: str) -> dict[int, str]:
    """The command line of each process that has this in its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(LIMIT_S)
    while not is_so():
        assert time.monotonic() < deadline
        Event().wait(0.05)
