"""The processes of the example: desks that share one schedule, and a Postgres if one is wanted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from examples.scheduling.desk import STORE_VARIABLE, TURNS_VARIABLE

ENDPOINT = Path(__file__).parent / "endpoint.py"


class DeskError(Exception):
    """A desk that could not be started; it has said itself why."""


@contextmanager
def started_postgres() -> Iterator[str]:
    """The URL of a database in a PostgreSQL of its own, as the tests start it."""
    from servers.postgres import postgres_server

    with postgres_server() as server:
        yield server.create_database("scheduling")


@contextmanager
def started_desks(count: int, store: str, turns: str, *, is_naive: bool) -> Iterator[list[str]]:
    """The URLs of processes that know nothing of each other; they end with whoever has started them."""
    # The URL of the store may hold a password, which must not show in the list of processes.
    environment = {**os.environ, STORE_VARIABLE: store, TURNS_VARIABLE: turns}
    command = [sys.executable, str(ENDPOINT), "--attached", *(["--naive"] if is_naive else [])]
    with ExitStack() as stack:
        desks = [
            stack.enter_context(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(count)
        ]
        urls = [desk.stdout.readline().strip() for desk in desks if desk.stdout is not None]
        if not all(urls):
            raise DeskError("a desk could not be started; see above what it said")
        yield urls
