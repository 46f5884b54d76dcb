"""The servers of the tests: only `make servers` installs any, a missing one is named, and none leaves a trace."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from running import scaled
from servers import machine, shared
from servers.dynamodb import dynamodb_server
from servers.elasticmq import elasticmq_server
from servers.fakegcs import fakegcs_server
from servers.pubsub import pubsub_server
from servers.seaweedfs import seaweedfs_server

TESTS = Path(__file__).parents[1]
LIMIT_S = 60
NEEDY = """
import pytest
from servers import shared

def test_that_needs_nothing():
    pass

@pytest.mark.server("postgres")
def test_that_needs_a_server():
    shared.postgres()

@pytest.mark.server("pubsub")
def test_that_needs_a_built_one():
    shared.NEEDED["pubsub"]()
"""
BARE = """
from pathlib import Path
from threading import Event
import servers.machine, servers.postgres
servers.machine.CACHE = Path({folder!r})
servers.postgres.FOLDERS = {folder!r}
"""
APT_GET = """#!/bin/sh
echo "$0" "$@" >&2
exit 1
"""


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a machine with no PostgreSQL, an empty cache, and an apt-get that reports its calls."""
    (folder / "bare_machine.py").write_text(BARE.format(folder=str(folder)))
    (folder / "apt-get").write_text(APT_GET)
    (folder / "apt-get").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEYWISE")}
    paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(folder)]), "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=kept | paths | environment,
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
        check=False,
    )


def run_tests(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run three tests, two of which need servers that are not there."""
    (folder / "test_needy.py").write_text(NEEDY)
    (folder / "conftest.py").write_text("import bare_machine\n" + (TESTS / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    server(name): needs a server\n")
    return run(folder, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder), **environment)


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2")], ids=["isolated", "side by side"])
def test_a_missing_server_is_named_and_not_installed(tmp_path: Path, options: tuple[str, ...]):
    done = run_tests(tmp_path, *options)
    assert done.returncode == 0, done.stdout
    assert "NOT RUN: 1 tests of postgres: not installed; run make servers" in done.stdout
    assert "NOT RUN: 1 tests of pubsub: not built; run make servers" in done.stdout
    assert "1 passed" in done.stdout
    assert "apt-get" not in done.stderr


def test_a_missing_server_that_is_required_is_a_failure(tmp_path: Path):
    done = run_tests(tmp_path, KEYWISE_SERVERS_REQUIRED="1")
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    assert "install the package postgresql" in done.stdout


@pytest.mark.parametrize(
    ("may_install", "words"),
    [
        (True, "postgres: 0 s: failed: apt-get ended with status 1"),
        (False, "as root, run: apt-get install --no-install-recommends postgresql"),
    ],
    ids=["root", "not root"],
)
def test_what_cannot_be_installed_is_named(tmp_path: Path, may_install: bool, words: str):
    program = (
        "import bare_machine, sys\nfrom servers import install\n"
        f"install.may_install = lambda: {may_install}\nsys.exit(install.main(['http', 'postgres']))"
    )
    done = run(tmp_path, "-c", program)
    assert done.returncode == 1, done.stderr
    assert words in done.stdout
    assert done.stdout.endswith("still missing: postgres\n")


def test_servers_that_are_there_are_left_alone(tmp_path: Path):
    there = [server for server in shared.NEEDED if shared.why_missing(server) is None]
    done = run(tmp_path, "-m", "servers.install", *there)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, ""), done.stdout


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(elasticmq_server, marks=pytest.mark.server("elasticmq"), id="elasticmq"),
        pytest.param(dynamodb_server, marks=pytest.mark.server("dynamodb"), id="dynamodb"),
        pytest.param(seaweedfs_server, marks=pytest.mark.server("seaweedfs"), id="seaweedfs"),
        pytest.param(pubsub_server, marks=pytest.mark.server("pubsub"), id="pubsub"),
        pytest.param(partial(fakegcs_server, "127.0.0.1:1"), marks=pytest.mark.server("fakegcs"), id="fakegcs"),
    ],
)
def test_a_server_restarts_on_its_port_and_leaves_nothing(start: Callable[[], AbstractContextManager[Any]]):
    with start() as server:
        first, folder = server.pid, working_folder(server.pid)
        assert is_open(server.port)
        server.stop()
        assert not Path(f"/proc/{first}").exists()
        assert not is_open(server.port)
        server.start()
        assert is_open(server.port)
        server.restart()
        last = server.pid
        assert is_open(server.port)
    assert not Path(f"/proc/{last}").exists()
    assert not is_open(server.port)
    assert folder.name.startswith("keywise-") and not folder.exists()


@pytest.mark.server("elasticmq")
def test_a_durable_queue_outlives_a_crash_of_its_server():
    with elasticmq_server(is_durable=True) as server:
        server.ask("CreateQueue", QueueName="orders")
        queue = f"{server.url}/000000000000/orders"
        server.ask("SendMessage", QueueUrl=queue, MessageBody="first")
        server.restart()
        wait_until(lambda: "orders" in server.ask("ListQueues"))
        wait_until(lambda: "<Body>first</Body>" in server.ask("ReceiveMessage", QueueUrl=queue))


@pytest.mark.server("seaweedfs")
def test_a_store_of_objects_asks_for_a_signature():
    with seaweedfs_server() as server:
        assert server.status_of("/") == 403


def test_a_port_is_kept_for_the_server_that_asked_for_it():
    port = machine.free_port(also=10_000)
    assert not is_open(port) and not is_open(port + 10_000)
    assert not machine.reserve(port) and not machine.reserve(port + 10_000)
    with socket.create_server(("127.0.0.1", port)):
        assert is_open(port)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(LIMIT_S)
    while not is_so():
        assert time.monotonic() < deadline
        Event().wait(0.02)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def working_folder(pid: int) -> Path:
    return Path(f"/proc/{pid}/cwd").readlink()
