"""Applies to every test: hypothesis has no deadline, and tests of a missing server are reported as not run."""

import os
from collections import Counter

import pytest
from hypothesis import settings

from running import scaled
from servers.shared import REQUIRED, is_required, stop_all, why_missing

settings.register_profile("keywise", deadline=None, print_blob=True)  # A busy machine is not a bug.
settings.load_profile("keywise")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Commands and workers that a test starts take twice as long under coverage, and reach little that no test reaches.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)

TEST_S = 120.0
"""How long one test may take on a quiet machine."""

NOT_RUN = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests of missing servers, unless all servers are required: then these tests fail by themselves."""
    config.stash[NOT_RUN] = Counter()
    needed = {mark.args[0] for item in items for mark in item.iter_markers("server")}
    missing = {} if is_required() else {server: why for server in needed if (why := why_missing(server))}
    left = []
    for item in items:
        servers = [mark.args[0] for mark in item.iter_markers("server") if mark.args[0] in missing]
        config.stash[NOT_RUN].update(f"{server}: {missing[server]}" for server in servers[:1])
        if not servers:
            left.append(item)
    items[:] = left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Limit the test by how busy the machine is now."""
    item.add_marker(pytest.mark.timeout(scaled(TEST_S)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for why, count in config.stash.get(NOT_RUN, Counter()).items():
        terminalreporter.write_line(f"NOT RUN: {count} tests of {why} ({REQUIRED}=1 makes this a failure)", yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    stop_all()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = dict(session.config.stash.get(NOT_RUN, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Every process that runs tests has collected all of them, so each reports the same counts."""
    not_run = getattr(node, "workeroutput", {}).get("not_run", {})
    node.config.stash[NOT_RUN] = node.config.stash.get(NOT_RUN, Counter()) | Counter(not_run)
