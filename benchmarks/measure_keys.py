"""Postgres: changes per second and delays against the number of keys, drawn evenly or by a zipf law.

The ledger and the table know every key already, so what is measured is their size and not their growth.
"""

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


def measure(scale: Scale) -> list[Figure]:
    try:
        with durable_server() as server:
            return _measure(scale, server)
    except MissingServerError as error:
        return [Figure("throughput kept with many keys", None, "", str(error), at_least=KEPT)]


def _measure(scale: Scale, server: PostgresServer) -> list[Figure]:
    figures: list[Figure] = []
    speeds: dict[int, float] = {}
    for distribution in ("uniform", "zipf"):
        for keys in scale.key_counts:
            name = f"{distribution}_{keys}"
            job = Job(scale.changes, keys, scale.batch, distribution)
            raw = drained(server, "raw", f"raw_{name}", job, "--known").changes_per_s
            ours = drained(server, "keywise", name, job, "--known").changes_per_s
            speeds.setdefault(keys, ours)
            detail = {"distribution": distribution, "keys": keys, "raw": raw}
            note = f"raw loop: {raw:,.0f} changes/s"
            figures.append(Figure(f"{keys:,} keys, {distribution}", ours, "changes/s", note, detail=detail))
            if distribution == "uniform":
                figures += _delays(scale, server, name, keys)
    kept = speeds[max(speeds)] / speeds[FEW_KEYS]
    note = f"{max(speeds):,} keys beside {FEW_KEYS:,}"
    return [*figures, Figure("throughput kept with many keys", kept, "", note, at_least=KEPT)]


def _delays(scale: Scale, server: PostgresServer, name: str, keys: int) -> list[Figure]:
    url = server.url.removesuffix("postgres") + name
    arguments = ["keywise", "--url", url, "--keys", str(keys), "--from-version", str(scale.changes)]
    return percentiles(scale, "benchmarks.latency_postgres", arguments, f"{keys:,} keys")
