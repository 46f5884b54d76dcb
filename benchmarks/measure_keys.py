"""Postgres: changes per second and delays against the number of keys, drawn evenly or by a zipf law.

The ledger and the table know every key already, so what is measured is their size and not their growth.
With a million keys, they are larger than what the server keeps in memory as it comes: the raw loop shows what that
costs. So what is kept is told twice: with every key known, and as elsewhere, from empty tables on.
"""

import statistics
import sys

from benchmarks.drain import Job
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT
from benchmarks.measure_latency import percentiles
from benchmarks.measure_postgres import drained, durable_server

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.postgres import PostgresServer

FEW_KEYS = 1_000
KEPT = 0.6
"""From a thousand keys to a million, throughput falls by less than 40 %."""
KEPT_TURNS = 3


def measure(scale: Scale) -> list[Figure]:
    try:
        with durable_server() as server:
            return _measure(scale, server)
    except MissingServerError as error:
        return [Figure("throughput kept, all keys known", None, "", str(error), at_least=KEPT)]


def _measure(scale: Scale, server: PostgresServer) -> list[Figure]:
    figures: list[Figure] = []
    speeds: dict[int, float] = {}
    raw_speeds: dict[int, float] = {}
    for distribution in ("uniform", "zipf"):
        for keys in scale.key_counts:
            name = f"{distribution}_{keys}"
            job = Job(scale.changes, keys, scale.batch, distribution)
            raw = drained(server, "raw", f"raw_{name}", job, "--known").changes_per_s
            ours = drained(server, "keywise", name, job, "--known").changes_per_s
            speeds.setdefault(keys, ours)
            raw_speeds.setdefault(keys, raw)
            detail = {"distribution": distribution, "keys": keys, "raw": raw}
            note = f"raw loop: {raw:,.0f} changes/s"
            figures.append(Figure(f"{keys:,} keys, {distribution}", ours, "changes/s", note, detail=detail))
            if distribution == "uniform":
                figures += _delays(scale, server, name, keys)
    most = max(speeds)
    kept, raw_kept = speeds[most] / speeds[FEW_KEYS], raw_speeds[most] / raw_speeds[FEW_KEYS]
    note = f"{most:,} keys beside {FEW_KEYS:,}, all of them known; the raw loop keeps {raw_kept:.2f}"
    return [
        *figures,
        _kept(scale, server, most),
        Figure("throughput kept, all keys known", kept, "", note, at_least=KEPT),
    ]


def _kept(scale: Scale, server: PostgresServer, most: int) -> Figure:
    """By turns with few keys and with many, from empty tables on."""
    speeds: dict[int, list[float]] = {FEW_KEYS: [], most: []}
    for turn in range(KEPT_TURNS):
        for keys, found in speeds.items():
            job = Job(scale.changes, keys, scale.batch, "uniform")
            found.append(drained(server, "keywise", f"fresh_{keys}_{turn}", job).changes_per_s)
    few, many = statistics.median(speeds[FEW_KEYS]), statistics.median(speeds[most])
    note = f"{most:,} keys: {many:,.0f} changes/s beside {FEW_KEYS:,}: {few:,.0f}, from empty tables on"
    return Figure("throughput kept, keys drawn from so many", many / few, "", note, at_least=KEPT)


def _delays(scale: Scale, server: PostgresServer, name: str, keys: int) -> list[Figure]:
    url = server.url.removesuffix("postgres") + name
    arguments = ["keywise", "--url", url, "--keys", str(keys), "--from-version", str(scale.changes)]
    return percentiles(scale, "benchmarks.latency_postgres", arguments, f"{keys:,} keys")
