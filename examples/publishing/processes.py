"""The processes between and around the pipelines: the store, the workers, and real servers if they are wanted."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.publishing.place import Place

HERE = Path(__file__).parent
INDEX = "documents"


@contextmanager
def started_store() -> Iterator[int]:
    """The port of the store that is rate limited."""
    command = [sys.executable, str(HERE / "store.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


@contextmanager
def started_broker() -> Iterator[str]:
    """The URL of a RabbitMQ of its own, as the tests start it."""
    from servers.rabbitmq import rabbit_server

    with rabbit_server() as broker:
        yield broker.url


@contextmanager
def started_search() -> Iterator[str]:
    """The URL of an index in an OpenSearch of its own, as the tests start it."""
    from servers.opensearch import opensearch_server

    with opensearch_server() as engine:
        types = {"title": "text", "text": "text", "links": "keyword", "payload_version": "long"}
        yield engine.index(INDEX, types, refresh_interval="200ms")


@contextmanager
def started_workers(count: int, place: Place) -> Iterator[None]:
    """As on a server: processes that know nothing of each other."""
    command = [sys.executable, "-m", "keywise", "run", f"{HERE / 'pipelines.py'}:app", "--plain"]
    environment = {**os.environ, **place.variables, "PYTHONPATH": str(HERE.parents[1])}
    output: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            workers.append(subprocess.Popen(command, env=environment, **output))
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
