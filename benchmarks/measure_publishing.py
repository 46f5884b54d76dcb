"""Publishing: how soon a live document can be found beside a resync, and RabbitMQ to Postgres beside locks in Redis."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import msgspec

from benchmarks.drain import Drained
from benchmarks.figure import Figure, Scale
from benchmarks.latency import READY
from benchmarks.machine import ROOT, Bystander, run_module
from benchmarks.measure_opensearch import AS_IT_COMES
from benchmarks.publishing import RESYNC, Place

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.opensearch import HEAP, OpenSearchServer, opensearch_server
from servers.postgres import postgres_server
from servers.rabbitmq import RabbitServer, rabbit_server
from servers.redis import redis_server

RATE = 100
FRESH_MS = 1_000.0
REFRESH = "200ms"
LOOK_S = 0.02
HOPELESS_S = 60.0
TIMES_THE_LOCKS = 5.0
FIELDS = {"content_id": "keyword", "payload_version": "long", "document_type": "keyword", "number": "long"}


def measure(scale: Scale) -> list[Figure]:
    try:
        with rabbit_server(scratch=None) as broker:
            return [*_freshness(scale, broker), *_beside_locks(scale, broker)]
    except MissingServerError as error:
        return [Figure("live p99, published to searchable", None, "ms", str(error), at_most=FRESH_MS)]


def _freshness(scale: Scale, broker: RabbitServer) -> list[Figure]:
    with redis_server(None) as ledger, opensearch_server(None, jvm=HEAP, **AS_IT_COMES) as engine:
        index = engine.index("pages", FIELDS, refresh_interval=REFRESH)
        live = round(RATE * scale.latency_s)
        place = Place(broker.url, redis=ledger.url, index=index, live=live, rate=RATE, changes=scale.changes)
        run_module("benchmarks.publishing", ["resync", *place.arguments()])
        with Bystander() as bystander, _working(place), ThreadPoolExecutor(1) as thread:
            publishing = thread.submit(run_module, "benchmarks.publishing", ["publish", *place.arguments()])
            seen = _searched(engine, live)
            due: list[float] = publishing.result()
            left = broker.messages(RESYNC)
    delays_ms = [1000 * (seen[number] - due[number]) for number in range(live)]
    hundredths = statistics.quantiles(delays_ms, n=100)
    note = (
        f"{RATE} live events/s beside a resync of {scale.changes:,} documents, of which {left:,} were left at the end"
    )
    detail = {"live": live, "max_ms": max(delays_ms), "left": left, "others": bystander.others}
    return [
        Figure("live p50, published to searchable", hundredths[49], "ms", f"refreshed every {REFRESH}", detail=detail),
        Figure("live p99, published to searchable", hundredths[98], "ms", note, at_most=FRESH_MS),
    ]


@contextmanager
def _working(place: Place) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.publishing", "work", *place.arguments()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            if worker.stdout.readline().strip() != READY:
                raise RuntimeError("the worker did not start")
            yield
        finally:
            worker.terminate()


def _searched(engine: OpenSearchServer, live: int) -> dict[int, float]:
    """When a search found each live document first."""
    seen: dict[int, float] = {}
    lowest, give_up_at = 0, time.monotonic() + HOPELESS_S
    while len(seen) < live:
        query = {"size": 1000, "_source": ["number"], "query": {"range": {"number": {"gte": lowest}}}}
        hits = engine.ask("POST", "/pages/_search", query)["hits"]["hits"]
        now = time.monotonic()
        for hit in hits:
            seen.setdefault(hit["_source"]["number"], now)
        while lowest in seen:
            lowest += 1
        if now > give_up_at:
            raise RuntimeError(f"only {len(seen)} of {live} live documents can be found")
        time.sleep(LOOK_S)
    return seen


def _beside_locks(scale: Scale, broker: RabbitServer) -> list[Figure]:
    """By turns; the design with locks gets a fifth of the changes, because it takes longer."""
    turns: dict[str, list[Drained]] = {"locks": [], "drain": []}
    with ExitStack() as servers, Bystander() as bystander:
        store, coordination = servers.enter_context(postgres_server(None)), servers.enter_context(redis_server(None))
        for turn in range(min(3, scale.rounds)):
            for what, done in turns.items():
                changes = scale.changes // 5 if what == "locks" else scale.changes
                url = store.create_database(f"{what}_{turn}")
                place = Place(broker.url, coordination.url, url, changes=changes, keys=scale.keys, batch=scale.batch)
                run_module("benchmarks.publishing", ["fill", *place.arguments()])
                done.append(msgspec.convert(run_module("benchmarks.publishing", [what, *place.arguments()]), Drained))
    locks, ours = (statistics.median(one.changes_per_s for one in done) for done in turns.values())
    detail = {"turns": turns, "others": bystander.others}
    return [
        Figure("RabbitMQ to Postgres, lock and latest in Redis", locks, "changes/s", "16 side by side, one process"),
        Figure("RabbitMQ to Postgres, keywise", ours, "changes/s", "one process"),
        Figure("keywise / locks, RabbitMQ to Postgres", ours / locks, "×", at_least=TIMES_THE_LOCKS, detail=detail),
    ]
